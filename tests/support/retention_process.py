"""The retention scheduler in a process of its own, for tests."""

from pathlib import Path

from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess


def retention_process(storage_address: str, log_file: Path, **settings: str) -> ServiceProcess:
    """A scheduler, not yet started; settings by their last words."""
    address = free_address()
    return ServiceProcess(
        "retention",
        "spark_batch",
        address=address,
        health_service="tidemark.api.lifecycle.v1.JobService",
        arguments=["serve"],
        environment={
            "TIDEMARK_STORAGE_ADDRESSES": storage_address,
            "TIDEMARK_RETENTION_LISTEN": address,
            "TIDEMARK_LOG_FORMAT": "text",
            **{f"TIDEMARK_{name.upper()}": value for name, value in settings.items()},
        },
        log_file=log_file,
    )
