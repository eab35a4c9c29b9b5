"""Sweeps: finding what is due, and doing it unless it has moved on (L2, L5, L7, L8)."""

from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import RunningStorage, loaded
from tests.support.unowned_partition import publish
from tidemark import errors, limits
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_DONE,
    ACTION_OUTCOME_STALE,
    Action,
    AppendFromOutbox,
    ClearOutbox,
    OutboxEntry,
)
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    ExpireDue,
    Materialize,
    RemoveQueue,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_ATTEMPTS_EXHAUSTED,
    SCAN_KIND_DEAD_DEADLINES,
    SCAN_KIND_DELAYS_OVER,
    SCAN_KIND_EXPIRED_RESERVATIONS,
    SCAN_KIND_OUTBOX,
    SCAN_KIND_SCHEDULES_DUE,
    SCAN_KIND_UNSPECIFIED,
    DeleteTopicRequest,
    ScanKind,
)
from tidemark.clock import ManualClock


async def test_due_reservations_are_found_and_expired_by_the_service_that_is_asked(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """V1, L2: where no broker owns the partition, sweeps do it."""
    await publish(storage, append("jobs", b"x"), reserve("jobs", visibility_ms=500))

    early = await storage.scan(SCAN_KIND_EXPIRED_RESERVATIONS)
    await clock.advance_ms(500)
    due = await storage.scan(SCAN_KIND_EXPIRED_RESERVATIONS)
    (fact,) = due.facts
    (done,) = await storage.delegate(fact.action)
    (repeated,) = await storage.delegate(fact.action)
    after = await storage.scan(SCAN_KIND_EXPIRED_RESERVATIONS)

    assert (len(early.facts), early.next_due_in_ms) == (0, 500)
    assert (fact.due_ms, due.partition_time_ms) == (clock.wall_ms(), clock.wall_ms())
    assert due.broker_address == "", "its broker is gone"
    assert (done.outcome, done.messages) == (ACTION_OUTCOME_DONE, 1)
    assert repeated.outcome == ACTION_OUTCOME_STALE
    assert (len(after.facts), after.HasField("next_due_in_ms")) == (0, False)


async def test_an_extension_makes_a_planned_expiry_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L8."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=500)
    await clock.advance_ms(500)
    (planned,) = await storage.due(SCAN_KIND_EXPIRED_RESERVATIONS)
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_EXTEND, duration_ms=500))

    stale = await exchange.ask(operation(action=planned))

    assert stale.outcome == ACTION_OUTCOME_STALE
    assert (await exchange.ask(settle(got.receipt))).messages == 1


async def test_delays_that_are_over_are_found_and_ended(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5, L8."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK, duration_ms=500))
    await clock.advance_ms(500)

    (planned,) = await storage.due(SCAN_KIND_DELAYS_OVER)
    done, repeated = await exchange.ask_all(*[operation(action=planned)] * 2)

    assert (done.outcome, done.messages) == (ACTION_OUTCOME_DONE, 1)
    assert repeated.outcome == ACTION_OUTCOME_STALE
    assert (await reserved(exchange, "jobs")).attempt_count == 1


async def test_a_scheduled_run_becomes_ready_once_and_never_early(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5, L7: the schedule outlives a restart."""
    scheduled = await exchange.ask(append("jobs", b"later", delay_ms=500, fairness_key="k"))
    await exchange.ask(append("jobs", b"now"))
    await storage.restart()
    async with storage.exchange() as after:
        early = await storage.scan(SCAN_KIND_SCHEDULES_DUE)
        await clock.advance_ms(500)
        (planned,) = await storage.due(SCAN_KIND_SCHEDULES_DUE)
        done, repeated = await after.ask_all(*[operation(action=planned)] * 2)
        slices = (await after.ask(reserve("jobs"))).slices

    assert scheduled.schedule_id
    assert early.next_due_in_ms == 500
    assert (done.outcome, done.messages) == (ACTION_OUTCOME_DONE, 1)
    assert repeated.outcome == ACTION_OUTCOME_STALE
    assert {each.first_offset: payloads(each.body) for each in slices} == {
        0: [b"now"],
        1: [b"later"],
    }


async def test_a_planned_action_before_its_time_is_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5, L8: whatever the clock of the planner shows."""
    scheduled = await exchange.ask(append("jobs", b"later", delay_ms=500))
    action = Action()
    action.promote_scheduled.schedule_id = scheduled.schedule_id
    action.promote_scheduled.expected_due_ms = clock.wall_ms() + 500

    early = await exchange.ask(operation(action=action))

    assert early.outcome == ACTION_OUTCOME_STALE


async def test_messages_past_their_time_to_live_are_buried_unless_they_are_held(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5, L6, L8."""
    await exchange.ask_all(append("jobs", b"held", ttl_ms=100), append("jobs", b"1", ttl_ms=100))
    held = await reserved(exchange, "jobs", 1)
    await clock.advance_ms(100)

    planned = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    results = await exchange.ask_all(*(operation(action=each) for each in planned))

    assert [each.outcome for each in results] == [ACTION_OUTCOME_STALE, ACTION_OUTCOME_DONE]
    assert (await storage.queue("jobs")).queue.messages == 1
    assert (await exchange.ask(settle(held.receipt))).messages == 1
    assert await storage.due(SCAN_KIND_DEAD_DEADLINES) == []


async def test_exhausted_messages_are_buried_once(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L5, L8: and survive a restart as what they are."""
    await storage.create_topic("once", max_attempts=1)
    await exchange.ask(append("once", b"0", b"1", b"2"))
    got = await reserved(exchange, "once")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK, (1, 2)))
    await storage.restart()

    async with storage.exchange() as after:
        (planned,) = await storage.due(SCAN_KIND_ATTEMPTS_EXHAUSTED)
        done, repeated = await after.ask_all(*[operation(action=planned)] * 2)

    assert planned.bury_messages.expected_attempt_count == 1
    assert (done.outcome, done.messages) == (ACTION_OUTCOME_DONE, 1)
    assert repeated.outcome == ACTION_OUTCOME_STALE
    assert await storage.due(SCAN_KIND_ATTEMPTS_EXHAUSTED) == []


async def test_queues_that_a_sweep_has_loaded_are_unloaded_with_its_commit(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: by every kind of action, and not after an idle window; those in use stay loaded."""
    await storage.create_topic("dead")
    await storage.create_topic("once", max_attempts=1, dead_letter_topic="dead")
    names = [f"jobs/{name}" for name in ("reserved", "delayed", "mortal", "used")]
    await exchange.ask_all(*(append(name, b"x", ttl_ms=1000) for name in names[2:]))
    await exchange.ask_all(append("jobs/later", b"x", delay_ms=500), append("once/failed", b"x"))
    await exchange.ask_all(*(append(name, b"x") for name in names[:2]))
    await reserved(exchange, names[0], visibility_ms=500)
    delayed, failed = [await reserved(exchange, name) for name in (names[1], "once/failed")]
    await exchange.ask(settle(delayed.receipt, SETTLE_ACTION_NACK, duration_ms=500))
    await exchange.ask(settle(failed.receipt, SETTLE_ACTION_NACK))
    await storage.restart()
    await publish(storage, operation(materialize=Materialize(lmq_name=names[3])))
    before = await loaded(storage)
    await clock.advance_ms(1000)

    results = {}
    for kind in (
        SCAN_KIND_EXPIRED_RESERVATIONS,
        SCAN_KIND_DELAYS_OVER,
        SCAN_KIND_SCHEDULES_DUE,
        SCAN_KIND_DEAD_DEADLINES,
        SCAN_KIND_ATTEMPTS_EXHAUSTED,
        SCAN_KIND_OUTBOX,
    ):
        done = await storage.delegate(*await storage.due(kind))
        results[kind] = ([each.outcome for each in done], await loaded(storage))

    assert before == 1
    mortal = results.pop(SCAN_KIND_DEAD_DEADLINES)
    assert mortal == ([ACTION_OUTCOME_DONE] * 2, 1)
    assert set(map(str, results.values())) == {str(([ACTION_OUTCOME_DONE], 1))}
    assert (await storage.queue("dead")).queue.messages == 1


async def test_an_action_on_a_queue_that_is_gone_is_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L8: also if there is another queue under the same name."""
    await storage.create_topic("once", max_attempts=1)
    await exchange.ask(append("once", b"dead", ttl_ms=100))
    await exchange.ask(append("once", b"late", delay_ms=100))
    got = await reserved(exchange, "once", visibility_ms=100)
    await clock.advance_ms(100)
    kinds = (
        SCAN_KIND_EXPIRED_RESERVATIONS,
        SCAN_KIND_SCHEDULES_DUE,
        SCAN_KIND_DEAD_DEADLINES,
    )
    planned = [action for kind in kinds for action in await storage.due(kind)]
    await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name="once")))
    await exchange.ask(append("once", b"new"))

    results = await exchange.ask_all(*(operation(action=each) for each in planned))

    assert len(planned) == 3
    assert [each.outcome for each in results] == [ACTION_OUTCOME_STALE] * 3
    assert [await storage.due(kind) for kind in kinds] == [[], [], []]
    assert (await storage.queue("once")).queue.messages == 1
    assert got.count == 1


async def test_an_action_on_a_queue_that_goes_in_the_same_commit_is_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L3, L8: actions are batched with other work."""
    await exchange.ask_all(append("jobs", b"x"), append("jobs", b"y"))
    await exchange.ask(reserve("jobs", 1, visibility_ms=100))
    got = await reserved(exchange, "jobs", 1)
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK, duration_ms=100))
    await clock.advance_ms(100)
    kinds = (SCAN_KIND_EXPIRED_RESERVATIONS, SCAN_KIND_DELAYS_OVER)
    planned = [action for kind in kinds for action in await storage.due(kind)]

    removed, *results = await exchange.ask_all(
        operation(remove_queue=RemoveQueue(lmq_name="jobs")),
        *(operation(action=each) for each in planned),
    )

    assert removed.messages == 2
    assert [each.outcome for each in results] == [ACTION_OUTCOME_STALE] * 2


@pytest.mark.rocksdb(reason="a scan that is verified expires what is due")
async def test_a_scan_is_paged_earliest_first(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    await exchange.ask_all(*(append(f"jobs/{n}", b"x") for n in range(5)))
    await exchange.ask_all(*(reserve(f"jobs/{n}", visibility_ms=500 - n) for n in range(5)))
    await clock.advance_ms(500)

    found: list[int] = []
    token = b""
    while True:
        page = await storage.scan(SCAN_KIND_EXPIRED_RESERVATIONS, page_size=2, page_token=token)
        assert len(page.facts) <= 2
        found += [fact.due_ms - clock.wall_ms() for fact in page.facts]
        token = page.next_page_token
        if not token:
            break

    assert found == [-4, -3, -2, -1, 0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"kind": SCAN_KIND_UNSPECIFIED}, "INVALID_ARGUMENT"),
        ({"kind": SCAN_KIND_OUTBOX, "page_size": limits.PAGE_SIZE_MAX + 1}, "INVALID_ARGUMENT"),
        ({"kind": SCAN_KIND_OUTBOX, "partition": 1}, "PARTITION_NOT_FOUND"),
        pytest.param(
            {"kind": ScanKind.ValueType(99)},
            "INVALID_ARGUMENT",
        ),
    ],
)
async def test_a_scan_for_something_else_is_refused(
    storage: RunningStorage, asked: dict[str, Any], reason: str
) -> None:
    """S3."""
    with pytest.raises(errors.TidemarkError) as refused:
        await storage.scan(**asked)

    assert refused.value.reason == reason
    await storage.scan(SCAN_KIND_OUTBOX, page_size=limits.PAGE_SIZE_MAX)


async def test_actions_are_for_the_broker_while_one_is_connected(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L2."""
    await exchange.healths.get()

    with pytest.raises(errors.NotOwner) as refused:
        await storage.delegate(Action(clear_outbox=ClearOutbox(sequence=1)))

    assert refused.value.metadata["owner"] == "127.0.0.1:1"


CLEAR = Action(clear_outbox=ClearOutbox(sequence=1))


@pytest.mark.parametrize(
    ("actions", "partition", "reason"),
    [
        ([], 0, "INVALID_ARGUMENT"),
        ([CLEAR] * (limits.PAGE_SIZE_MAX + 1), 0, "INVALID_ARGUMENT"),
        ([CLEAR, Action()], 0, "INVALID_ARGUMENT"),
        ([CLEAR], 1, "PARTITION_NOT_FOUND"),
        pytest.param(
            [
                Action(
                    append_from_outbox=AppendFromOutbox(
                        source_partition=3,
                        entry=OutboxEntry(
                            sequence=1, destination_lmq_name="jobs", count=0, body=b"\xff"
                        ),
                    )
                )
            ],
            0,
            "INVALID_ARGUMENT",
        ),
    ],
)
async def test_actions_that_cannot_be_are_refused(
    storage: RunningStorage, actions: list[Action], partition: int, reason: str
) -> None:
    """S3."""
    with pytest.raises(errors.TidemarkError) as refused:
        await storage.delegate(*actions, partition=partition)

    assert refused.value.reason == reason


async def test_as_many_actions_as_may_be_are_done(storage: RunningStorage) -> None:
    """S3: at the limit."""
    results = await storage.delegate(*[CLEAR] * limits.PAGE_SIZE_MAX)

    assert {each.outcome for each in results} == {ACTION_OUTCOME_STALE}


async def test_a_queue_whose_topic_is_gone_holds_up_no_expiry_and_can_be_deleted(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """V1."""
    await storage.create_topic("gone")
    await publish(
        storage,
        *(append("gone", b"x"), append("jobs", b"y")),
        *(reserve("gone", visibility_ms=100), reserve("jobs", visibility_ms=200)),
    )
    await storage.storage.DeleteTopic(DeleteTopicRequest(name="gone"))
    await storage.restart()
    await clock.advance_ms(1000)

    async with storage.exchange() as exchange:
        await exchange.ask_all(operation(expire_due=ExpireDue()))
        assert payloads((await reserved(exchange, "jobs")).body) == [b"y"]
        await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name="gone")))
