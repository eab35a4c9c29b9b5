"""`python -m storage_svc`: reads the settings, wires the service, serves until a signal."""

from storage_svc.app import storage
from tidemark.service.process import main
from tidemark.settings import StorageSettings

if __name__ == "__main__":
    main("tidemark-storage", StorageSettings, storage)
