"""Sweeps: what is due, what storage does about it, and the health and time of a partition."""

import asyncio
from typing import Any

import pytest

from tests.rpc.conftest import StartStorage
from tests.rpc.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    apply_topic,
    operation,
    payloads,
    reserve,
    settle,
)
from tidemark import errors, limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.api.broker.v1.topic_pb2 import (
    PARTITION_STATE_FAULTY,
    PARTITION_STATE_SERVING,
    PARTITION_STATE_STARTING,
)
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_DONE,
    ACTION_OUTCOME_REFUSED,
    ACTION_OUTCOME_STALE,
    Action,
    AppendFromOutbox,
    ClearOutbox,
    OutboxEntry,
)
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_DEAD_LETTER,
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    ExpireDue,
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
    ConfirmPartitionTimeRequest,
    DeleteTopicRequest,
    ReportSweepRequest,
    ScanKind,
)
from tidemark.clock import ManualClock
from tidemark.names import partition_of

HOUR_MS = 60 * 60 * 1000
DAY_MS = 24 * HOUR_MS


async def reserved(exchange: ExchangeClient, lmq_name: str, *asked: Any, **fields: Any) -> Any:
    (got,) = (await exchange.ask(reserve(lmq_name, *asked, **fields))).slices
    return got


async def publish(storage: RunningStorage, *operations: Any) -> None:
    """Through an exchange that is gone afterwards: then storage itself acts for the owner."""
    async with storage.exchange() as exchange:
        for outcome in await exchange.ask_all(*operations):
            assert not isinstance(outcome, Exception), outcome
    await undriven(storage)


async def undriven(storage: RunningStorage) -> None:
    """Wait until storage has noticed that the exchange is gone."""
    while True:
        try:
            await storage.delegate(Action(clear_outbox=ClearOutbox(sequence=1 << 60)))
        except errors.NotOwner:
            await asyncio.sleep(0)  # noqa: TID251 - only lets the server run
        else:
            return


# --- finding and doing (L2, L5, L7, L8) -----------------------------------------------------------


async def test_due_reservations_are_found_and_expired_by_whoever_is_asked(
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
    assert due.owner_address == "", "its broker is gone"
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
    """L5, L8: whatever the clock of the planner says."""
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


# --- the outbox (L6) ------------------------------------------------------------------------------


@pytest.fixture
async def two_partitions(start_storage: StartStorage) -> RunningStorage:
    """The topic `jobs` in partition 0, its dead letters in partition 1."""
    storage = await start_storage(partitions=2)
    dead = next(name for name in map("dead-{}".format, range(99)) if partition_of(name, 2) == 1)
    await storage.create_topic("jobs", dead_letter_topic=dead, max_attempts=1)
    topic = await storage.create_topic(dead)
    async with storage.exchange(partition=1) as exchange:
        await apply_topic(exchange, topic)
    return storage


async def test_a_dead_letter_reaches_its_topic_once_whoever_dies_in_between(
    two_partitions: RunningStorage,
) -> None:
    """L6: append once, clear; a repeat of either is stale; restarted between any two steps."""
    storage = two_partitions
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"fine", b"bad", fairness_key="k"))
        got = await reserved(exchange, "jobs/a")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER, (1, 2), detail="bad!"))
        await exchange.ask(settle(got.receipt))

    await storage.restart()
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    (appended,) = await storage.delegate(entry, partition=1)
    await storage.restart()
    (again,) = await storage.delegate(entry, partition=1)
    clear = Action(clear_outbox=ClearOutbox(sequence=entry.append_from_outbox.entry.sequence))
    (cleared,) = await storage.delegate(clear)
    await storage.restart()
    (cleared_again,) = await storage.delegate(clear)

    assert (appended.outcome, appended.messages) == (ACTION_OUTCOME_DONE, 1)
    assert again.outcome == ACTION_OUTCOME_STALE
    assert (cleared.outcome, cleared_again.outcome) == (ACTION_OUTCOME_DONE, ACTION_OUTCOME_STALE)
    assert await storage.due(SCAN_KIND_OUTBOX) == []
    async with storage.exchange(partition=1) as exchange:
        dead = entry.append_from_outbox.entry.destination_lmq_name
        copy = await reserved(exchange, dead)
        (message,) = MessageBatch.FromString(copy.body).messages
        assert (message.payload, copy.fairness_key) == (b"bad", "k")
        headers = dict(message.headers)
        assert int(headers.pop("tidemark-dead-time-ms")) > 0
        assert headers == {
            "tidemark-dead-reason": "rejected",
            "tidemark-dead-detail": "bad!",
            "tidemark-dead-topic": "jobs",
            "tidemark-dead-queue": "jobs/a",
            "tidemark-dead-offset": "1",
            "tidemark-dead-group": "default",
            "tidemark-dead-attempts": "0",
        }


async def test_exhausted_messages_go_to_the_dead_letter_topic(
    two_partitions: RunningStorage,
) -> None:
    """L6."""
    storage = two_partitions
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"x"))
        got = await reserved(exchange, "jobs/a")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
        (bury,) = await storage.due(SCAN_KIND_ATTEMPTS_EXHAUSTED)
        await exchange.ask(operation(action=bury))

    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    (message,) = MessageBatch.FromString(entry.append_from_outbox.entry.body).messages
    assert message.headers["tidemark-dead-reason"] == "attempts_exhausted"
    assert message.headers["tidemark-dead-attempts"] == "1"
    assert (await storage.queue("jobs/a")).queue.messages == 0


async def test_a_dead_letter_waits_while_its_destination_refuses(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await storage.create_topic("doomed", dead_letter_topic="not-yet")
    await exchange.ask(append("doomed", b"x"))
    got = await reserved(exchange, "doomed")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)

    (refused,) = await exchange.ask_all(operation(action=entry))
    await storage.create_topic("not-yet")
    done = await exchange.ask(operation(action=entry))

    assert isinstance(refused, errors.TopicNotFound)
    assert done.outcome == ACTION_OUTCOME_DONE


async def test_a_refused_dead_letter_is_not_lost_when_a_later_one_is_appended(
    storage: RunningStorage,
) -> None:
    """L6: no loss; a sweep hands over a page of entries at once."""
    await storage.create_topic("first", dead_letter_topic="not-yet")
    await storage.create_topic("second", dead_letter_topic="jobs")
    async with storage.exchange() as exchange:
        for name in ("first", "second"):
            await exchange.ask(append(name, b"x"))
            got = await reserved(exchange, name)
            await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    await undriven(storage)
    entries = await storage.due(SCAN_KIND_OUTBOX)

    refused, _ = await storage.delegate(*entries)
    await storage.create_topic("not-yet")
    again = await storage.delegate(*entries)

    assert refused.outcome == ACTION_OUTCOME_REFUSED
    assert [each.outcome for each in again if each.outcome == ACTION_OUTCOME_REFUSED] == []
    assert (await storage.queue("not-yet")).queue.messages == 1
    assert (await storage.queue("jobs")).queue.messages == 1


async def test_large_dead_letters_can_be_read(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await storage.create_topic("large", dead_letter_topic="jobs")
    for number in range(5):
        await exchange.ask(append(f"large/{number}", *[bytes(1_000_000)] * 4))
        got = await reserved(exchange, f"large/{number}")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))

    assert await storage.due(SCAN_KIND_OUTBOX) != []


# --- health (L4) ----------------------------------------------------------------------------------


async def report(storage: RunningStorage, succeeded: bool, detail: str = "") -> Any:
    request = ReportSweepRequest(succeeded=succeeded, detail=detail)
    return (await storage.storage.ReportSweep(request)).health


async def test_a_partition_takes_no_publishes_before_its_first_sweep(
    start_storage: StartStorage,
) -> None:
    """L4: STARTING; everything else goes on."""
    storage = await start_storage(await_sweep=True)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        first = await exchange.healths.get()
        (refused,) = await exchange.ask_all(append("jobs", b"x"))

        await report(storage, succeeded=True)

        second = await exchange.healths.get()
        await exchange.ask(append("jobs", b"x"))
    assert first.state == PARTITION_STATE_STARTING
    assert [fault.reason for fault in first.faults] == ["AWAITING_SWEEP"]
    assert isinstance(refused, errors.LifecycleUnavailable)
    assert refused.retry_after_ms is not None
    assert (second.state, len(second.faults)) == (PARTITION_STATE_SERVING, 0)


async def test_a_failed_sweep_makes_the_partition_faulty_until_one_succeeds(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """L4."""
    storage = await start_storage(await_sweep=True)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.healths.get()

        failed = await report(storage, succeeded=False, detail="cannot read")
        told = await exchange.healths.get()
        (refused,) = await exchange.ask_all(append("jobs", b"x"))
        since = clock.wall_ms()
        await clock.advance_ms(1000)
        still = await report(storage, succeeded=False, detail="cannot read yet")
        mended = await report(storage, succeeded=True)
        await exchange.ask(append("jobs", b"x"))

    assert failed.state == told.state == PARTITION_STATE_FAULTY
    assert [fault.reason for fault in failed.faults] == ["AWAITING_SWEEP", "SWEEP_FAILED"]
    assert failed.faults[1].detail == "cannot read"
    assert isinstance(refused, errors.PartitionFaulty)
    assert "SWEEP_FAILED" in refused.metadata["reasons"]
    assert still.faults[1].since_time.ToMilliseconds() == since
    assert mended.state == PARTITION_STATE_SERVING


async def test_settles_go_on_while_publishes_are_refused(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L4."""
    await exchange.ask(append("jobs", b"x"))
    await report(storage, succeeded=False)

    got = await reserved(exchange, "jobs")

    assert (await exchange.ask(settle(got.receipt))).messages == 1


async def test_a_report_for_a_partition_elsewhere_is_refused(storage: RunningStorage) -> None:
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ReportSweep(ReportSweepRequest(partition=1))
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest(partition=1))


# --- time -----------------------------------------------------------------------------------------


async def test_partition_time_never_goes_back(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    start = clock.wall_ms()
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=1000)

    clock.set_wall_ms(start - DAY_MS)
    await clock.advance_ms(999)
    early = await exchange.ask(operation(expire_due=ExpireDue()))
    await clock.advance_ms(1)
    due = await exchange.ask(operation(expire_due=ExpireDue()))

    assert (early.messages, due.messages) == (0, 1)
    assert got.publish_time_ms == start
    await storage.restart()
    scanned = await storage.scan(SCAN_KIND_OUTBOX)
    assert scanned.partition_time_ms >= start + 1000


async def test_a_far_jump_of_the_clock_suspends_deleting_until_it_is_confirmed(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """A wrong date must not expire everything that is stored."""
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    clock.set_wall_ms(clock.wall_ms() + HOUR_MS + 1)
    (planned,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)

    (suspended,) = await exchange.ask_all(operation(action=planned))
    confirmed = await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest())
    done = await exchange.ask(operation(action=planned))

    assert isinstance(suspended, errors.PartitionFaulty)
    assert confirmed.partition_time_ms == clock.wall_ms()
    assert done.outcome == ACTION_OUTCOME_DONE


async def test_a_small_jump_of_the_clock_suspends_nothing(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    clock.set_wall_ms(clock.wall_ms() + HOUR_MS)
    (planned,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)

    done = await exchange.ask(operation(action=planned))

    assert done.outcome == ACTION_OUTCOME_DONE


async def test_a_far_jump_of_the_clock_makes_no_producer_forgotten(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """S11: never a second append."""
    run = append("jobs", b"x", producer_id="p", sequence=1)
    await exchange.ask(run)
    clock.set_wall_ms(clock.wall_ms() + 30 * DAY_MS)
    await clock.advance_ms(2000)

    again = await exchange.ask(run)

    assert again.duplicate
