"""`python -m lifecycle_svc`: load settings, serve until a signal."""

from tidemark.settings import LifecycleSettings, turn_off_grpc_event_engine

turn_off_grpc_event_engine()  # before anything imports gRPC

from lifecycle_svc.app import lifecycle  # noqa: E402
from tidemark.service.process import main  # noqa: E402

if __name__ == "__main__":
    main("tidemark-lifecycle", LifecycleSettings, lifecycle)
