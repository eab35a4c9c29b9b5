"""Mistakes that a partition once made, each as the shortest way to it.

Most of them need several operations in one commit, where what the engine shows is not yet the
truth, or a reopening, where it is all there is.
"""

import asyncio

import pytest

from storage_svc.engines.engine import Table
from storage_svc.operations.claim import ClaimPartition
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.groups import PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.history import RetentionType
from storage_svc.operations.loading import RunHousekeeping, UnloadOutcome, Unmaterialize
from storage_svc.operations.operation import ActionOutcome, Operation
from storage_svc.operations.outbox import AppendFromOutbox, ClearOutbox
from storage_svc.operations.ownership import ConfirmOwnership, TakeOwnership
from storage_svc.operations.publish import Appended
from storage_svc.operations.queues import Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.retention import ApplyRetention
from storage_svc.operations.retention_rules import RetentionRow
from storage_svc.operations.schedule import PromoteScheduled
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.counters import Claim
from storage_svc.queue.reservation import Ending
from storage_svc.reads import due_work
from tests.support.exchange_client import payloads
from tests.support.faulty_engine import Fault
from tests.support.partition_life import ACK, DAY_MS, NACK, Life, spans
from tidemark.errors import CommitOutcomeUnknown, PartitionFaulty, QueueFull, ReservationNotFound
from tidemark.topics import Subscription, Topic, TopicSettings

# --- several operations in one commit -------------------------------------------------------------


async def test_a_queue_that_the_commit_has_touched_is_not_unloaded(life: Life) -> None:
    """I4: what the commit changes could not be loaded again."""
    await life.do(life.run("t", 2))

    answers = await life.do(life.run("t", 2), Unmaterialize("t"), life.run("t", 2))

    assert answers[1] is UnloadOutcome.RACE_LOST
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 2), (2, 4), (4, 6)]


async def test_a_queue_that_the_commit_has_made_is_not_unloaded(life: Life) -> None:
    answers = await life.do(life.run("t", 2), Unmaterialize("t"), life.run("t", 2))

    assert answers[1] is UnloadOutcome.RACE_LOST
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 2), (2, 4)]


async def test_publishing_to_a_name_that_the_commit_has_removed_makes_another_queue(
    life: Life,
) -> None:
    first = await life.do(life.run("t", 2))

    _, second = await life.do(RemoveQueue("t"), life.run("t", 3))

    assert second.queue_id > first.queue_id
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 3)]


async def test_a_settlement_does_not_revive_the_queue_that_the_commit_has_removed(
    life: Life,
) -> None:
    await life.do(life.run("t", 2))
    (held,) = (await life.do(Reserve("t", "g", 1))).slices

    _, refusal = await life.do(RemoveQueue("t"), Settle(held.receipt, ACK))

    assert isinstance(refusal, ReservationNotFound)
    assert await life.rows(Table.CATALOG, Table.QUEUES) == 0


async def test_what_the_commit_has_purged_is_not_handed_out(life: Life) -> None:
    """Also where the backlog is longer than what a lane keeps in memory."""
    for _ in range(130):
        await life.do(life.run("t", 1))

    _, reserved = await life.do(Purge("t"), Reserve("t", "g", 1))

    assert reserved.slices == ()


async def test_a_producer_that_publishes_as_old_ones_are_forgotten_is_remembered(
    life: Life,
) -> None:
    """S11."""
    await life.do(life.run("t", 1, producer_id="p", sequence=1))
    life.clock.set_wall_ms(life.clock.wall_ms() + 10 * DAY_MS)
    again = life.run("t", 1, producer_id="p", sequence=2)

    await life.do(again, RunHousekeeping())

    assert (await life.do(again)).duplicate


async def test_removing_a_queue_removes_what_the_commit_has_written_for_it(life: Life) -> None:
    await life.do(life.run("t", 1))

    await life.do(life.run("t", 1, ttl_ms=1000), life.run("t", 1, delay_ms=1000), RemoveQueue("t"))

    everything = set(Table) - {Table.META, Table.TOPICS, Table.HISTORY, Table.HISTORY_INDEX}
    assert await life.rows(*everything) == 0


async def test_an_outbox_entry_is_appended_and_cleared_once_however_often_it_is_asked(
    life: Life,
) -> None:
    """L6."""
    await life.topic("source", dead_letter_topic="t")
    await life.do(life.run("source", 2))
    (held,) = (await life.do(Reserve("source", "g", 2))).slices
    await life.do(Settle(held.receipt, Ending.DEAD_LETTER))
    (append,) = await life.due(due_work.ScanKind.OUTBOX)
    assert isinstance(append, AppendFromOutbox)
    clear = ClearOutbox(append.entry.destination_lmq_name, append.entry.sequence)

    answers = await life.do(append, append, clear, clear)

    done, stale = ActionOutcome.DONE, ActionOutcome.STALE
    assert [each.outcome for each in answers] == [done, stale, done, stale]
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 2)]


async def test_calls_of_one_pass_in_one_commit_are_counted_in_one_row(life: Life) -> None:
    """R6."""
    await life.topic("old", retention_enabled=True, retention_seconds=1)
    queue_id = (await life.do(life.run("old", 2))).queue_id
    await life.do(life.run("old", 3))
    await life.clock.advance_ms(3000)

    await life.do(
        *(
            ApplyRetention(
                "pass", RetentionType.EXPIRED, (RetentionRow(queue_id, "old", "", *runs),)
            )
            for runs in ((0, 2), (2, 5))
        )
    )

    assert await life.rows(Table.HISTORY) == 1
    assert life.state("old").record.messages == 0


async def test_runs_that_leave_together_leave_what_is_held_and_forget_what_came_back(
    life: Life,
) -> None:
    """R1, R9: beside messages in flight, partly settled, nacked, delayed and never handed out."""
    await life.topic("old", retention_enabled=True, retention_seconds=1, visibility_timeout_ms=9000)
    queue_id = (await life.do(life.run("old", 2))).queue_id
    await life.do(*(life.run("old", 2, ttl_ms=60_000) for _ in range(5)))
    await life.do(PlaceGroup("old", "other"))
    answer = await life.do(Reserve("old", "g", 8, visibility_ms=9000))
    held, partly, nacked, delayed = answer.slices
    await life.do(
        Settle(partly.receipt, ACK, ((0, 1),)),
        Settle(partly.receipt, NACK, ((1, 2),)),
        Settle(nacked.receipt, NACK),
        Settle(delayed.receipt, NACK, delay_ms=8000),
    )
    await life.clock.advance_ms(3000)
    row = RetentionRow(queue_id, "old", "", 0, 12)

    applied = await life.do(ApplyRetention("pass", RetentionType.EXPIRED, (row,)))

    assert (applied.messages, applied.stale) == (10, 0)
    state = life.state("old")
    assert (state.record.messages, state.inflight) == (2, 2)
    assert await life.rows(Table.RUN_HEADERS) == 1
    assert await life.rows(Table.RETURNED, Table.DELAYS, Table.TTL, Table.BURIED) == 0
    assert life.partition.reservations == 1
    await life.reopen()
    assert spans(await life.do(Reserve("old", "other", 100))) == [(0, 2)]
    await life.do(Settle(held.receipt, ACK))
    for name in ("g", "other"):
        group = life.group("old", name)
        assert group.settled == (12 if name == "g" else 10)
    assert spans(await life.do(Reserve("old", "g", 100))) == []


@pytest.mark.parametrize("remove", [RemoveQueue("t"), RemoveGroup("t", "g"), Purge("t")])
@pytest.mark.parametrize("delay_ms", [0, 100])
async def test_what_the_commit_has_removed_is_not_taken_for_an_orphan_that_is_due(
    life: Life, remove: Operation[object], delay_ms: int
) -> None:
    """V5: its deadline would be counted out twice."""
    await life.do(life.run("t", 2))
    await life.do(PlaceGroup("t", "h"))
    (held,) = (await life.do(Reserve("t", "g", 2, visibility_ms=50))).slices
    if delay_ms:
        await life.do(Settle(held.receipt, NACK, delay_ms=delay_ms))
    await life.clock.advance_ms(500)

    await life.do(remove, ExpireDue())

    assert life.partition.reservations == 0
    assert await life.rows(Table.DEADLINES, Table.DELAYS) == 0


# --- what is on disk is what was in memory --------------------------------------------------------


async def test_a_run_that_was_handed_out_in_part_goes_on_where_it_was_after_reopening(
    life: Life,
) -> None:
    """V4: and the receipt of its first part is still good."""
    await life.do(life.run("t", 5))
    await life.do(life.run("t", 10))
    held, _ = (await life.do(Reserve("t", "g", 10))).slices

    await life.reopen()
    settled = await life.do(Settle(held.receipt, ACK))
    await life.reopen()

    assert settled.messages == 5
    assert spans(await life.do(Reserve("t", "g", 100))) == [(10, 15)]


async def test_removing_a_group_leaves_no_reservation_behind(life: Life) -> None:
    await life.do(life.run("t", 2))
    await life.do(Reserve("t", "g", 1))

    await life.do(RemoveGroup("t", "g"))

    assert await life.rows(Table.RESERVATIONS, Table.DEADLINES) == 0


async def test_purging_delayed_messages_ends_their_delays(life: Life) -> None:
    await life.do(life.run("t", 2))
    (held,) = (await life.do(Reserve("t", "g", 2))).slices
    await life.do(Settle(held.receipt, NACK, delay_ms=1000))

    await life.do(Purge("t"))

    assert await life.rows(Table.DELAYS, Table.RETURNED) == 0
    assert life.partition.reservations == 0
    assert life.partition.next_deadline_ms is None


async def test_partition_time_does_not_go_back_when_a_failed_commit_is_followed_by_a_reload(
    life: Life,
) -> None:
    await life.clock.advance_ms(900)
    before_ms = life.partition.now_ms()
    life.clock.set_wall_ms(life.clock.wall_ms() - DAY_MS)
    changed = asyncio.Event()
    life.partition.connect(0, changed.set)
    life.engines.next_commit = Fault.BEFORE_WRITING

    with pytest.raises(CommitOutcomeUnknown):
        await life.do(life.run("t", 1))
    while life.partition.health.faults:
        changed.clear()
        await changed.wait()

    assert life.partition.now_ms() >= before_ms


async def test_a_failed_commit_does_not_confirm_a_suspicious_time(life: Life) -> None:
    """R9: a wrong date must not delete what is stored."""
    await life.do(life.run("t", 1, ttl_ms=1000))
    await life.clock.advance_ms(1000)
    (bury,) = await life.due(due_work.ScanKind.DEAD_DEADLINES)
    life.clock.set_wall_ms(life.clock.wall_ms() + DAY_MS)
    changed = asyncio.Event()
    life.partition.connect(0, changed.set)
    life.engines.next_commit = Fault.BEFORE_WRITING

    with pytest.raises(CommitOutcomeUnknown):
        await life.do(life.run("t", 1))
    while life.partition.health.faults:
        changed.clear()
        await changed.wait()

    assert isinstance(await life.do(bury), PartitionFaulty)


# --- groups, owners, endings ----------------------------------------------------------------------


async def test_taking_ownership_with_a_start_makes_an_owner(life: Life) -> None:
    """E8."""
    await life.topic("own", subscription=Subscription.EXCLUSIVE)
    await life.do(life.run("own", 2))

    taken = await life.do(TakeOwnership("own", "g", "A", Start(StartAt.EARLIEST)))

    confirmed = await life.do(ConfirmOwnership("own", "g", "A", taken.epoch))
    assert confirmed.matched
    assert spans(await life.do(Reserve("own", "g", 1, owner_epoch=taken.epoch))) == [(0, 1)]


async def test_repeating_the_settlement_of_the_rest_succeeds(life: Life) -> None:
    """V6: although other messages of the reservation ended otherwise before."""
    await life.do(life.run("t", 2))
    (held,) = (await life.do(Reserve("t", "g", 2))).slices
    await life.do(Settle(held.receipt, ACK, ((0, 1),)))

    first = await life.do(Settle(held.receipt, NACK))
    again = await life.do(Settle(held.receipt, NACK))

    assert (first.messages, again.messages) == (1, 0)


@pytest.mark.parametrize("again", [((0, 2),), ((1, 2),)])
async def test_a_settlement_that_changes_nothing_does_not_change_what_was_given(
    life: Life, again: tuple[tuple[int, int], ...]
) -> None:
    """K1, V6: one that is refused, or repeated, for a part of what is held."""
    await life.do(life.run("t", 4))
    (held,) = (await life.do(Reserve("t", "g", 4, reports_hand_outs=True))).slices
    await life.do(Settle(held.receipt, ACK, ((0, 1),)))
    await life.do(Settle(held.receipt, Ending.DISCONNECT, ((1, 2),), given_messages=2))

    await life.do(Settle(held.receipt, Ending.DISCONNECT, again, given_messages=4))

    for _ in range(2):
        (reservation,) = (await life.partition.state.handles.read_state("t")).reservations.values()
        assert reservation.given_messages == 2
        await life.reopen()


@pytest.mark.parametrize(
    "leave", [RemoveGroup("t", "h"), PlaceGroup("t", "h", Start(StartAt.LATEST))]
)
async def test_what_only_one_group_had_kept_goes_when_it_leaves_or_moves_on(
    life: Life, leave: Operation[object]
) -> None:
    """R2."""
    await life.do(life.run("t", 2))
    (held,) = (await life.do(Reserve("t", "g", 2))).slices
    await life.do(PlaceGroup("t", "h"))
    await life.do(Settle(held.receipt, ACK))

    await life.do(leave)

    assert life.state("t").record.messages == 0


async def test_a_group_that_begins_at_an_offset_counts_only_what_is_still_there(
    life: Life,
) -> None:
    await life.do(PlaceGroup("t", "g"))
    await life.do(life.run("t", 10, fairness_key="a"), life.run("t", 10, fairness_key="b"))
    for held in (await life.do(Reserve("t", "g", 20))).slices:
        if held.fairness_key == "b":
            await life.do(Settle(held.receipt, ACK))

    await life.do(PlaceGroup("t", "h", Start(StartAt.OFFSET, 5)))

    assert life.group("t", "h").settled == 10


async def test_a_lowered_limit_of_attempts_holds_for_messages_that_are_ready(life: Life) -> None:
    """L5."""
    await life.do(life.run("t", 1))
    for _ in range(2):
        (held,) = (await life.do(Reserve("t", "g", 1))).slices
        await life.do(Settle(held.receipt, NACK))

    await life.do(PutTopic(Topic("t", TopicSettings(max_attempts=1)), create=False))

    assert (await life.do(Reserve("t", "g", 1))).slices == ()
    assert list(life.group("t", "g").buried) == [0]


async def test_a_run_past_its_time_leaves_without_the_messages_that_were_settled(
    life: Life,
) -> None:
    """L6."""
    await life.topic("source", dead_letter_topic="t")
    await life.do(life.run("source", 4, ttl_ms=1000))
    (held,) = (await life.do(Reserve("source", "g", 2))).slices
    await life.do(Settle(held.receipt, ACK))
    await life.clock.advance_ms(2000)

    await life.do(*await life.due(due_work.ScanKind.DEAD_DEADLINES))

    ((_, body),) = await life.partition.state.engine.scan(Table.OUTBOX_BODIES, b"", None, limit=2)
    assert payloads(body) == [b"m2", b"m3"]


async def test_a_publish_that_is_refused_makes_no_queue(life: Life) -> None:
    """S3: bad input changes nothing."""
    await life.topic("small", queue_messages_max=1)

    refusal = await life.do(life.run("small", 2))

    assert isinstance(refusal, QueueFull)
    assert await life.do(Unmaterialize("small")) is UnloadOutcome.NOT_PRESENT


async def test_an_answer_that_promises_more_ends_the_interest_that_a_short_one_left(
    life: Life,
) -> None:
    """V2: who was promised more asks again; who was not is notified when there is more."""
    events = life.partition.connect(0, lambda: None)
    await life.do(life.run("t", 1))
    short = await life.do(Reserve("t", "g", 10))

    _, filled = await life.do(life.run("t", 2), Reserve("t", "g", 1))
    assert (short.more, filled.more) == (False, True)
    assert not events.ready

    emptied = await life.do(Reserve("t", "g", 1))
    await life.do(life.run("t", 1))
    assert not emptied.more
    assert list(events.ready) == [("t", "g")]


# --- reading beside the writer --------------------------------------------------------------------


async def test_a_scan_during_a_commit_hides_nothing_that_the_commit_adds(life: Life) -> None:
    """V5: it may not remember that the index begins behind an entry it could not see yet."""
    await life.do(life.run("t", 1, delay_ms=60_000))
    life.engines.gate.clear()
    publishing = life.partition.submit([life.run("t", 1, delay_ms=1000)])
    await life.engines.waiting.wait()
    assert await life.due(due_work.ScanKind.SCHEDULES_DUE) == []
    life.engines.gate.set()
    (appended,) = await publishing

    await life.clock.advance_ms(2000)

    assert isinstance(appended, Appended)
    (due,) = await life.due(due_work.ScanKind.SCHEDULES_DUE)
    assert isinstance(due, PromoteScheduled)
    assert due.schedule_id == appended.schedule_id


async def test_operations_that_arrive_while_a_commit_fails_are_not_carried_out(
    life: Life,
) -> None:
    """S2."""
    changed = asyncio.Event()
    life.partition.connect(0, changed.set)
    life.engines.next_commit = Fault.AFTER_WRITING
    life.engines.gate.clear()
    first = life.partition.submit([life.run("t", 1)])
    await life.engines.waiting.wait()
    second = life.partition.submit([life.run("t", 5)])

    life.engines.gate.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    while life.partition.health.faults:
        changed.clear()
        await changed.wait()

    assert [type(each).__name__ for each in outcomes] == ["CommitOutcomeUnknown", "PartitionFaulty"]
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 1)]


@pytest.mark.parametrize("gone", ["before the fault", "while nothing is open"])
async def test_a_broker_that_goes_holds_nothing_whether_or_not_the_partition_is_open(
    life: Life, gone: str
) -> None:
    """V1, R14: sweeps expire what it had reserved, and its clients are not known to have left."""
    await life.do(ClaimPartition(Claim("broker", "broker:1", 1, 0), client_timeout_ms=1000))
    await life.do(life.run("t", 1))
    await life.do(Reserve("t", "g", 1, visibility_ms=60_000))
    due_ms = life.partition.next_deadline_ms
    changed = asyncio.Event()
    life.partition.connect(0, changed.set)
    broker = life.partition.connect(life.partition.state.counters.broker_epoch, changed.set)
    if gone == "before the fault":
        life.partition.disconnect(broker)

    life.engines.next_commit = Fault.BEFORE_WRITING
    with pytest.raises(CommitOutcomeUnknown):
        await life.do(life.run("t", 1))
    while life.partition.is_open:
        await changed.wait()
    life.partition.disconnect(broker)
    while life.partition.health.faults:
        changed.clear()
        await changed.wait()
    await life.clock.advance_ms(1000)

    assert not life.partition.state.hold.knows_clients(life.partition.now_ms())
    assert life.partition.lifecycle.wakeups.take() == due_ms
