"""Passes end to end: a real Spark plans and applies, a real storage checks and deletes."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_batch.due_work import DueWork
from spark_batch.passes.findings import Finding
from spark_batch.passes.jobs import Jobs
from spark_batch.passes.outcome import TYPES, JobName
from spark_batch.storage_client import find_partitions, find_topics
from storage_svc.engines.engine import Table
from storage_svc.engines.rocksdb import RocksEngines
from tests.spark.conftest import RunPass
from tests.support.counted_reads import count_reads
from tests.support.exchange_client import append, apply_topic, operation, reserve, settle
from tests.support.faulty_reads import FaultyReads
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON, MAX_WAIT_ACTION_DEAD_LETTER
from tidemark.api.storage.v1.exchange_pb2 import Materialize, PlaceGroup, Purge, RemoveQueue
from tidemark.api.storage.v1.retention_pb2 import (
    ListRetentionHistoryRequest,
    MetricRow,
    RecordMetricsRequest,
    RetentionType,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_OUTBOX,
    ConfirmPartitionTimeRequest,
    DeleteTopicRequest,
)
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import QueueNotFound
from tidemark.settings import RetentionSettings

DAY_MS = 86_400_000
CLIENT_TIMEOUT_MS = 30_000


async def history(storage: RunningStorage) -> dict[tuple[str, str], int]:
    """Messages by queue and type, over all passes."""
    request = ListRetentionHistoryRequest(page_size=1000)
    found: dict[tuple[str, str], int] = {}
    for row in (await storage.retention.ListRetentionHistory(request)).rows:
        kind = RetentionType.Name(row.type).removeprefix("RETENTION_TYPE_").lower()
        found[row.lmq_name, kind] = found.get((row.lmq_name, kind), 0) + row.messages
    return found


async def days_later(
    storage: RunningStorage, clock: ManualClock, days: int, confirmed: Iterable[int] = (0, 1)
) -> None:
    """Set the wall clock forward, and confirm to storage that this is right."""
    clock.set_wall_ms(clock.wall_ms() + days * DAY_MS)
    for partition in range(2):
        await storage.due(SCAN_KIND_OUTBOX, partition)  # it looks at its clock
    for partition in confirmed:
        await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest(partition=partition))


async def taken_and_settled(exchange: Any, lmq_name: str, group: str = "default") -> None:
    for each in (await exchange.ask(reserve(lmq_name, group=group))).slices:
        await exchange.ask(settle(each.receipt))


@pytest.fixture
def other_zone(spark: SparkSession) -> Iterator[None]:
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.also_on_redis
async def test_expired_and_completed_messages_leave_and_everything_else_stays(
    spark: SparkSession,
    storage: RunningStorage,
    clock: ManualClock,
    retention: RunPass,
    other_zone: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R1, R2, R6, R8: in every partition, with a row of history each and a line to grep for.

    P1: the session has another time zone than ours would have. P3: planned and applied in one job.
    """
    topics = [
        await storage.create_topic("old", retention_enabled=True, retention_seconds=10),
        await storage.create_topic("done", retention_enabled=True, completed_retention_seconds=5),
        await storage.create_topic("off", retention_seconds=1, completed_retention_seconds=1),
    ]
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        for topic in topics:
            await apply_topic(second, topic)
        for exchange in (first, second):
            await exchange.ask(append("old/a", b"1", b"2"))
            await exchange.ask(append("old/held", b"x"))
            await exchange.ask(append("done/a", b"1", b"2", b"3"))
            await exchange.ask(append("done/b", b"1"))
            await exchange.ask(append("off", b"1"))
            await taken_and_settled(exchange, "done/a")
            await taken_and_settled(exchange, "done/b")
            await exchange.ask(reserve("done/b", group="slow", visibility_ms=3_600_000))
            await exchange.ask(reserve("old/held", visibility_ms=3_600_000))
        await clock.advance_ms(10_000)
        await first.ask(append("old/a", b"young"))

        with caplog.at_level(logging.INFO, "spark_batch"):
            done = await retention()
        again = await retention()

    nothing = dict.fromkeys(TYPES[JobName.RETENTION], 0)
    assert done.counts == {**nothing, "expired": 4, "completed": 6}
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup(done.pass_id)) == 1
    assert again.counts == nothing
    assert await history(storage) == {("old/a", "expired"): 4, ("done/a", "completed"): 6}
    left = {
        name: (await storage.queue(name)).queue.messages
        for name in ("old/a", "old/held", "done/a", "done/b", "off")
    }
    assert left == {"old/a": 1, "old/held": 1, "done/a": 0, "done/b": 1, "off": 1}
    assert (
        "RetentionService: Cleaned up expired_messages=4 completed_messages=6 "
        "inactive_partitions=0 old_metrics=0 abandoned_groups=0"
    ) in caplog.messages


async def test_a_pass_with_nothing_due_runs_no_spark_job(
    storage: RunningStorage,
    clock: ManualClock,
    retention: RunPass,
    eviction: RunPass,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P3, R8: messages that are old enough for a rule and not settled cost nothing either."""
    await storage.create_topic("late", retention_enabled=True, retention_seconds=100)
    await storage.create_topic("done", retention_enabled=True, completed_retention_seconds=1)
    await storage.create_topic("wait", max_wait_time_seconds=1)
    async with storage.exchange(0) as exchange:
        await exchange.ask_all(append("late/a", b"1"), append("done/a", b"1"))
        await exchange.ask(append("wait/a", b"1"))
        await taken_and_settled(exchange, "wait/a")
    await clock.advance_ms(10_000)
    jobs_run: list[str] = []
    labelled = Jobs.labelled

    def counted(job: Jobs, name: str, pass_id: str) -> Any:
        jobs_run.append(name)
        return labelled(job, name, pass_id)

    monkeypatch.setattr(Jobs, "labelled", counted)

    with caplog.at_level(logging.INFO, "spark_batch"):
        done = [await retention(), await retention(dry_run=True), await eviction()]
        nothing_ran = not jobs_run
        await clock.advance_ms(90_000)
        later = await retention()

    assert nothing_ran
    assert [sum(each.counts.values()) for each in done] == [0, 0, 0]
    assert (
        "RetentionService: Cleaned up expired_messages=0 completed_messages=0 "
        "inactive_partitions=0 old_metrics=0 abandoned_groups=0"
    ) in caplog.messages
    assert "EvictionService: Evicted 0 messages exceeding max_wait_time" in caplog.messages
    assert (later.counts["expired"], jobs_run) == (1, ["retention"])


async def test_a_dry_run_says_what_is_due_and_why_the_rest_is_not(
    storage: RunningStorage, clock: ManualClock, retention: RunPass, eviction: RunPass
) -> None:
    """R11: and changes nothing."""
    await storage.create_topic("due", retention_enabled=True, retention_seconds=1)
    await storage.create_topic("off", retention_seconds=1, max_wait_time_seconds=60)
    async with storage.exchange(0) as exchange:
        await exchange.ask_all(append("due", b"1"), append("off", b"1"))
    await clock.advance_ms(1000)

    found = await retention(dry_run=True)
    waiting = await eviction(dry_run=True)

    assert [each for each in found.findings if each.topic == "due"][:2] == [
        Finding("due", "expired", 1),
        Finding("due", "completed", 0, "zero"),
    ]
    assert Finding("off", "expired", 0, "disabled") in found.findings
    assert waiting.findings == (
        Finding("due", "max_wait_time_eviction", 0, "zero"),
        Finding("off", "max_wait_time_eviction", 0, "too young"),
    )
    assert await history(storage) == {}
    assert (await storage.queue("due")).queue.messages == 1


async def test_inactive_queues_and_old_records_leave_after_their_days(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R3, R4, R7: queues that are used or have a client, and younger ones, stay."""
    await storage.create_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    figure = MetricRow(instance="i", name="n", samples=1, min=1, max=1, mean=1, last=1)
    async with storage.exchange(0) as exchange:
        create = Materialize(lmq_name="jobs/consumed", create=True)
        await exchange.ask(operation(materialize=create))
        await clock.advance_ms(1)
        for name in ("jobs/idle", "jobs/used"):
            await exchange.ask(append(name, b"x"))
            await taken_and_settled(exchange, name)
        await exchange.ask(append("jobs/purged", b"x"))
        await exchange.ask(operation(purge=Purge(lmq_name="jobs/purged")))
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure] * 3))
    await days_later(storage, clock, 7)
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs/used", b"y"))
        await taken_and_settled(exchange, "jobs/used")
        await exchange.ask(operation(materialize=Materialize(lmq_name="jobs/consumed")))
        too_soon = await retention()
        await clock.advance_ms(CLIENT_TIMEOUT_MS)
        # The oldest queue has a client: it must not take the place of one that can be removed.
        passes = [await retention(retention_pass_limit=1) for _ in range(2)]
    await days_later(storage, clock, 84)
    quarter = await retention(partition_cleanup_days=0)

    nothing = dict.fromkeys(TYPES[JobName.RETENTION], 0)
    assert too_soon.counts == nothing
    assert [each.counts for each in passes] == [{**nothing, "inactive_queue": 1}] * 2
    assert (await storage.queue("jobs/consumed")).queue.messages == 0
    with pytest.raises(QueueNotFound):
        await storage.queue("jobs/idle")
    assert (await storage.queue("jobs/used")).queue.messages == 0
    records = {each.topic: each.due for each in quarter.findings if each.rule == "old_records"}
    # Two settlements of the first day, three figures and the purge; the rest is younger.
    assert records == {"messages_consumed": 2, "system_metrics": 3, "history": 1}
    left = await history(storage)
    assert left["messages_consumed", "old_records"] == 2
    assert ("jobs/idle", "inactive_queue") in left
    assert ("jobs/purged", "purge") not in left


async def test_abandoned_groups_leave_and_those_in_use_stay(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R14, R7: in every partition, with what only they kept, and oldest first."""
    topic = await storage.create_topic("t", group_expiry_seconds=3_600)
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        for exchange in (first, second):
            await exchange.ask(append("t/a", b"1", b"2"))
            for group in ("used", "forgotten"):
                place = PlaceGroup(lmq_name="t/a", group=group)
                await exchange.ask(operation(place_group=place))
            joined = Materialize(lmq_name="t/connected", create=True, groups=["connected"])
            await exchange.ask(operation(materialize=joined))
            await exchange.ask(reserve("t/connected", group="connected"))
            await clock.advance_ms(1)
        await clock.advance_ms(3_600_000)
        for exchange in (first, second):
            await taken_and_settled(exchange, "t/a", "used")
        too_soon = await retention(dry_run=True)
        await clock.advance_ms(900_000)  # uses that were not noted may have followed
        dry = await retention(dry_run=True)
        passes = [await retention(retention_pass_limit=1) for _ in range(3)]

    assert Finding("t", "abandoned_group", 0, "too young") in too_soon.findings
    assert Finding("t", "abandoned_group", 2) in dry.findings
    assert [each.counts["abandoned_group"] for each in passes] == [1, 1, 0]
    assert await history(storage) == {("t/a", "abandoned_group"): 4}
    for partition in range(2):
        left = await storage.queue("t/a", partition)
        assert ([group.name for group in left.groups], left.queue.messages) == (["used"], 0)
        assert len((await storage.queue("t/connected", partition)).groups) == 1


@pytest.mark.also_on_redis
async def test_messages_that_wait_too_long_are_evicted_or_dead_lettered(
    storage: RunningStorage,
    clock: ManualClock,
    eviction: RunPass,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R5, R8: by the topic's action; settled and reserved messages stay."""
    await storage.create_topic("slow", max_wait_time_seconds=5)
    await storage.create_topic("dead")
    await storage.create_topic(
        "kept",
        max_wait_time_seconds=5,
        max_wait_action=MAX_WAIT_ACTION_DEAD_LETTER,
        dead_letter_topic="dead",
    )
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("slow/unread", b"1", b"2"))
        await exchange.ask(append("slow/held", b"1"))
        await exchange.ask(reserve("slow/held", visibility_ms=3_600_000))
        await exchange.ask(append("kept/x", b"1"))
        await clock.advance_ms(5_000)
        await exchange.ask(append("slow/unread", b"young"))

        with caplog.at_level(logging.INFO, "spark_batch"):
            done = await eviction()

    assert done.counts == {"max_wait_time_eviction": 3}
    assert "EvictionService: Evicted 3 messages exceeding max_wait_time" in caplog.messages
    assert (await storage.queue("slow/unread")).queue.messages == 1
    assert (await storage.queue("slow/held")).queue.messages == 1
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    assert entry.append_from_outbox.entry.destination_lmq_name == "dead"


async def test_a_pass_with_a_limit_takes_the_oldest_and_leaves_the_rest_to_the_next(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R7."""
    topic = await storage.create_topic("old", retention_enabled=True, retention_seconds=1)
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        for exchange in (first, second, first):
            await exchange.ask(append("old", b"1", b"2"))
            await clock.advance_ms(1)
    await clock.advance_ms(1000)

    counts = [
        (await retention(retention_pass_limit=3, retention_batch_size=1)).counts["expired"]
        for _ in range(3)
    ]

    assert counts == [4, 2, 0]


async def test_a_partition_that_refuses_takes_no_share_of_the_limit(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R7, R9: its messages are the oldest in every pass, and the others leave all the same."""
    topic = await storage.create_topic("old", retention_enabled=True, retention_seconds=1)
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        await first.ask_all(*(append(f"old/{n}", b"1", b"2") for n in range(3)))
        await clock.advance_ms(1)
        await second.ask_all(*(append(f"old/{n}", b"1", b"2") for n in range(3)))
    await days_later(storage, clock, 1, confirmed=(1,))

    passes = [await retention(retention_pass_limit=3) for _ in range(2)]

    assert [each.counts["expired"] for each in passes] == [4, 2]
    assert [list(each.failed) for each in passes] == [[0], [0]]


async def test_old_records_are_deleted_without_being_read(
    storage: RunningStorage,
    clock: ManualClock,
    retention: RunPass,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R4, P3: a pass names their table and age; only a dry run counts them."""
    figure = MetricRow(instance="i", name="n", samples=1, min=1, max=1, mean=1, last=1)
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure] * 3))
    await days_later(storage, clock, 91)
    reads = count_reads(monkeypatch)

    done = await retention()
    of_the_pass = dict(reads)
    reads.clear()
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure]))
    await days_later(storage, clock, 91)
    counted = await retention(dry_run=True)

    assert done.counts["old_records"] == 3
    assert of_the_pass == {Table.METRICS: 1}  # storage was asked whether there are any
    assert counted.counts["old_records"] == 2  # the figure, and the history of the first pass
    assert reads == {Table.HISTORY: 2, Table.METRICS: 2}  # asked, and counted


async def test_what_happens_between_plan_and_apply_is_respected(
    storage: RunningStorage,
    clock: ManualClock,
    spark: SparkSession,
    jobs: Callable[..., Jobs],
) -> None:
    """R9: a message published, a message taken, a limit raised, a queue revived: all survive."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    await storage.create_topic("more", retention_enabled=True, retention_seconds=10)
    async with storage.exchange(0) as exchange:
        for name in ("old/a", "old/taken", "more/a"):
            await exchange.ask(append(name, b"1", b"2"))
        for name in ("old/revived", "old/idle"):
            await exchange.ask(append(name, b"x"))
            await exchange.ask(operation(purge=Purge(lmq_name=name)))
        await days_later(storage, clock, 8)
        await clock.advance_ms(CLIENT_TIMEOUT_MS)
        job = jobs()

        def planned() -> Any:
            due = job.find_due(JobName.RETENTION)
            plan = job.plan_retention(due, find_topics(due.cluster), job.collect_failures())
            assert plan is not None
            return spark.createDataFrame(plan.collect(), plan.schema)

        plan = await asyncio.to_thread(planned)
        await exchange.ask(append("old/a", b"young"))
        await exchange.ask(reserve("old/taken", visibility_ms=3_600_000))
        await exchange.ask(append("old/revived", b"again"))
        topic = await storage.update_topic(
            "more", retention_enabled=True, retention_seconds=90 * 86_400
        )
        assert topic.version
        failures = job.collect_failures()
        cluster = await asyncio.to_thread(find_partitions, storage.address)
        counts = [
            await asyncio.to_thread(job.apply, plan, cluster, "the-pass", batch, failures)
            for batch in (1000, 1)
        ]

    assert counts[0] == {
        ("old", "expired"): 2,
        ("old", "inactive_queue"): 1,
        ("more", "expired"): 0,
    }
    assert set(counts[1].values()) == {0}  # a repeat removes nothing more
    left = {
        name: (await storage.queue(name)).queue.messages
        for name in ("old/a", "old/taken", "old/revived", "more/a")
    }
    assert left == {"old/a": 1, "old/taken": 2, "old/revived": 1, "more/a": 2}
    removed = await history(storage)
    assert removed["old/a", "expired"] == 2
    with pytest.raises(QueueNotFound):
        await storage.queue("old/idle")


async def test_queues_and_topics_replaced_between_plan_and_apply_are_respected(
    storage: RunningStorage,
    clock: ManualClock,
    spark: SparkSession,
    jobs: Callable[..., Jobs],
) -> None:
    """R9: a plan names a queue by its id, and its topic as it is when the plan is applied."""
    for topic in ("old", "gone", "replaced"):
        await storage.create_topic(topic, retention_enabled=True, retention_seconds=10)
    names = ("old/again", "old/keyed", "gone/a", "replaced/a")
    async with storage.exchange(0) as exchange:
        for name in names:
            key = "k" if name == "old/keyed" else ""
            await exchange.ask(append(name, b"1", b"2", fairness_key=key))
        await clock.advance_ms(10_000)
        job = jobs()
        due = await asyncio.to_thread(job.find_due, JobName.RETENTION)

        def planned() -> Any:
            plan = job.plan_retention(due, find_topics(due.cluster), job.collect_failures())
            assert plan is not None
            return spark.createDataFrame(plan.collect(), plan.schema)

        plan = await asyncio.to_thread(planned)
        assert {row["lmq_name"] for row in plan.collect()} == set(names)
        for name in ("old/again", "old/keyed"):
            await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name=name)))
            key = "k" if name == "old/keyed" else ""
            await exchange.ask(append(name, b"3", b"4", fairness_key=key))
        for topic in ("gone", "replaced"):
            await storage.storage.DeleteTopic(DeleteTopicRequest(name=topic))
        await storage.create_topic("replaced", retention_enabled=True, retention_seconds=100)
        await clock.advance_ms(10_000)  # as old as those were that the plan found
        cluster = await asyncio.to_thread(find_partitions, storage.address)
        failures = job.collect_failures()
        counts = await asyncio.to_thread(job.apply, plan, cluster, "the-pass", 1000, failures)
        after = await asyncio.to_thread(job.retention)

    assert set(counts.values()) == {0}
    assert not failures.value
    assert after.counts["expired"] == 4  # those of the queues that were created again
    assert (await storage.queue("replaced/a")).queue.messages == 2
    assert (await storage.queue("gone/a")).queue.messages == 2


async def test_a_pass_whose_last_topic_is_deleted_meanwhile_removes_nothing(
    storage: RunningStorage, clock: ManualClock, jobs: Callable[..., Jobs]
) -> None:
    """R9: topics are listed after storage was asked what is due."""
    await storage.create_topic("gone", retention_enabled=True, retention_seconds=10)
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("gone/a", b"1"))
    await clock.advance_ms(10_000)
    job = jobs()
    due = await asyncio.to_thread(job.find_due, JobName.RETENTION)
    await storage.storage.DeleteTopic(DeleteTopicRequest(name="gone"))

    def planned() -> Any:
        plan = job.plan_retention(due, find_topics(due.cluster), job.collect_failures())
        assert plan is not None
        return plan.collect()

    assert due.of("expired")
    assert await asyncio.to_thread(planned) == []


async def test_names_that_look_like_something_else_are_only_names(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R1, R6: in the plan, in the calls and in the history, with fairness keys of the same kind."""
    lites = (
        "'; drop table runs; --",
        'a"b\\c,d',
        "%_*?[x]",
        "\N{GRINNING FACE}\u65e5\u672c",
        "e\u0301",
        "\u00e9",
        "null",
        "NaN",
        "0",
        "x" * 200,
        "${jndi}",
        "{}",
    )
    await storage.create_topic("_.-9", retention_enabled=True, retention_seconds=10)
    async with storage.exchange(0) as exchange:
        for lite in lites:
            await exchange.ask(append(f"_.-9/{lite}", b"1"))
            await exchange.ask(append(f"_.-9/keyed {lite}", b"1", fairness_key=lite[:100]))
    await clock.advance_ms(10_000)

    done = await retention()

    assert not done.failed
    assert done.counts["expired"] == 2 * len(lites)
    expected = {f"_.-9/{start}{lite}" for lite in lites for start in ("", "keyed ")}
    assert await history(storage) == {(name, "expired"): 1 for name in expected}


async def test_the_clock_of_the_driver_decides_nothing(
    storage: RunningStorage, spark: SparkSession, clock: ManualClock
) -> None:
    """R9: a driver that is 100 days ahead finds nothing due, whatever the rule."""
    await storage.create_topic("jobs", retention_enabled=True, retention_seconds=86_400)
    settings = RetentionSettings(storage_addresses=(storage.address,))
    ahead = Jobs(spark, settings, ManualClock(clock.wall_ms() + 100 * DAY_MS))
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs/full", b"x"))
        await exchange.ask(append("jobs/idle", b"x"))
        await taken_and_settled(exchange, "jobs/idle")
        await exchange.ask(operation(purge=Purge(lmq_name="jobs/idle")))
        await clock.advance_ms(CLIENT_TIMEOUT_MS)

        done = await asyncio.to_thread(ahead.retention)

    assert set(done.counts.values()) == {0}
    assert (await storage.queue("jobs/full")).queue.messages == 1
    assert (await storage.queue("jobs/idle")).queue.messages == 0
    assert await history(storage) == {("jobs/idle", "purge"): 1}


@pytest.mark.rocksdb(reason="its reads are made to fail")
@pytest.mark.parametrize("fails", ["before it is asked", "before it is read"])
async def test_a_partition_that_cannot_be_read_does_not_stop_the_others(
    start_storage: StartStorage,
    spark: SparkSession,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    """R9, L1: the others are cleaned, and the pass names the one that failed."""
    reads = FaultyReads()
    monkeypatch.setattr(
        "storage_svc.app.RocksEngines",
        lambda *args, **options: reads.around(RocksEngines(*args, **options)),
    )
    storage = await start_storage(partitions=2)
    job = Jobs(spark, RetentionSettings(storage_addresses=(storage.address,)), clock)
    topic = await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        for exchange in (first, second):
            await exchange.ask(append("old", b"1", b"2"))
        await clock.advance_ms(10_000)

        if fails == "before it is asked":
            reads.failing.add(0)
        else:
            find_due = job.find_due

            def find_due_and_fail(name: JobName) -> DueWork:
                due = find_due(name)
                reads.failing.add(0)
                return due

            monkeypatch.setattr(job, "find_due", find_due_and_fail)
        with caplog.at_level(logging.INFO, "spark_batch"):
            done = await asyncio.to_thread(job.retention)
        monkeypatch.undo()
        reads.failing.clear()
        again = await asyncio.to_thread(job.retention)

    assert done.counts["expired"] == 2
    assert list(done.failed) == [0]
    assert "the disk cannot be read" in done.failed[0]
    assert "a retention pass left out partitions: partition 0: " in caplog.text
    assert "RetentionService: Cleaned up expired_messages=2" in caplog.text
    assert (again.counts["expired"], again.failed) == (2, {})


async def test_a_long_pass_leaves_room_for_another(
    spark: SparkSession, jobs: Callable[..., Jobs], tmp_path: Path
) -> None:
    """R11: Spark has two slots here, and one pass has tasks for more."""

    def wait_for_its_file(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                while not (tmp_path / f"go-{number}").exists():
                    time.sleep(0.05)  # noqa: TID251 - in a worker of Spark, which has no event loop
            yield batch

    job = jobs()

    def run(name: str, tasks: DataFrame) -> int:
        with job.labelled(name, f"{name}-1"):
            return len(tasks.collect())  # in one stage: a second one would compete again

    blocked = spark.range(0, 6, 1, 6).mapInArrow(wait_for_its_file, "id long")
    retention = asyncio.create_task(asyncio.to_thread(run, "retention", blocked))
    status = spark.sparkContext.statusTracker()
    while not status.getActiveJobsIds():
        await SystemClock().sleep_ms(20)
    eviction = asyncio.create_task(asyncio.to_thread(run, "eviction", spark.range(0, 1, 1, 1)))
    while not eviction.done() and len(status.getActiveJobsIds()) < 2:
        await SystemClock().sleep_ms(20)  # or the slot goes to the only job that wants it

    try:
        # A job is active a moment before its tasks want a slot, so the first may go to retention.
        # If jobs did not share, retention would take every slot until five of its tasks are done.
        for number in range(3):
            (tmp_path / f"go-{number}").touch()
            await asyncio.wait({eviction}, timeout=60)
            if eviction.done():
                break
        assert eviction.done()
        counted = eviction.result()
        still_running = not retention.done()
    finally:
        for number in range(6):  # or its tasks would hold up every later test
            (tmp_path / f"go-{number}").touch()

    assert counted == 1
    assert still_running
    assert await retention == 6
