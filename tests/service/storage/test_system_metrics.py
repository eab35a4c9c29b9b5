"""Figures of services, stored as rows of system metrics (R12)."""

import pytest

from tests.support.retention_calls import figure, table
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.storage.v1.retention_pb2 import (
    SCAN_TABLE_NAME_SYSTEM_METRICS,
    MetricRow,
    RecordMetricsRequest,
)
from tidemark.clock import ManualClock


async def test_figures_of_services_are_stored_as_rows_of_system_metrics(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R12, R4: by `timestamp`, over a restart."""
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure("sessions")]))
    await clock.advance_ms(30_000)
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure("sessions")]))
    await storage.restart()

    first, second = await table(storage, SCAN_TABLE_NAME_SYSTEM_METRICS)

    assert (second["timestamp"] - first["timestamp"]).total_seconds() == 30
    del first["timestamp"]
    assert first == {
        "partition": 0,
        "instance": "broker-0",
        "name": "sessions",
        "samples": 60,
        "min": 1.0,
        "max": 4.0,
        "mean": 2.5,
        "last": 3.0,
    }


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "INVALID_ARGUMENT"),
        ([figure("")], "INVALID_ARGUMENT"),
        ([figure("x", instance="")], "INVALID_ARGUMENT"),
        ([figure("x" * 129)], "INVALID_ARGUMENT"),
        ([figure("x")] * 1001, "BATCH_TOO_LARGE"),
    ],
)
async def test_figures_that_cannot_be_are_refused(
    storage: RunningStorage, rows: list[MetricRow], reason: str
) -> None:
    """S3."""
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure("x" * 128)] * 1000))

    with pytest.raises(errors.TidemarkError) as refused:
        await storage.retention.RecordMetrics(RecordMetricsRequest(rows=rows))

    assert refused.value.reason == reason
    assert len(await table(storage, SCAN_TABLE_NAME_SYSTEM_METRICS)) == 1000
