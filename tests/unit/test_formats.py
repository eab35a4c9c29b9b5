"""The format of stored data, which storage writes and the retention jobs must know."""

from spark_batch.storage_client import FORMAT_VERSION as KNOWN_TO_JOBS
from storage_svc.engines.engine import FORMAT_VERSION


def test_the_jobs_know_the_format_that_storage_writes() -> None:
    """R11: a pass checks the format first, and would refuse its own storage."""
    assert KNOWN_TO_JOBS == FORMAT_VERSION
