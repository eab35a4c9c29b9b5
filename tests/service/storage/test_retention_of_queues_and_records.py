"""Retention of inactive queues and of old records (R3, R4)."""

import pytest

from tests.support.exchange_client import ExchangeClient, append, operation
from tests.support.retention_calls import (
    FOREVER_MS,
    Planned,
    apply,
    apply_parts,
    figure,
    history,
    part_of,
    settled,
    table,
)
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON
from tidemark.api.storage.v1.exchange_pb2 import Materialize, Purge, TakeOwnership
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_INACTIVE_QUEUE,
    RETENTION_TYPE_OLD_RECORDS,
    SCAN_TABLE_NAME_HISTORY,
    SCAN_TABLE_NAME_MESSAGES_CONSUMED,
    SCAN_TABLE_NAME_QUEUES,
    SCAN_TABLE_NAME_RUNS,
    SCAN_TABLE_NAME_SYSTEM_METRICS,
    RecordMetricsRequest,
)
from tidemark.clock import ManualClock

CLIENT_TIMEOUT_MS = 30_000
DAY_MS = 86_400_000


async def test_an_inactive_queue_is_removed_unless_something_happened_since(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R3: checked again at the moment of deletion."""
    await exchange.ask_all(append("jobs/idle", b"x"), append("jobs/used", b"x"))
    await settled(exchange, "jobs/idle")
    await settled(exchange, "jobs/used")
    planned = [
        Planned(
            queue_id=row["queue_id"],
            lmq_name=row["lmq_name"],
            before_ms=int(row["last_activity"].timestamp() * 1000),
            age_ms=1,
        )
        for row in await table(storage, SCAN_TABLE_NAME_QUEUES)
    ]
    await clock.advance_ms(CLIENT_TIMEOUT_MS)
    await exchange.ask(append("jobs/used", b"y"))
    await settled(exchange, "jobs/used")

    applied = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, *planned)

    assert applied == (0, 1, 1)
    assert (await history(storage))[0][0] == "jobs/idle"
    with pytest.raises(errors.QueueNotFound):
        await storage.queue("jobs/idle")


async def test_a_queue_with_messages_is_never_inactive(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R3, R9: scheduled ones count."""
    full = await exchange.ask(append("jobs/full", b"x"))
    waiting = await exchange.ask(append("jobs/waiting", b"x", delay_ms=1000))
    rows = [
        Planned(queue_id=each.queue_id, lmq_name="jobs", before_ms=FOREVER_MS, age_ms=1)
        for each in (full, waiting)
    ]

    assert await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, *rows) == (0, 0, 2)


async def test_old_records_leave_by_their_time(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R4."""
    await storage.update_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    await exchange.ask(append("jobs", b"x"))
    await settled(exchange, "jobs")
    old_ms = clock.wall_ms() + 1
    await clock.advance_ms(1000)
    await exchange.ask(append("jobs", b"y"))
    await settled(exchange, "jobs")
    row = Planned(table=SCAN_TABLE_NAME_MESSAGES_CONSUMED, age_ms=clock.wall_ms() - old_ms)

    applied = await apply(storage, RETENTION_TYPE_OLD_RECORDS, row)
    repeated = await apply(storage, RETENTION_TYPE_OLD_RECORDS, row)

    assert (applied, repeated) == ((1, 0, 0), (0, 0, 1))
    (left,) = await table(storage, SCAN_TABLE_NAME_MESSAGES_CONSUMED)
    assert left["start"] == 1
    assert await history(storage) == [
        ("messages_consumed", 1, RETENTION_TYPE_OLD_RECORDS, "pass-1")
    ]


async def test_old_history_leaves_too(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R4."""
    await exchange.ask(append("jobs", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs")))
    await clock.advance_ms(1000)
    row = Planned(table=SCAN_TABLE_NAME_HISTORY, age_ms=1)

    assert await apply(storage, RETENTION_TYPE_OLD_RECORDS, row) == (1, 0, 0)
    assert await history(storage) == [("history", 1, RETENTION_TYPE_OLD_RECORDS, "pass-1")]


async def test_more_old_records_than_one_commit_takes_are_told_of(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R4: a pass repeats its row until nothing is left."""
    figures = [figure(f"figure-{number}") for number in range(1000)]
    for _ in range(2):
        await storage.retention.RecordMetrics(RecordMetricsRequest(rows=figures))
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=figures[:1]))
    await clock.advance_ms(1)
    row = Planned(table=SCAN_TABLE_NAME_SYSTEM_METRICS, age_ms=1)
    part = part_of(RETENTION_TYPE_OLD_RECORDS, [row])

    applied = [(await apply_parts(storage.retention, part))[0] for _ in range(2)]

    assert [(each.messages, each.more) for each in applied] == [(2000, True), (1, False)]
    assert await table(storage, SCAN_TABLE_NAME_SYSTEM_METRICS) == []


async def test_a_refused_call_changes_nothing(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3, R6: no deletion without its row of history."""
    await storage.update_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    await exchange.ask(append("jobs", b"x"))
    await settled(exchange, "jobs")
    rows = [
        Planned(table=name, age_ms=1)
        for name in (SCAN_TABLE_NAME_MESSAGES_CONSUMED, SCAN_TABLE_NAME_RUNS)
    ]

    with pytest.raises(errors.InvalidArgument):
        await apply(storage, RETENTION_TYPE_OLD_RECORDS, *rows)

    assert len(await table(storage, SCAN_TABLE_NAME_MESSAGES_CONSUMED)) == 1


def inactive(queue_id: int, age_ms: int = 1) -> Planned:
    return Planned(queue_id=queue_id, lmq_name="jobs/idle", before_ms=FOREVER_MS, age_ms=age_ms)


@pytest.mark.parametrize("returns", [True, False])
async def test_no_queue_is_inactive_until_clients_could_return_to_a_new_broker(
    storage: RunningStorage, clock: ManualClock, returns: bool
) -> None:
    """R3, E10: the owner of an exclusive queue resyncs; one that does not return keeps nothing."""
    async with storage.exchange() as before:
        taken = TakeOwnership(lmq_name="jobs/idle", group="default", client_id="ada")
        await before.ask(operation(take_ownership=taken))
        found = await before.ask(operation(materialize=Materialize(lmq_name="jobs/idle")))
        await clock.advance_ms(CLIENT_TIMEOUT_MS)
        owned = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, inactive(found.queue_id))
    away = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, inactive(found.queue_id))

    async with storage.exchange(incarnation=8, broker_id="broker-b") as after:
        await clock.advance_ms(CLIENT_TIMEOUT_MS - 1)
        early = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, inactive(found.queue_id))
        if returns:
            await after.ask(operation(materialize=Materialize(lmq_name="jobs/idle")))
        await clock.advance_ms(1)
        (planned,) = await table(storage, SCAN_TABLE_NAME_QUEUES)
        late = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, inactive(found.queue_id))

    assert owned == away == early == (0, 0, 1)
    assert planned["in_use"] is returns
    assert late == ((0, 0, 1) if returns else (0, 1, 0))


async def test_a_broker_states_how_long_its_clients_may_be_silent(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R3."""
    async with storage.exchange(client_timeout_ms=60_000) as exchange:
        idle = await exchange.ask(append("jobs/idle", b"x"))
        await settled(exchange, "jobs/idle")
        applied = []
        for _ in range(2):
            await clock.advance_ms(CLIENT_TIMEOUT_MS)
            row = inactive(idle.queue_id)
            applied.append(await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, row))

    assert applied == [(0, 0, 1), (0, 1, 0)]


async def test_the_clock_of_storage_decides_what_is_old(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R3, R4, R9: a plan by a clock that is 100 days ahead deletes nothing young."""
    idle = await exchange.ask(append("jobs/idle", b"x"))
    await settled(exchange, "jobs/idle")
    await clock.advance_ms(CLIENT_TIMEOUT_MS)
    ahead_ms = clock.wall_ms() + 100 * DAY_MS
    queue = Planned(
        queue_id=idle.queue_id, lmq_name="jobs/idle", before_ms=ahead_ms, age_ms=7 * DAY_MS
    )
    records = Planned(
        table=SCAN_TABLE_NAME_MESSAGES_CONSUMED, before_ms=ahead_ms, age_ms=90 * DAY_MS
    )

    removed = await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, queue)
    erased = await apply(storage, RETENTION_TYPE_OLD_RECORDS, records)

    assert removed == erased == (0, 0, 1)
    (planned,) = await table(storage, SCAN_TABLE_NAME_QUEUES)
    assert planned["age_ms"] == CLIENT_TIMEOUT_MS
    assert await table(storage, SCAN_TABLE_NAME_QUEUES, age_ms_min=CLIENT_TIMEOUT_MS + 1) == []
    assert len(await table(storage, SCAN_TABLE_NAME_QUEUES, age_ms_min=CLIENT_TIMEOUT_MS)) == 1
