"""Retention of messages: deletions that are checked again in their commit (R1, R2, R5, R9)."""

from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    operation,
    reserve,
    settle,
)
from tests.support.retention_calls import (
    UNKNOWN_TABLE,
    Planned,
    apply,
    apply_parts,
    history,
    part_of,
    run,
    settled,
    table,
)
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.api.broker.v1.topic_pb2 import MAX_WAIT_ACTION_DEAD_LETTER
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_NACK,
    Materialize,
    RemoveQueue,
)
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ABANDONED_GROUP,
    RETENTION_TYPE_COMPLETED,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_INACTIVE_QUEUE,
    RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    RETENTION_TYPE_OLD_RECORDS,
    RETENTION_TYPE_PURGE,
    RETENTION_TYPE_UNSPECIFIED,
    SCAN_TABLE_NAME_HISTORY,
    SCAN_TABLE_NAME_QUEUES,
    SCAN_TABLE_NAME_RUNS,
    RetentionPart,
    RetentionType,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_ATTEMPTS_EXHAUSTED,
    SCAN_KIND_OUTBOX,
    DeleteTopicRequest,
)
from tidemark.clock import ManualClock
from tidemark.rpc import from_status


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


async def test_the_rows_of_one_queue_type_and_pass_are_counted_together_per_commit(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6: in one row per topic, type, pass and commit, which outlives queues and a restart."""
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
        ("kept/a", 1, RETENTION_TYPE_COMPLETED, "pass-1"),
        ("kept/a", 2, RETENTION_TYPE_COMPLETED, "pass-1"),
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
    """R1, R9: what is too young or held stays, also in the middle of the range."""
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


@pytest.mark.parametrize(
    ("queues", "messages", "planned"),
    [(65, 11, 0), (65, 11, 1), (205, 8, 0), (1025, 8, 1), (1025, 1, 0)],
)
async def test_a_call_with_many_rows_is_done_in_several_commits(
    storage: RunningStorage,
    exchange: ExchangeClient,
    clock: ManualClock,
    queues: int,
    messages: int,
    planned: int,
) -> None:
    """R7: others get their turn at the writer in between; rows of few runs take less of it, where
    the plan tells how many there are."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=1)
    body = [b"x"] * messages
    appended = await exchange.ask_all(*(append(f"kept/{n}", *body) for n in range(queues)))
    await clock.advance_ms(1000)
    commits = (await storage.info()).commits

    rows = [
        run(each.queue_id, 0, messages, f"kept/{n}")._replace(runs=planned)
        for n, each in enumerate(appended)
    ]
    applied = await apply(storage, RETENTION_TYPE_EXPIRED, *rows)

    assert applied == (queues * messages, 0, 0)
    assert (await storage.info()).commits == commits + 3


@pytest.mark.parametrize("kind", [RETENTION_TYPE_EXPIRED, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION])
async def test_a_row_removes_no_more_runs_than_were_planned(
    storage: RunningStorage,
    exchange: ExchangeClient,
    clock: ManualClock,
    kind: RetentionType.ValueType,
) -> None:
    """R7, R9: a commit is as large as the plan says; runs in between that stay do not count."""
    limits = {"retention_seconds": 1, "max_wait_time_seconds": 1}
    await storage.create_topic("kept", retention_enabled=True, **limits)
    made = [await exchange.ask(append("kept", b"x")) for _ in range(5)]
    (held,) = (await exchange.ask(reserve("kept", 1, visibility_ms=60_000))).slices
    await clock.advance_ms(1000)

    row = run(made[0].queue_id, 0, 5)._replace(runs=2)
    applied = [await apply(storage, kind, row) for _ in range(3)]

    assert held.first_offset == 0
    assert applied == [(2, 0, 0), (2, 0, 0), (0, 0, 1)]
    assert [row["first_offset"] for row in await table(storage, SCAN_TABLE_NAME_RUNS)] == [0]


@pytest.mark.parametrize("runs", [1, 2])
async def test_queues_that_were_loaded_to_be_cleaned_are_unloaded(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, runs: int
) -> None:
    """I9: with the commit, and not after an idle window; those that were loaded stay. Queues with
    one run are not loaded."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=1)
    names = [f"kept/{n}" for n in range(3)]
    frame = [append(name, b"x") for name in names]
    appended = (await exchange.ask_all(*frame * runs))[: len(names)]
    await storage.restart()
    await clock.advance_ms(1000)
    async with storage.exchange() as after:
        await after.ask(operation(materialize=Materialize(lmq_name=names[0])))
        rows = [run(e.queue_id, 0, runs, name) for e, name in zip(appended, names, strict=True)]
        applied = await apply(storage, RETENTION_TYPE_EXPIRED, *rows)
        found = await table(storage, SCAN_TABLE_NAME_QUEUES)

    assert applied == (3 * runs, 0, 0)
    loaded = {row["lmq_name"]: (row["materialized"], row["messages"]) for row in found}
    assert loaded == {names[0]: (True, 0), names[1]: (False, 0), names[2]: (False, 0)}


UNKNOWN_TYPE = RetentionType.ValueType(99)
PART: dict[str, Any] = {
    "type": RETENTION_TYPE_EXPIRED,
    "queue_ids": [1],
    "lmq_names": ["kept"],
    "first_offsets": [0],
    "end_offsets": [1],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"type": RETENTION_TYPE_UNSPECIFIED},
        {"type": UNKNOWN_TYPE},
        {"type": RETENTION_TYPE_PURGE},
        {"type": RETENTION_TYPE_OLD_RECORDS, "age_ms": 1},
        {"type": RETENTION_TYPE_OLD_RECORDS, "age_ms": 1, "table": UNKNOWN_TABLE},
        {"type": RETENTION_TYPE_OLD_RECORDS, "table": SCAN_TABLE_NAME_HISTORY},
        {"type": RETENTION_TYPE_INACTIVE_QUEUE, "before_ms": [1]},
        {"type": RETENTION_TYPE_INACTIVE_QUEUE, "age_ms": 1},
        {"type": RETENTION_TYPE_ABANDONED_GROUP, "before_ms": [1]},
        {"type": RETENTION_TYPE_ABANDONED_GROUP, "before_ms": [1], "groups": [""]},
        {"queue_ids": []},
        {"queue_ids": [1, 2]},
        {"lmq_names": []},
        {"first_offsets": []},
        {"first_offsets": [1]},
        {"end_offsets": []},
        {"end_offsets": [1, 2]},
        {"fairness_keys": ["a", "b"]},
        {"planned_rows": [1, 1]},
        {"before_ms": [1, 1]},
        {"groups": ["a", "b"]},
    ],
)
async def test_a_part_that_cannot_be_is_refused(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, fields: dict[str, Any]
) -> None:
    """S3, R9: and with it the whole call; nothing is deleted."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=1)
    await exchange.ask(append("kept", b"x"))
    await clock.advance_ms(1000)
    wrong = RetentionPart(**{**PART, **fields})

    with pytest.raises(errors.InvalidArgument):
        await apply_parts(storage.retention, RetentionPart(**PART), wrong)

    assert (await storage.queue("kept")).queue.messages == 1


async def test_a_call_is_bounded_and_names_its_pass(storage: RunningStorage) -> None:
    """S3: the rows of all parts count, and those of the same kind share commits."""
    many = part_of(RETENTION_TYPE_EXPIRED, [run(1)] * 5_000)
    longest = "p" * limits.PRODUCER_ID_BYTES_MAX
    stub = storage.retention
    commits = (await storage.info()).commits

    applied = await apply_parts(stub, many, many, pass_id=longest)
    with pytest.raises(errors.BatchTooLarge):
        await apply_parts(stub, many, many, RetentionPart(**PART))
    for pass_id in ("", longest + "p"):
        with pytest.raises(errors.InvalidArgument):
            await apply_parts(stub, many, pass_id=pass_id)
    with pytest.raises(errors.InvalidArgument):
        await apply_parts(stub)

    assert [each.stale for each in applied] == [5_000, 5_000]
    assert (await storage.info()).commits == commits


async def test_one_call_carries_parts_of_several_partitions_topics_and_types(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """R7, R9: each has its own result, small ones share a commit, and one that is not held here
    does not stop the others."""
    storage = await start_storage(partitions=2)
    topics = [
        await storage.create_topic("kept", retention_enabled=True, retention_seconds=1),
        await storage.create_topic("wait", max_wait_time_seconds=1),
    ]
    parts = []
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        for topic in topics:
            await apply_topic(second, topic)
        for number, exchange in enumerate((first, second)):
            kept = await exchange.ask(append("kept", b"1", b"2"))
            wait = await exchange.ask(append("wait", b"3"))
            expired = run(kept.queue_id, 0, 2, "kept")
            waited = run(wait.queue_id, 0, 1, "wait")
            parts += [
                part_of(RETENTION_TYPE_EXPIRED, [expired, expired], number),
                part_of(RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, [waited], number),
            ]
        await clock.advance_ms(1000)
        commits = (await storage.info()).commits

        missing = RetentionPart(**{**PART, "partition": 7})
        *applied, refused = await apply_parts(storage.retention, *parts, missing)

    assert [(each.messages, each.stale) for each in applied] == [(2, 1), (1, 0)] * 2
    assert not any(each.HasField("error") for each in applied)
    assert from_status(refused.error).reason == "PARTITION_NOT_FOUND"
    assert (await storage.info()).commits == commits + 1
    assert sorted(each[:2] for each in await history(storage)) == [
        ("kept", 2),
        ("kept", 2),
        ("wait", 1),
        ("wait", 1),
    ]


async def wait_with_nine_of_ten_settled(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, **settings: Any
) -> int:
    """One run whose last message has waited too long; the others are settled. The queue's id."""
    await storage.create_topic("kept", retention_enabled=True, max_wait_time_seconds=5, **settings)
    queue_id: int = (await exchange.ask(append("kept", *[b"x"] * 10))).queue_id
    (first,) = (await exchange.ask(reserve("kept"))).slices
    await exchange.ask(settle(first.receipt, SETTLE_ACTION_ACK, (0, 9)))
    await exchange.ask(settle(first.receipt, SETTLE_ACTION_NACK))
    await clock.advance_ms(5_000)
    return queue_id


@pytest.mark.parametrize("handed_out", [True, False])
async def test_eviction_leaves_the_messages_of_a_run_that_are_kept_for_replay(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, handed_out: bool
) -> None:
    """R5, R2: only what has waited is settled, whether or not it was ever handed out."""
    await storage.create_topic("kept", retention_enabled=True, max_wait_time_seconds=5)
    queue_id = (await exchange.ask(append("kept", *[b"x"] * 10))).queue_id
    (taken,) = (await exchange.ask(reserve("kept", 10 if handed_out else 9))).slices
    await exchange.ask(settle(taken.receipt, SETTLE_ACTION_ACK, (0, 9)))
    if handed_out:
        await exchange.ask(settle(taken.receipt, SETTLE_ACTION_NACK))
    await clock.advance_ms(5_000)

    applied = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id, 0, 10))
    again = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id, 0, 10))
    await storage.restart()
    async with storage.exchange() as after:
        left = (await storage.queue("kept")).queue.messages
        await after.ask(append("kept", b"next"))
        (following,) = (await after.ask(reserve("kept"))).slices
        await after.ask(settle(following.receipt))
        (replayed,) = (await after.ask(reserve("kept", 10, group="replay"))).slices

    assert (applied, again) == ((1, 0, 0), (0, 0, 1))
    assert left == 10
    assert (following.first_offset, following.count) == (10, 1)
    assert (replayed.first_offset, replayed.count) == (0, 10)
    assert await history(storage) == [("kept", 1, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, "pass-1")]


async def test_dead_lettering_after_max_wait_leaves_what_is_kept_for_replay(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R5, R2."""
    await storage.create_topic("dead")
    queue_id = await wait_with_nine_of_ten_settled(
        storage,
        exchange,
        clock,
        max_wait_action=MAX_WAIT_ACTION_DEAD_LETTER,
        dead_letter_topic="dead",
    )

    applied = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id, 0, 10))

    assert applied == (1, 0, 0)
    assert (await storage.queue("kept")).queue.messages == 10
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    assert entry.append_from_outbox.entry.count == 1


async def test_no_rule_erases_messages_whose_attempts_are_exhausted_before_a_sweep_took_them(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R1, R5, L5: they go to the dead-letter topic; the plan does not name them either."""
    await storage.create_topic("dead")
    await storage.create_topic(
        "kept",
        retention_enabled=True,
        retention_seconds=5,
        max_wait_time_seconds=5,
        max_attempts=1,
        dead_letter_topic="dead",
    )
    queue_id = (await exchange.ask(append("kept", b"x"))).queue_id
    (taken,) = (await exchange.ask(reserve("kept"))).slices
    await exchange.ask(settle(taken.receipt, SETTLE_ACTION_NACK))
    await clock.advance_ms(5_000)

    expired = await apply(storage, RETENTION_TYPE_EXPIRED, run(queue_id))
    evicted = await apply(storage, RETENTION_TYPE_MAX_WAIT_TIME_EVICTION, run(queue_id))
    (planned,) = await table(storage, SCAN_TABLE_NAME_RUNS)
    (sweep,) = await storage.due(SCAN_KIND_ATTEMPTS_EXHAUSTED)
    await exchange.ask(operation(action=sweep))
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)

    assert expired == evicted == (0, 0, 1)
    assert planned["held"]
    assert entry.append_from_outbox.entry.count == 1


async def test_a_deleted_queue_leaves_a_row_of_history(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R6: scheduled messages count; a queue without messages leaves none."""
    await exchange.ask_all(append("jobs/full", b"1", b"2"), append("jobs/empty", b"x"))
    await exchange.ask(append("jobs/full", b"3", delay_ms=1000))
    await settled(exchange, "jobs/empty")

    for name in ("jobs/full", "jobs/empty"):
        await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name=name)))

    assert await history(storage) == [("jobs/full", 3, RETENTION_TYPE_PURGE, "delete")]


@pytest.mark.parametrize("loaded", [True, False])
async def test_no_limit_applies_to_a_queue_that_outlives_its_topic(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, loaded: bool
) -> None:
    """R9: the topic was deleted after the plan was made, whether or not the queue is loaded."""
    await storage.create_topic("gone", retention_enabled=True, retention_seconds=10)
    await exchange.ask(append("gone/a", b"1", b"2"))
    queue_id = (await storage.queue("gone/a")).queue.queue_id
    await clock.advance_ms(10_000)
    await storage.storage.DeleteTopic(DeleteTopicRequest(name="gone"))
    if not loaded:
        await storage.restart()

    applied = await apply(storage, RETENTION_TYPE_EXPIRED, Planned(queue_id, "gone/a", 0, 2))

    assert applied == (0, 0, 1)
    assert (await storage.queue("gone/a")).queue.messages == 2
