"""The history of what was deleted for good, newest first (R6)."""

from typing import Any

import pytest

from tests.support.retention_calls import history
from tests.support.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    operation,
    reserve,
    settle,
)
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import SETTLE_ACTION_DEAD_LETTER, Purge
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ATTEMPTS_EXHAUSTED,
    RETENTION_TYPE_PURGE,
    RETENTION_TYPE_TIME_TO_LIVE,
    ListRetentionHistoryRequest,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_DEAD_DEADLINES
from tidemark.clock import ManualClock


async def test_everything_that_is_deleted_for_good_leaves_a_row(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6, L6: purge, time to live, rejected without a dead-letter topic."""
    await exchange.ask(append("jobs/purged", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs/purged")))
    await clock.advance_ms(1)
    await exchange.ask(append("jobs/rejected", b"x"))
    (got,) = (await exchange.ask(reserve("jobs/rejected"))).slices
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    await exchange.ask(append("jobs/late", b"x", ttl_ms=10))
    await clock.advance_ms(10)
    (bury,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await exchange.ask(operation(action=bury))

    rows = await history(storage)

    assert [row[:3] for row in rows] == [
        ("jobs/late", 1, RETENTION_TYPE_TIME_TO_LIVE),
        ("jobs/rejected", 1, RETENTION_TYPE_ATTEMPTS_EXHAUSTED),
        ("jobs/purged", 1, RETENTION_TYPE_PURGE),
    ]
    assert await history(storage, type=RETENTION_TYPE_PURGE) == rows[2:]


async def test_history_is_paged_newest_first_over_all_partitions(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """R6: the newest 100 first."""
    storage = await start_storage(partitions=2)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        for number in range(101):
            await exchange.ask(append(f"jobs/{number}", b"x"))
            await exchange.ask(operation(purge=Purge(lmq_name=f"jobs/{number}")))
            await clock.advance_ms(1)

    first = await storage.retention.ListRetentionHistory(ListRetentionHistoryRequest())
    request = ListRetentionHistoryRequest(page_token=first.next_page_token)
    second = await storage.retention.ListRetentionHistory(request)

    names = [row.lmq_name for row in (*first.rows, *second.rows)]
    assert names == [f"jobs/{number}" for number in reversed(range(101))]
    assert (len(first.rows), second.next_page_token) == (100, "")
    assert await history(storage, partition=1) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": limits.PAGE_SIZE_MAX + 1}, "INVALID_ARGUMENT"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
        pytest.param(
            {"page_token": "x"},
            "INVALID_ARGUMENT",
        ),
        pytest.param({"page_token": "\u00b2"}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_page_of_history_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    assert await history(storage, page_size=limits.PAGE_SIZE_MAX) == []

    with pytest.raises(errors.TidemarkError) as refused:
        await history(storage, **fields)

    assert refused.value.reason == reason
