"""Retention: tables to plan from, deletions that are checked again, and the history of both."""

from typing import Any

import pyarrow as pa
import pytest

from tests.rpc.conftest import StartStorage
from tests.rpc.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    operation,
    reserve,
    settle,
)
from tidemark import errors, limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.api.broker.v1.topic_pb2 import MAX_WAIT_ACTION_DEAD_LETTER
from tidemark.api.storage.v1.action_pb2 import OffsetRange
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_DEAD_LETTER,
    Purge,
    RemoveQueue,
)
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ATTEMPTS_EXHAUSTED,
    RETENTION_TYPE_COMPLETED,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_INACTIVE_QUEUE,
    RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    RETENTION_TYPE_OLD_RECORDS,
    RETENTION_TYPE_PURGE,
    RETENTION_TYPE_TIME_TO_LIVE,
    RETENTION_TYPE_UNSPECIFIED,
    SCAN_TABLE_NAME_GROUPS,
    SCAN_TABLE_NAME_HISTORY,
    SCAN_TABLE_NAME_MESSAGES_CONSUMED,
    SCAN_TABLE_NAME_QUEUES,
    SCAN_TABLE_NAME_RUNS,
    SCAN_TABLE_NAME_SYSTEM_METRICS,
    SCAN_TABLE_NAME_UNSPECIFIED,
    ApplyRetentionRequest,
    HoldScheduleRequest,
    ListRetentionHistoryRequest,
    MetricRow,
    RecordMetricsRequest,
    RetentionRow,
    RetentionType,
    ScanTableName,
    ScanTableRequest,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_DEAD_DEADLINES,
    SCAN_KIND_OUTBOX,
    DeleteTopicRequest,
)
from tidemark.clock import ManualClock

FOREVER_MS = 1 << 60


async def apply(
    storage: RunningStorage,
    kind: RetentionType.ValueType,
    *rows: RetentionRow,
    pass_id: str = "pass-1",
    partition: int = 0,
) -> tuple[int, int, int]:
    """Messages, queues and stale rows."""
    request = ApplyRetentionRequest(partition=partition, pass_id=pass_id, type=kind, rows=rows)
    applied = await storage.retention.ApplyRetention(request)
    return applied.messages, applied.queues, applied.stale


async def history(storage: RunningStorage, **asked: Any) -> list[tuple[str, int, int, str]]:
    """Queue, messages, type and pass, newest first."""
    answer = await storage.retention.ListRetentionHistory(ListRetentionHistoryRequest(**asked))
    return [(row.lmq_name, row.messages, row.type, row.pass_id) for row in answer.rows]


async def table(
    storage: RunningStorage, name: ScanTableName.ValueType, **asked: Any
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for piece in storage.retention.ScanTable(ScanTableRequest(table=name, **asked)):
        with pa.ipc.open_stream(piece.arrow) as stream:
            rows = stream.read_all().to_pylist()
        assert len(rows) == piece.rows
        found += rows
    return found


def run(queue_id: int, start: int = 0, end: int = 1, lmq_name: str = "kept") -> RetentionRow:
    return RetentionRow(
        queue_id=queue_id, lmq_name=lmq_name, range=OffsetRange(start=start, end=end)
    )


async def settled(exchange: ExchangeClient, lmq_name: str, group: str = "default") -> None:
    for each in (await exchange.ask(reserve(lmq_name, group=group))).slices:
        await exchange.ask(settle(each.receipt))


# --- messages -------------------------------------------------------------------------------------


async def test_expired_messages_leave_once_they_are_old_enough(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R1, R6, R9: checked again in the commit; a repeat deletes and counts nothing more."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=10)
    queue_id = (await exchange.ask(append("kept", b"1", b"2"))).queue_id
    await clock.advance_ms(9_999)
    row = run(queue_id, 0, 2)

    early = await apply(storage, RETENTION_TYPE_EXPIRED, row)
    await clock.advance_ms(1)
    done = await apply(storage, RETENTION_TYPE_EXPIRED, row)
    repeated = await apply(storage, RETENTION_TYPE_EXPIRED, row)

    assert (early, done, repeated) == ((0, 0, 1), (2, 0, 0), (0, 0, 1))
    assert await history(storage) == [("kept", 2, RETENTION_TYPE_EXPIRED, "pass-1")]
    assert not (await exchange.ask(reserve("kept"))).slices
    assert (await storage.queue("kept")).queue.messages == 0


async def test_completed_messages_leave_when_every_group_has_settled_them(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R2."""
    await storage.create_topic("kept", retention_enabled=True, completed_retention_seconds=1)
    queue_id = (await exchange.ask(append("kept", b"x"))).queue_id
    await clock.advance_ms(1000)

    without_group = await apply(storage, RETENTION_TYPE_COMPLETED, run(queue_id))
    await exchange.ask(reserve("kept", group="slow", visibility_ms=50))
    await settled(exchange, "kept")
    not_by_all = await apply(storage, RETENTION_TYPE_COMPLETED, run(queue_id))

    assert without_group == not_by_all == (0, 0, 1)


async def test_the_rows_of_one_pass_and_queue_are_counted_in_one_row_of_history(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6: per (queue, type, pass); it outlives its queue and a restart."""
    await storage.create_topic("kept", retention_enabled=True, completed_retention_seconds=1)
    first, _, _, last = await exchange.ask_all(
        *(append(name, b"x") for name in ("kept/a", "kept/a", "kept/a", "kept/b"))
    )
    await settled(exchange, "kept/a")
    await settled(exchange, "kept/b")
    await clock.advance_ms(1000)
    rows = [run(first.queue_id, at, at + 1, "kept/a") for at in range(3)]

    await apply(storage, RETENTION_TYPE_COMPLETED, *rows[:2], run(last.queue_id, 0, 1, "kept/b"))
    await storage.restart()
    await apply(storage, RETENTION_TYPE_COMPLETED, rows[2])
    async with storage.exchange() as after:
        await after.ask(operation(remove_queue=RemoveQueue(lmq_name="kept/a")))

    assert sorted(await history(storage)) == [
        ("kept/a", 3, RETENTION_TYPE_COMPLETED, "pass-1"),
        ("kept/b", 1, RETENTION_TYPE_COMPLETED, "pass-1"),
    ]


async def test_no_rule_touches_messages_under_a_live_reservation(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    await storage.create_topic(
        "kept", retention_enabled=True, retention_seconds=1, max_wait_time_seconds=1
    )
    queue_id = (await exchange.ask(append("kept", b"x"))).queue_id
    (held,) = (await exchange.ask(reserve("kept"))).slices
    await clock.advance_ms(2000)

    expired = await apply(storage, RETENTION_TYPE_EXPIRED, run(queue_id))
    evicted = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id))

    assert expired == evicted == (0, 0, 1)
    assert (await exchange.ask(settle(held.receipt))).messages == 1


async def test_rules_that_are_off_delete_nothing(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R9: unconsumed messages are only deleted by an explicit time limit of their topic."""
    await storage.create_topic("off", retention_seconds=1, completed_retention_seconds=1)
    queue_id = (await exchange.ask(append("off", b"x"))).queue_id
    await clock.advance_ms(2000)

    kinds = (
        RETENTION_TYPE_EXPIRED,
        RETENTION_TYPE_COMPLETED,
        RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    )
    answers = [await apply(storage, kind, run(queue_id, 0, 1, "off")) for kind in kinds]

    assert answers == [(0, 0, 1)] * 3


async def test_messages_that_waited_too_long_are_evicted_also_without_retention(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R5: without a group everything waits; what is settled is left to the other rules."""
    await storage.create_topic("kept", retention_enabled=True, max_wait_time_seconds=1)
    queue_id = (await exchange.ask(append("kept", b"done"))).queue_id
    await settled(exchange, "kept")
    await exchange.ask(append("kept", b"waits", b"too"))
    await clock.advance_ms(1000)

    rows = [run(queue_id, 0, 1), run(queue_id, 1, 3)]
    evicted = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, *rows)

    assert evicted == (2, 0, 1)
    assert await history(storage) == [("kept", 2, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, "pass-1")]


async def test_messages_that_waited_too_long_are_dead_lettered_where_the_topic_says_so(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R5."""
    await storage.create_topic(
        "slow",
        max_wait_time_seconds=1,
        max_wait_action=MAX_WAIT_ACTION_DEAD_LETTER,
        dead_letter_topic="jobs",
    )
    queue_id = (await exchange.ask(append("slow", b"x"))).queue_id
    await clock.advance_ms(1000)

    await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id, 0, 1, "slow"))

    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    (message,) = MessageBatch.FromString(entry.append_from_outbox.entry.body).messages
    assert message.headers["tidemark-dead-reason"] == "max_wait_time_eviction"
    assert (await storage.queue("slow")).queue.messages == 0


async def test_a_row_about_a_queue_that_was_deleted_and_created_again_is_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R9."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=1)
    old = await exchange.ask(append("kept", b"x"))
    await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name="kept")))
    await exchange.ask(append("kept", b"y"))
    await clock.advance_ms(2000)

    assert await apply(storage, RETENTION_TYPE_EXPIRED, run(old.queue_id)) == (0, 0, 1)


async def test_one_row_may_name_many_runs_of_which_only_those_due_leave(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R1, R9: what is too young or held stays, in the middle of the range, too."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=10)
    queue_id = (await exchange.ask(append("kept", b"held"))).queue_id
    await exchange.ask(reserve("kept"))
    await exchange.ask(append("kept", b"1", b"2"))
    await exchange.ask(append("kept", b"3"))
    await clock.advance_ms(10_000)
    await exchange.ask(append("kept", b"young"))

    applied = await apply(storage, RETENTION_TYPE_EXPIRED, run(queue_id, 0, 5))
    repeated = await apply(storage, RETENTION_TYPE_EXPIRED, run(queue_id, 0, 5))

    assert (applied, repeated) == ((3, 0, 0), (0, 0, 1))
    assert [row["first_offset"] for row in await table(storage, SCAN_TABLE_NAME_RUNS)] == [0, 4]
    assert await history(storage) == [("kept", 3, RETENTION_TYPE_EXPIRED, "pass-1")]


async def test_a_call_with_many_rows_is_done_in_several_commits(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R7: others get their turn at the writer in between."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=1)
    appended = await exchange.ask_all(*(append(f"kept/{n}", b"x") for n in range(65)))
    await clock.advance_ms(1000)
    commits = (await storage.info()).commits

    rows = [run(each.queue_id, 0, 1, f"kept/{n}") for n, each in enumerate(appended)]
    applied = await apply(storage, RETENTION_TYPE_EXPIRED, *rows)

    assert applied == (65, 0, 0)
    assert (await storage.info()).commits == commits + 3


# --- queues and records ---------------------------------------------------------------------------


async def test_an_inactive_queue_is_removed_unless_something_happened_since(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R3: checked again at the moment of deletion."""
    await exchange.ask_all(append("jobs/idle", b"x"), append("jobs/used", b"x"))
    await settled(exchange, "jobs/idle")
    await settled(exchange, "jobs/used")
    planned = [
        RetentionRow(
            queue_id=row["queue_id"],
            lmq_name=row["lmq_name"],
            before_ms=int(row["last_activity"].timestamp() * 1000),
        )
        for row in await table(storage, SCAN_TABLE_NAME_QUEUES)
    ]
    await clock.advance_ms(10)
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
        RetentionRow(queue_id=each.queue_id, lmq_name="jobs", before_ms=FOREVER_MS)
        for each in (full, waiting)
    ]

    assert await apply(storage, RETENTION_TYPE_INACTIVE_QUEUE, *rows) == (0, 0, 2)


async def test_old_records_leave_by_their_time(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R4."""
    await exchange.ask(append("jobs", b"x"))
    await settled(exchange, "jobs")
    old_ms = clock.wall_ms() + 1
    await clock.advance_ms(1000)
    await exchange.ask(append("jobs", b"y"))
    await settled(exchange, "jobs")
    row = RetentionRow(table=SCAN_TABLE_NAME_MESSAGES_CONSUMED, before_ms=old_ms)

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
    row = RetentionRow(table=SCAN_TABLE_NAME_HISTORY, before_ms=clock.wall_ms())

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
    row = RetentionRow(table=SCAN_TABLE_NAME_SYSTEM_METRICS, before_ms=clock.wall_ms())
    plan = ApplyRetentionRequest(pass_id="p", type=RETENTION_TYPE_OLD_RECORDS, rows=[row])

    applied = [await storage.retention.ApplyRetention(plan) for _ in range(2)]

    assert [(each.messages, each.more) for each in applied] == [(2000, True), (1, False)]
    assert await table(storage, SCAN_TABLE_NAME_SYSTEM_METRICS) == []


async def test_a_refused_call_changes_nothing(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3, R6: no deletion without its row of history."""
    await exchange.ask(append("jobs", b"x"))
    await settled(exchange, "jobs")
    rows = [
        RetentionRow(table=name, before_ms=FOREVER_MS)
        for name in (SCAN_TABLE_NAME_MESSAGES_CONSUMED, SCAN_TABLE_NAME_RUNS)
    ]

    with pytest.raises(errors.InvalidArgument):
        await apply(storage, RETENTION_TYPE_OLD_RECORDS, *rows)

    assert len(await table(storage, SCAN_TABLE_NAME_MESSAGES_CONSUMED)) == 1


# --- metrics and their scheduler ------------------------------------------------------------------


def figure(name: str, instance: str = "broker-0") -> MetricRow:
    return MetricRow(instance=instance, name=name, samples=60, min=1.0, max=4.0, mean=2.5, last=3.0)


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


async def test_one_scheduler_holds_the_schedule_until_it_stops_saying_so(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R11: a second one stands by."""

    async def hold(holder: str, hold_ms: int = 1000) -> tuple[bool, str, int]:
        request = HoldScheduleRequest(holder=holder, hold_ms=hold_ms)
        answer = await storage.retention.HoldSchedule(request)
        return answer.held, answer.holder, answer.ends_in_ms

    assert await hold("a") == (True, "a", 1000)
    await clock.advance_ms(999)
    assert await hold("b") == (False, "a", 1)
    assert await hold("a") == (True, "a", 1000)
    await clock.advance_ms(1000)
    assert await hold("b") == (True, "b", 1000)
    assert await hold("a", 0) == (False, "b", 1000)
    assert await hold("b", 0) == (False, "", 0)
    assert await hold("a", 600_000) == (True, "a", 600_000)
    for refused in (("", 1), ("b", 600_001)):
        with pytest.raises(errors.InvalidArgument):
            await hold(*refused)


# --- history --------------------------------------------------------------------------------------


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


# --- tables ---------------------------------------------------------------------------------------


async def test_tables_show_what_is_stored_without_waking_a_queue(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R2, R5: all that the rules need to know."""
    await exchange.ask_all(append("jobs/a", b"1", b"2", fairness_key="k"), append("jobs/a", b"3"))
    await storage.create_topic("other")
    await exchange.ask(append("other", b"x"))
    (got,) = (await exchange.ask(reserve("jobs/a", 1))).slices
    await storage.restart()

    runs = await table(storage, SCAN_TABLE_NAME_RUNS, topic="jobs")
    groups = await table(storage, SCAN_TABLE_NAME_GROUPS)
    queues = await table(storage, SCAN_TABLE_NAME_QUEUES, batch_rows=1)

    shown = [(row["fairness_key"], row["first_offset"], row["messages"]) for row in runs]
    assert sorted(shown) == [("", 2, 1), ("k", 0, 2)]
    assert [row["groups"] for row in runs] == [1, 1]
    assert [row["waiting_groups"] for row in runs] == [1, 1]
    assert sum(row["held"] for row in runs) == 1
    assert [(row["group"], row["unsettled"], row["inflight"]) for row in groups] == [
        ("default", 3, 1)
    ]
    assert [row["lmq_name"] for row in queues] == ["jobs/a", "other"]
    assert [row["materialized"] for row in queues] == [False, False]
    assert (await storage.info()).materialized_queues == 0
    assert got.count == 1


async def test_a_table_can_be_narrowed_to_columns_topic_and_time(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    start_ms = clock.wall_ms()
    for _ in range(3):
        await exchange.ask(append("jobs", b"x"))
        await settled(exchange, "jobs")
        await clock.advance_ms(10)
    asked = ScanTableRequest(columns=["start"], topic="jobs")
    asked.after_time.FromMilliseconds(start_ms + 10)
    asked.before_time.FromMilliseconds(start_ms + 20)
    fields = {name.name: value for name, value in asked.ListFields()}

    rows = await table(storage, SCAN_TABLE_NAME_MESSAGES_CONSUMED, **fields)

    assert rows == [{"start": 1}]


async def test_a_queue_whose_topic_is_gone_keeps_no_table_from_being_read(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("gone")
    await exchange.ask_all(append("gone", b"x"), append("jobs", b"x"))
    await storage.storage.DeleteTopic(DeleteTopicRequest(name="gone"))
    await storage.restart()

    rows = await table(storage, SCAN_TABLE_NAME_RUNS)

    assert "jobs" in [row["lmq_name"] for row in rows]


# --- refusals (S3) --------------------------------------------------------------------------------

UNKNOWN_TYPE = RetentionType.ValueType(99)
UNKNOWN_TABLE = ScanTableName.ValueType(99)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pass_id": ""}, "INVALID_ARGUMENT"),
        ({"pass_id": "p" * (limits.PRODUCER_ID_BYTES_MAX + 1)}, "INVALID_ARGUMENT"),
        ({"type": RETENTION_TYPE_UNSPECIFIED}, "INVALID_ARGUMENT"),
        pytest.param({"type": UNKNOWN_TYPE}, "INVALID_ARGUMENT"),
        pytest.param({"rows": [RetentionRow(table=UNKNOWN_TABLE)]}, "INVALID_ARGUMENT"),
        pytest.param(
            {"type": RETENTION_TYPE_PURGE, "rows": [RetentionRow(queue_id=1)]},
            "INVALID_ARGUMENT",
        ),
        pytest.param(
            {"rows": []},
            "INVALID_ARGUMENT",
        ),
        ({"rows": [RetentionRow(queue_id=1)]}, "INVALID_ARGUMENT"),
        ({"rows": [run(1)] * 10_001}, "BATCH_TOO_LARGE"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
    ],
)
async def test_a_plan_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    plan: dict[str, Any] = {
        "pass_id": "p" * limits.PRODUCER_ID_BYTES_MAX,
        "type": RETENTION_TYPE_EXPIRED,
        "rows": [run(1)] * 10_000,
    }
    assert (await storage.retention.ApplyRetention(ApplyRetentionRequest(**plan))).stale == 10_000

    with pytest.raises(errors.TidemarkError) as refused:
        await storage.retention.ApplyRetention(ApplyRetentionRequest(**{**plan, **fields}))

    assert refused.value.reason == reason


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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"name": SCAN_TABLE_NAME_UNSPECIFIED}, "INVALID_ARGUMENT"),
        ({"columns": ["no-such-column"]}, "INVALID_ARGUMENT"),
        ({"batch_rows": 65_537}, "INVALID_ARGUMENT"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
        pytest.param({"name": UNKNOWN_TABLE}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_table_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    asked: dict[str, Any] = {"name": SCAN_TABLE_NAME_RUNS, "batch_rows": 65_536}
    assert await table(storage, **asked) == []

    with pytest.raises(errors.TidemarkError) as refused:
        await table(storage, **{**asked, **fields})

    assert refused.value.reason == reason
