"""`python -m lifecycle_svc`: load settings, serve until a signal."""

from lifecycle_svc.app import lifecycle
from tidemark.service.process import main
from tidemark.settings import LifecycleSettings

if __name__ == "__main__":
    main("tidemark-lifecycle", LifecycleSettings, lifecycle)
