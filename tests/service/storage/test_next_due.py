"""When a rule of retention can next apply, as storage answers it without scanning (P3)."""

from typing import Any

import pytest

from storage_svc.engines.engine import Table
from tests.support.counted_reads import count_reads
from tests.support.exchange_client import ExchangeClient, append, operation, reserve, settle
from tests.support.retention_calls import figure, settled, table
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON
from tidemark.api.storage.v1.exchange_pb2 import (
    Materialize,
    PauseQueue,
    PlaceGroup,
    Purge,
    RemoveGroup,
)
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_COMPLETED,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_INACTIVE_QUEUE,
    RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    RETENTION_TYPE_OLD_RECORDS,
    RETENTION_TYPE_PURGE,
    SCAN_TABLE_NAME_HISTORY,
    SCAN_TABLE_NAME_MESSAGES_CONSUMED,
    SCAN_TABLE_NAME_QUEUES,
    SCAN_TABLE_NAME_RUNS,
    SCAN_TABLE_NAME_SYSTEM_METRICS,
    NextDueRequest,
    RecordMetricsRequest,
    RetentionType,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_SCHEDULES_DUE
from tidemark.clock import ManualClock

RETENTION = (RETENTION_TYPE_EXPIRED, RETENTION_TYPE_COMPLETED)
EVICTION = (RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,)
CLIENT_TIMEOUT_MS = 30_000
HOUR_MS = 3_600_000
NEVER = None


async def due_in(
    storage: RunningStorage, *types: RetentionType.ValueType, **ages: int
) -> int | None:
    """Time until a rule can apply in partition 0; `NEVER` for nothing that is stored."""
    (found,) = await ask(storage, *types, **ages)
    assert not found.error
    assert (found.due_in_ms == 0) == bool(found.due_types) or not found.HasField("due_in_ms")
    return found.due_in_ms if found.HasField("due_in_ms") else NEVER


async def ask(storage: RunningStorage, *types: RetentionType.ValueType, **ages: int) -> Any:
    return (await storage.retention.NextDue(NextDueRequest(types=types, **ages))).partitions


async def due_offsets(storage: RunningStorage, *types: RetentionType.ValueType) -> list[int]:
    found = await table(storage, SCAN_TABLE_NAME_RUNS, due_types=types)
    return [row["first_offset"] for row in found]


async def test_the_oldest_message_of_the_strictest_topic_decides(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3: also for a limit that was set after the messages were published."""
    await storage.create_topic("slow", retention_enabled=True, retention_seconds=100)
    await storage.create_topic("free", retention_enabled=True)
    await exchange.ask_all(append("slow/a", b"x"), append("free/a", b"x"))
    await clock.advance_ms(1_000)
    await exchange.ask(append("slow/a", b"later"))

    by_slow = await due_in(storage, *RETENTION)
    await storage.update_topic("free", retention_enabled=True, retention_seconds=10)
    by_free = await due_in(storage, *RETENTION)
    await clock.advance_ms(9_000)
    (found,) = await ask(storage, *RETENTION)

    assert (by_slow, by_free) == (99_000, 9_000)
    assert found.due_in_ms == 0
    assert tuple(found.due_types) == RETENTION
    assert await due_in(storage, *EVICTION) is NEVER


async def test_nothing_due_reads_nothing_however_much_is_stored(
    storage: RunningStorage, exchange: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: but the first row of the index, once."""
    await storage.create_topic("slow", retention_enabled=True, retention_seconds=100)
    await exchange.ask_all(*(append(f"slow/{n}", b"x") for n in range(500)))
    reads = count_reads(monkeypatch)
    commits = (await storage.info()).commits

    assert await due_in(storage, *RETENTION) == 100_000
    assert await table(storage, SCAN_TABLE_NAME_RUNS, due_types=RETENTION) == []
    assert await due_in(storage, *RETENTION) == 100_000
    assert reads == {Table.AGES: 1}
    assert (await storage.info()).commits == commits


async def test_messages_that_were_consumed_are_due_no_more(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3: the bound of their queue is found out of date once, and moved."""
    await storage.create_topic("wait", max_wait_time_seconds=10)
    await exchange.ask(append("wait/a", b"x"))
    await clock.advance_ms(4_000)
    await exchange.ask(append("wait/a", b"y"))
    (first, second) = (await exchange.ask(reserve("wait/a"))).slices
    await exchange.ask(settle(first.receipt))
    await clock.advance_ms(6_000)

    assert await due_in(storage, *EVICTION) == 4_000
    await exchange.ask(settle(second.receipt))
    await clock.advance_ms(4_000)
    assert await due_in(storage, *EVICTION) is NEVER
    await exchange.ask(append("wait/a", b"z"))
    assert await due_in(storage, *EVICTION) == 10_000


async def test_messages_count_as_completed_from_their_settlement_on(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, R2: unsettled messages past the limit are not due, and cost nothing with every pass."""
    await storage.create_topic("done", retention_enabled=True, completed_retention_seconds=10)
    for group in ("one", "two"):
        place = PlaceGroup(lmq_name="done/a", group=group)
        await exchange.ask(operation(place_group=place))
    await exchange.ask(append("done/a", b"x"))
    await clock.advance_ms(20_000)

    before = await due_in(storage, *RETENTION)
    await settled(exchange, "done/a", "one")
    half = await due_in(storage, *RETENTION)
    await settled(exchange, "done/a", "two")
    after = await due_in(storage, *RETENTION)
    start = PlaceGroup(lmq_name="done/a", group="two", start=StartPosition(earliest=True))
    await exchange.ask(operation(place_group=start))
    again = await due_in(storage, *RETENTION)
    await exchange.ask(operation(remove_group=RemoveGroup(lmq_name="done/a", group="two")))
    without = await due_in(storage, *RETENTION)

    assert (before, half, after) == (NEVER, NEVER, 0)
    assert (again, without) == (NEVER, 0)


async def test_settled_messages_that_are_kept_do_not_wait(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, R5: until a group starts over."""
    await storage.create_topic("kept", retention_enabled=True, max_wait_time_seconds=10)
    await exchange.ask(append("kept/a", b"x"))
    await settled(exchange, "kept/a")
    await clock.advance_ms(10_000)

    assert await due_in(storage, *EVICTION) is NEVER
    start = PlaceGroup(lmq_name="kept/a", group="default", start=StartPosition(earliest=True))
    await exchange.ask(operation(place_group=start))
    assert await due_in(storage, *EVICTION) == 0
    assert await due_offsets(storage, *EVICTION) == [0]


async def test_a_reserved_message_is_due_once_it_is_given_back(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, R1: until then storage asks to be asked again."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    await exchange.ask(append("old/a", b"x"))
    await exchange.ask(reserve("old/a", visibility_ms=HOUR_MS))
    await clock.advance_ms(20_000)

    held = await due_in(storage, *RETENTION)
    await clock.advance_ms(HOUR_MS)
    await exchange.ask(append("old/b", b"expires what is due"))
    given_back = await due_in(storage, *RETENTION)

    assert held == 60_000
    assert given_back == 0


async def test_a_scheduled_message_is_as_old_as_its_publish(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """P3, R1: it lies behind younger ones in its queue, and is found."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    async with storage.exchange() as exchange:
        await exchange.ask(append("old/a", b"planned", delay_ms=9_000))
        await clock.advance_ms(9_000)
        await exchange.ask(append("old/a", b"young"))
    await storage.delegate(*(await storage.due(SCAN_KIND_SCHEDULES_DUE)))
    await clock.advance_ms(1_000)

    assert await due_in(storage, *RETENTION) == 0
    assert await due_offsets(storage, *RETENTION) == [1]


async def test_a_scan_of_what_is_due_reads_only_the_topics_and_runs_that_are(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3: each topic by its own limit; in every lane the first runs."""
    await storage.create_topic("soon", retention_enabled=True, retention_seconds=1)
    await storage.create_topic("late", retention_enabled=True, retention_seconds=100)
    for lmq_name in ("soon/a", "late/a"):
        await exchange.ask(append(lmq_name, b"x", fairness_key="k"))
        await exchange.ask(append(lmq_name, b"y"))
    await exchange.ask(append("soon/single", b"x"))
    await clock.advance_ms(1_000)
    await exchange.ask(append("soon/a", b"young"))

    found = await table(storage, SCAN_TABLE_NAME_RUNS, due_types=RETENTION)

    due = {(row["lmq_name"], row["fairness_key"], row["first_offset"]) for row in found}
    assert due == {("soon/a", "k", 0), ("soon/a", "", 1), ("soon/single", "", 0)}
    assert len(found) == len(due)


async def test_a_queue_is_inactive_once_it_is_empty_unused_and_old(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, R3: with messages, never; in use, not while it is."""
    kind = RETENTION_TYPE_INACTIVE_QUEUE
    await exchange.ask_all(append("jobs/empty", b"x"), append("jobs/full", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs/empty")))
    used = Materialize(lmq_name="jobs/used", create=True)
    await exchange.ask(operation(materialize=used))

    young = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)
    await clock.advance_ms(HOUR_MS)
    old = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)
    wanted = {"due_types": [kind], "age_ms_min": HOUR_MS}
    found = await table(storage, SCAN_TABLE_NAME_QUEUES, **wanted)
    await exchange.ask(append("jobs/empty", b"again"))
    after = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)

    assert (young, old, after) == (HOUR_MS, 0, HOUR_MS)
    assert {row["lmq_name"] for row in found} >= {"jobs/empty"}
    assert await due_in(storage, kind) is NEVER


async def test_a_paused_queue_is_never_inactive(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L10, R3: it would be created again without its pause."""
    kind = RETENTION_TYPE_INACTIVE_QUEUE
    await exchange.ask(append("jobs/empty", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs/empty")))
    await exchange.ask(operation(pause_queue=PauseQueue(lmq_name="jobs/empty", paused=True)))
    await clock.advance_ms(2 * HOUR_MS)

    paused = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)
    await exchange.ask(operation(pause_queue=PauseQueue(lmq_name="jobs/empty")))
    await clock.advance_ms(2 * HOUR_MS)
    resumed = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)

    assert paused != 0
    assert resumed == 0


async def test_no_queue_is_due_before_storage_knows_the_clients(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R3: after a broker has claimed the partition."""
    kind = RETENTION_TYPE_INACTIVE_QUEUE
    async with storage.exchange() as exchange:
        used = Materialize(lmq_name="jobs/a", create=True)
        await exchange.ask(operation(materialize=used))
    await clock.advance_ms(HOUR_MS)

    async with storage.exchange():
        early = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)
        await clock.advance_ms(CLIENT_TIMEOUT_MS)
        known = await due_in(storage, kind, inactive_queue_age_ms=HOUR_MS)

    assert early == 60_000
    assert known == 0


async def test_old_records_are_due_by_table(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, R4."""
    await storage.update_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    kind = RETENTION_TYPE_OLD_RECORDS
    await exchange.ask(append("jobs", b"x"))
    await settled(exchange, "jobs")
    await clock.advance_ms(1_000)
    await exchange.ask(append("jobs", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs")))
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure("up")]))

    young = await due_in(storage, kind, old_records_age_ms=10_000)
    await clock.advance_ms(9_000)
    (first,) = await ask(storage, kind, old_records_age_ms=10_000)
    await clock.advance_ms(1_000)
    (all_three,) = await ask(storage, kind, old_records_age_ms=10_000)

    assert young == 9_000
    assert list(first.due_tables) == [SCAN_TABLE_NAME_MESSAGES_CONSUMED]
    assert set(all_three.due_tables) == {
        SCAN_TABLE_NAME_MESSAGES_CONSUMED,
        SCAN_TABLE_NAME_SYSTEM_METRICS,
        SCAN_TABLE_NAME_HISTORY,
    }


async def test_a_review_leaves_no_queue_loaded(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """P3, I9: what it had to load is unloaded with the commit."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    await exchange.ask(append("old/a", b"x"))
    await clock.advance_ms(10_000)
    await storage.restart()

    due = await due_in(storage, *RETENTION)

    (queue,) = await table(storage, SCAN_TABLE_NAME_QUEUES)
    assert (due, queue["materialized"]) == (0, False)


@pytest.mark.parametrize("types", [(), (RETENTION_TYPE_PURGE,), (RetentionType.ValueType(99),)])
async def test_only_rules_of_passes_can_be_asked_for(
    storage: RunningStorage, types: tuple[RetentionType.ValueType, ...]
) -> None:
    """R6: the types are closed."""
    with pytest.raises(errors.InvalidArgument):
        await ask(storage, *types)


async def test_rules_are_refused_for_tables_that_they_do_not_apply_to(
    storage: RunningStorage,
) -> None:
    """P3."""
    for name, kind in (
        (SCAN_TABLE_NAME_HISTORY, RETENTION_TYPE_EXPIRED),
        (SCAN_TABLE_NAME_QUEUES, RETENTION_TYPE_EXPIRED),
        (SCAN_TABLE_NAME_RUNS, RETENTION_TYPE_INACTIVE_QUEUE),
    ):
        with pytest.raises(errors.InvalidArgument):
            await table(storage, name, due_types=[kind])
