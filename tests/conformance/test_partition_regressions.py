"""Mistakes that a partition once made, each as the shortest way to it.

Most of them need several operations in one commit, where what the engine shows is not yet the
truth, or a reopening, where it is all there is.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from storage_svc import delivering, group_state, looking, scanning
from storage_svc import operations as op
from storage_svc.engines.engine import Batch, Identity, Table
from storage_svc.engines.rocksdb import RocksEngines, RocksReader
from storage_svc.group_state import Group
from storage_svc.lanes import Run
from storage_svc.operations import Start, StartAt
from storage_svc.partition import HOUSEKEEPING_MS, Partition
from storage_svc.queue_state import QueueState
from storage_svc.reservations import Ending
from tests.conformance.faulty_engine import Fault, FaultyEngines
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.clock import ManualClock
from tidemark.errors import CommitOutcomeUnknown, PartitionFaulty, QueueFull, ReservationNotFound
from tidemark.receipts import Receipt
from tidemark.topics import Subscription, Topic, TopicSettings

DAY_MS = 24 * 60 * 60 * 1000
ACK, NACK = Ending.ACK, Ending.NACK


class Life:
    """A partition that can be reopened, and short ways to ask it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.engines = FaultyEngines(RocksEngines(directory))
        self.partition = Partition(self.engines, Identity("regressions", 0, 1), self.clock)
        self._published = 0

    async def topic(self, name: str, **settings: Any) -> None:
        await self.do(op.PutTopic(Topic(name, TopicSettings(**settings)), create=True))

    async def do(self, *operations: op.Operation) -> Any:
        """The answers of one commit; of one operation the answer itself."""
        answers = await self.partition.submit(operations)
        return answers if len(operations) > 1 else answers[0]

    async def reopen(self) -> None:
        await self.partition.close()
        self.partition = Partition(self.engines, self.partition.identity, self.clock)
        await self.partition.open()

    def run(self, lmq_name: str, messages: int, **fields: Any) -> op.Append:
        """A run of messages m0, m1, ... numbered over the whole life."""
        batch = MessageBatch()
        for _ in range(messages):
            batch.messages.add(payload=b"m%d" % self._published)
            self._published += 1
        return op.Append(lmq_name, messages, batch.SerializeToString(), **fields)

    async def rows(self, *tables: Table) -> int:
        """How many rows there are in tables."""
        engine = self.partition.memory.engine
        return sum([len(await engine.scan(each, b"", None, limit=1000)) for each in tables])

    def state(self, lmq_name: str) -> QueueState:
        handle = self.partition.memory.handles.peek(lmq_name)
        assert handle is not None
        return handle.state

    def group(self, lmq_name: str, name: str) -> Group:
        return self.state(lmq_name).groups[name]

    async def due(self, kind: scanning.ScanKind) -> list[op.Operation]:
        page = await scanning.scan(self.partition, kind, b"", 100)
        return [due.action for due in page.due]


@asynccontextmanager
async def living(directory: Path) -> AsyncIterator[Life]:
    life = Life(directory)
    await life.partition.open()
    try:
        yield life
    finally:
        await life.partition.close()


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with living(tmp_path) as life:
        await life.topic("t")
        yield life


def spans(answer: Any) -> list[tuple[int, int]]:
    return [(each.first_offset, each.first_offset + each.messages) for each in answer.slices]


def payloads(body: bytes) -> list[bytes]:
    return [message.payload for message in MessageBatch.FromString(body).messages]


# --- several operations in one commit -------------------------------------------------------------


async def test_a_queue_that_the_commit_has_touched_is_not_unloaded(life: Life) -> None:
    """I4: what the commit changes could not be loaded again."""
    await life.do(life.run("t", 2))

    answers = await life.do(life.run("t", 2), op.Unmaterialize("t"), life.run("t", 2))

    assert answers[1] is op.Eviction.RACE_LOST
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(0, 2), (2, 4), (4, 6)]


async def test_a_queue_that_the_commit_has_made_is_not_unloaded(life: Life) -> None:
    answers = await life.do(life.run("t", 2), op.Unmaterialize("t"), life.run("t", 2))

    assert answers[1] is op.Eviction.RACE_LOST
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(0, 2), (2, 4)]


async def test_publishing_to_a_name_that_the_commit_has_removed_makes_another_queue(
    life: Life,
) -> None:
    first = await life.do(life.run("t", 2))

    _, second = await life.do(op.RemoveQueue("t"), life.run("t", 3))

    assert second.queue_id > first.queue_id
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(0, 3)]


async def test_a_settlement_does_not_revive_the_queue_that_the_commit_has_removed(
    life: Life,
) -> None:
    await life.do(life.run("t", 2))
    (held,) = (await life.do(op.Reserve("t", "g", 1))).slices

    _, refusal = await life.do(op.RemoveQueue("t"), op.Settle(held.receipt, ACK))

    assert isinstance(refusal, ReservationNotFound)
    assert await life.rows(Table.CATALOG, Table.QUEUES) == 0


async def test_what_the_commit_has_purged_is_not_handed_out(life: Life) -> None:
    """Also where the backlog is longer than what a lane keeps in memory."""
    for _ in range(130):
        await life.do(life.run("t", 1))

    _, reserved = await life.do(op.Purge("t"), op.Reserve("t", "g", 1))

    assert reserved.slices == ()


async def test_a_producer_that_publishes_as_old_ones_are_forgotten_is_remembered(
    life: Life,
) -> None:
    """S11."""
    await life.do(life.run("t", 1, producer_id="p", sequence=1))
    life.clock.set_wall_ms(life.clock.wall_ms() + 10 * DAY_MS)
    again = life.run("t", 1, producer_id="p", sequence=2)

    await life.do(again, op.KeepHouse())

    assert (await life.do(again)).duplicate


async def test_removing_a_queue_removes_what_the_commit_has_written_for_it(life: Life) -> None:
    await life.do(life.run("t", 1))

    await life.do(
        life.run("t", 1, ttl_ms=1000), life.run("t", 1, delay_ms=1000), op.RemoveQueue("t")
    )

    everything = set(Table) - {Table.META, Table.TOPICS}
    assert await life.rows(*everything) == 0


async def test_an_outbox_entry_is_appended_and_cleared_once_however_often_it_is_asked(
    life: Life,
) -> None:
    """L6."""
    await life.topic("source", dead_letter_topic="t")
    await life.do(life.run("source", 2))
    (held,) = (await life.do(op.Reserve("source", "g", 2))).slices
    await life.do(op.Settle(held.receipt, Ending.DEAD_LETTER))
    (append,) = await life.due(scanning.ScanKind.OUTBOX)
    assert isinstance(append, op.AppendFromOutbox)
    clear = op.ClearOutbox(append.entry.sequence)

    answers = await life.do(append, append, clear, clear)

    done, stale = op.ActionOutcome.DONE, op.ActionOutcome.STALE
    assert [each.outcome for each in answers] == [done, stale, done, stale]
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(0, 2)]


async def test_calls_of_one_pass_in_one_commit_are_counted_in_one_row(life: Life) -> None:
    """R6."""
    await life.topic("old", retention_enabled=True, retention_seconds=1)
    queue_id = (await life.do(life.run("old", 2))).queue_id
    await life.do(life.run("old", 3))
    await life.clock.advance_ms(3000)

    await life.do(
        *(
            op.ApplyRetention(
                "pass", op.RetentionType.EXPIRED, (op.RetentionRow(queue_id, "old", "", *runs),)
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
    await life.do(op.PlaceGroup("old", "other"))
    answer = await life.do(op.Reserve("old", "g", 8, visibility_ms=9000))
    held, partly, nacked, delayed = answer.slices
    await life.do(
        op.Settle(partly.receipt, ACK, ((0, 1),)),
        op.Settle(partly.receipt, NACK, ((1, 2),)),
        op.Settle(nacked.receipt, NACK),
        op.Settle(delayed.receipt, NACK, delay_ms=8000),
    )
    await life.clock.advance_ms(3000)
    row = op.RetentionRow(queue_id, "old", "", 0, 12)

    applied = await life.do(op.ApplyRetention("pass", op.RetentionType.EXPIRED, (row,)))

    assert (applied.messages, applied.stale) == (10, 0)
    state = life.state("old")
    assert (state.record.messages, state.inflight) == (2, 2)
    assert await life.rows(Table.RUN_HEADERS, Table.RUN_BODIES) == 2
    assert await life.rows(Table.EXCEPTIONS, Table.DELAYS, Table.TTL, Table.BURIED) == 0
    assert life.partition.reservations == 1
    await life.reopen()
    assert spans(await life.do(op.Reserve("old", "other", 100))) == [(0, 2)]
    await life.do(op.Settle(held.receipt, ACK))
    for name in ("g", "other"):
        group = life.group("old", name)
        assert group.settled == (12 if name == "g" else 10)
    assert spans(await life.do(op.Reserve("old", "g", 100))) == []


@pytest.mark.parametrize("remove", [op.RemoveQueue("t"), op.RemoveGroup("t", "g"), op.Purge("t")])
@pytest.mark.parametrize("delay_ms", [0, 100])
async def test_what_the_commit_has_removed_is_not_taken_for_an_orphan_that_is_due(
    life: Life, remove: op.Operation, delay_ms: int
) -> None:
    """V5: its deadline would be counted out twice."""
    await life.do(life.run("t", 2))
    await life.do(op.PlaceGroup("t", "h"))
    (held,) = (await life.do(op.Reserve("t", "g", 2, visibility_ms=50))).slices
    if delay_ms:
        await life.do(op.Settle(held.receipt, NACK, delay_ms=delay_ms))
    await life.clock.advance_ms(500)

    await life.do(remove, op.ExpireDue())

    assert life.partition.reservations == 0
    assert await life.rows(Table.DEADLINES, Table.DELAYS) == 0


# --- what is on disk is what was in memory --------------------------------------------------------


async def test_a_run_that_was_handed_out_in_part_goes_on_where_it_was_after_reopening(
    life: Life,
) -> None:
    """V4: and the receipt of its first part is still good."""
    await life.do(life.run("t", 5))
    await life.do(life.run("t", 10))
    held, _ = (await life.do(op.Reserve("t", "g", 10))).slices

    await life.reopen()
    settled = await life.do(op.Settle(held.receipt, ACK))
    await life.reopen()

    assert settled.messages == 5
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(10, 15)]


async def test_removing_a_group_leaves_no_reservation_behind(life: Life) -> None:
    await life.do(life.run("t", 2))
    await life.do(op.Reserve("t", "g", 1))

    await life.do(op.RemoveGroup("t", "g"))

    assert await life.rows(Table.RESERVATIONS, Table.DEADLINES) == 0


async def test_purging_delayed_messages_ends_their_delays(life: Life) -> None:
    await life.do(life.run("t", 2))
    (held,) = (await life.do(op.Reserve("t", "g", 2))).slices
    await life.do(op.Settle(held.receipt, NACK, delay_ms=1000))

    await life.do(op.Purge("t"))

    assert await life.rows(Table.DELAYS, Table.EXCEPTIONS) == 0
    assert life.partition.reservations == 0
    assert life.partition.next_deadline_ms is None


async def test_partition_time_does_not_go_back_when_a_failed_commit_is_followed_by_a_reload(
    life: Life,
) -> None:
    await life.clock.advance_ms(900)
    before_ms = life.partition.now_ms()
    life.clock.set_wall_ms(life.clock.wall_ms() - DAY_MS)
    watcher = life.partition.watch(0)
    life.engines.next_commit = Fault.BEFORE_WRITING

    with pytest.raises(CommitOutcomeUnknown):
        await life.do(life.run("t", 1))
    while life.partition.health.faults:
        watcher.changed.clear()
        await watcher.changed.wait()

    assert life.partition.now_ms() >= before_ms


async def test_a_failed_commit_does_not_confirm_a_suspicious_time(life: Life) -> None:
    """R9: a wrong date must not delete what is stored."""
    await life.do(life.run("t", 1, ttl_ms=1000))
    life.clock.set_wall_ms(life.clock.wall_ms() + DAY_MS)
    (bury,) = await life.due(scanning.ScanKind.DEAD_DEADLINES)
    watcher = life.partition.watch(0)
    life.engines.next_commit = Fault.BEFORE_WRITING

    with pytest.raises(CommitOutcomeUnknown):
        await life.do(life.run("t", 1))
    while life.partition.health.faults:
        watcher.changed.clear()
        await watcher.changed.wait()

    assert isinstance(await life.do(bury), PartitionFaulty)


# --- groups, owners, endings ----------------------------------------------------------------------


async def test_taking_ownership_with_a_start_makes_an_owner(life: Life) -> None:
    """E8."""
    await life.topic("own", subscription=Subscription.EXCLUSIVE)
    await life.do(life.run("own", 2))

    taken = await life.do(op.TakeOwnership("own", "g", "A", Start(StartAt.EARLIEST)))

    confirmed = await life.do(op.ConfirmOwnership("own", "g", "A", taken.epoch))
    assert confirmed.matched
    assert spans(await life.do(op.Reserve("own", "g", 1, owner_epoch=taken.epoch))) == [(0, 1)]


async def test_repeating_the_settlement_of_the_rest_succeeds(life: Life) -> None:
    """V6: although other messages of the reservation ended otherwise before."""
    await life.do(life.run("t", 2))
    (held,) = (await life.do(op.Reserve("t", "g", 2))).slices
    await life.do(op.Settle(held.receipt, ACK, ((0, 1),)))

    first = await life.do(op.Settle(held.receipt, NACK))
    again = await life.do(op.Settle(held.receipt, NACK))

    assert (first.messages, again.messages) == (1, 0)


@pytest.mark.parametrize(
    "leave", [op.RemoveGroup("t", "h"), op.PlaceGroup("t", "h", Start(StartAt.LATEST))]
)
async def test_what_only_one_group_had_kept_goes_when_it_leaves_or_moves_on(
    life: Life, leave: op.Operation
) -> None:
    """R2."""
    await life.do(life.run("t", 2))
    (held,) = (await life.do(op.Reserve("t", "g", 2))).slices
    await life.do(op.PlaceGroup("t", "h"))
    await life.do(op.Settle(held.receipt, ACK))

    await life.do(leave)

    assert life.state("t").record.messages == 0


async def test_a_group_that_begins_at_an_offset_counts_only_what_is_still_there(
    life: Life,
) -> None:
    await life.do(op.PlaceGroup("t", "g"))
    await life.do(life.run("t", 10, fairness_key="a"), life.run("t", 10, fairness_key="b"))
    for held in (await life.do(op.Reserve("t", "g", 20))).slices:
        if held.fairness_key == "b":
            await life.do(op.Settle(held.receipt, ACK))

    await life.do(op.PlaceGroup("t", "h", Start(StartAt.OFFSET, 5)))

    assert life.group("t", "h").settled == 10


async def test_a_lowered_limit_of_attempts_holds_for_messages_that_are_ready(life: Life) -> None:
    """L5."""
    await life.do(life.run("t", 1))
    for _ in range(2):
        (held,) = (await life.do(op.Reserve("t", "g", 1))).slices
        await life.do(op.Settle(held.receipt, NACK))

    await life.do(op.PutTopic(Topic("t", TopicSettings(max_attempts=1)), create=False))

    assert (await life.do(op.Reserve("t", "g", 1))).slices == ()
    assert list(life.group("t", "g").buried) == [0]


async def test_a_run_past_its_time_leaves_without_the_messages_that_were_settled(
    life: Life,
) -> None:
    """L6."""
    await life.topic("source", dead_letter_topic="t")
    await life.do(life.run("source", 4, ttl_ms=1000))
    (held,) = (await life.do(op.Reserve("source", "g", 2))).slices
    await life.do(op.Settle(held.receipt, ACK))
    await life.clock.advance_ms(2000)

    await life.do(*await life.due(scanning.ScanKind.DEAD_DEADLINES))

    ((_, body),) = await life.partition.memory.engine.scan(Table.OUTBOX_BODIES, b"", None, limit=2)
    assert payloads(body) == [b"m2", b"m3"]


async def test_a_publish_that_is_refused_makes_no_queue(life: Life) -> None:
    """S3: bad input changes nothing."""
    await life.topic("small", queue_messages_max=1)

    refusal = await life.do(life.run("small", 2))

    assert isinstance(refusal, QueueFull)
    assert await life.do(op.Unmaterialize("small")) is op.Eviction.NOT_PRESENT


# --- reading beside the writer --------------------------------------------------------------------


async def test_a_scan_during_a_commit_hides_nothing_that_the_commit_adds(life: Life) -> None:
    """V5: it may not remember that the index begins behind an entry it could not see yet."""
    await life.do(life.run("t", 1, delay_ms=60_000))
    life.engines.gate.clear()
    publishing = life.partition.submit([life.run("t", 1, delay_ms=1000)])
    await life.engines.waiting.wait()
    assert await life.due(scanning.ScanKind.SCHEDULES_DUE) == []
    life.engines.gate.set()
    (appended,) = await publishing

    await life.clock.advance_ms(2000)

    assert isinstance(appended, op.Appended)
    (due,) = await life.due(scanning.ScanKind.SCHEDULES_DUE)
    assert isinstance(due, op.PromoteScheduled)
    assert due.schedule_id == appended.schedule_id


async def test_operations_that_arrive_while_a_commit_fails_are_not_carried_out(
    life: Life,
) -> None:
    """S2."""
    watcher = life.partition.watch(0)
    life.engines.next_commit = Fault.AFTER_WRITING
    life.engines.gate.clear()
    first = life.partition.submit([life.run("t", 1)])
    await life.engines.waiting.wait()
    second = life.partition.submit([life.run("t", 5)])

    life.engines.gate.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    while life.partition.health.faults:
        watcher.changed.clear()
        await watcher.changed.wait()

    assert [type(each).__name__ for each in outcomes] == ["CommitOutcomeUnknown", "PartitionFaulty"]
    assert spans(await life.do(op.Reserve("t", "g", 100))) == [(0, 1)]


async def test_fairness_keys_that_come_and_go_leave_nothing_behind(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key per user or per request: neither memory nor disk may grow with all there ever were."""
    monkeypatch.setattr(group_state, "IDLE_LANES_MAX", 10)
    kept = life.run("t", 1, fairness_key="kept")
    await life.do(kept)
    await life.do(op.Reserve("t", "g", 1))

    for number in range(100):
        await life.do(life.run("t", 1, fairness_key=f"k{number}"))
        (slice_,) = (await life.do(op.Reserve("t", "g", 1))).slices
        await life.do(op.Settle(slice_.receipt, ACK))
    lanes, stored = len(life.group("t", "g").lanes), await life.rows(Table.LANES)
    (kept_slice,) = life.group("t", "g").live.values()
    receipt = Receipt(0, life.state("t").record.queue_id, kept_slice.reservation_id, 0).encode()
    await life.do(op.Settle(receipt, NACK))
    (again,) = (await life.do(op.Reserve("t", "g", 1))).slices
    await life.do(op.Settle(again.receipt, ACK))
    unloaded = await life.do(op.Unmaterialize("t"))

    assert lanes < 20
    assert stored < 20
    assert (again.fairness_key, again.attempt_count) == ("kept", 1)
    assert unloaded is op.Eviction.EVICTED
    assert await life.rows(Table.LANES) == 0


async def test_a_fairness_key_whose_settled_runs_are_kept_goes_on_where_it_was(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled is not handed out again, however many keys came since (R2)."""
    monkeypatch.setattr(group_state, "IDLE_LANES_MAX", 2)
    await life.topic("kept", retention_enabled=True)
    for number in range(10):
        await life.do(life.run("kept", 1, fairness_key=f"k{number}"))
        (slice_,) = (await life.do(op.Reserve("kept", "g", 1))).slices
        await life.do(op.Settle(slice_.receipt, ACK))

    await life.do(op.Unmaterialize("kept"))
    await life.do(life.run("kept", 1, fairness_key="k3"))

    assert spans(await life.do(op.Reserve("kept", "g", 100))) == [(10, 11)]


async def test_a_look_costs_what_it_shows_and_not_that_times_the_fairness_keys(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads hold the event loop, and with it every partition."""
    keys = 50
    reads = 0
    load, scan = RocksReader.load, RocksReader.scan

    async def counted_load(self: RocksReader, table: Table, wanted: Sequence[bytes]) -> Any:
        nonlocal reads
        reads += len(wanted)
        return await load(self, table, wanted)

    async def counted_scan(self: RocksReader, *where: Any, **how: Any) -> Any:
        nonlocal reads
        reads += 1
        return await scan(self, *where, **how)

    monkeypatch.setattr(RocksReader, "load", counted_load)
    monkeypatch.setattr(RocksReader, "scan", counted_scan)
    for number in (*range(keys), *range(keys)):
        await life.do(life.run("t", 2, fairness_key=f"k{number}"))

    peeked = await looking.peek(life.partition, "t", 3, 1000, "")

    assert [each.offset for each in peeked] == list(range(3, 4 * keys))
    assert [each.message.payload for each in peeked] == [b"m%d" % each.offset for each in peeked]
    assert reads <= 6 * keys + 10


async def test_removing_many_queues_in_one_commit_costs_what_one_costs_times_many(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may name 10 000 inactive queues in one call, and all partitions wait for it (R3)."""
    walked = 0

    class Operations(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal walked
            walked += len(self)
            return super().__iter__()

    queues = 50
    made = await life.do(*[op.Materialize(f"t/{number}", True) for number in range(queues)])
    life.partition.memory.handles.forget_trackers()
    inactive = [op.RetentionRow(queue_id=each.queue_id, before_ms=1 << 60) for each in made]
    make_batch = Batch.__init__

    def make_counted(batch: Batch) -> None:
        make_batch(batch)
        batch.operations = Operations()

    monkeypatch.setattr(Batch, "__init__", make_counted)
    removal = op.ApplyRetention("p", op.RetentionType.INACTIVE_QUEUE, tuple(inactive))
    removed = await life.do(removal)

    assert removed.queues == queues
    assert walked < 10 * queues


async def test_a_disk_that_cannot_be_looked_at_for_a_moment_does_not_end_housekeeping(
    life: Life, tmp_path: Path
) -> None:
    """S3, I9: the watermark is watched and idle queues are unloaded for as long as it serves."""
    directory = tmp_path / "partition-00000"
    await life.topic("brief", idle_after_ms=HOUSEKEEPING_MS)
    await life.do(life.run("brief", 1))
    await life.clock.until_sleepers(1)

    directory.rename(tmp_path / "away")
    await life.clock.advance_ms(HOUSEKEEPING_MS)
    (tmp_path / "away").rename(directory)
    async with asyncio.timeout(60):
        await life.clock.until_sleepers(1)
    await life.clock.advance_ms(HOUSEKEEPING_MS)
    await life.clock.until_sleepers(1)

    assert life.partition.memory.handles.peek("brief") is None


async def test_whoever_waits_for_room_among_what_came_back_is_told_when_runs_leave(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2: at the cap nothing is handed out; what leaves by its time to live makes room as well."""
    monkeypatch.setattr(delivering, "EXCEPTIONS_MAX", 1)
    await life.do(life.run("t", 1, ttl_ms=1000))
    (slice_,) = (await life.do(op.Reserve("t", "g", 1))).slices
    await life.do(op.Settle(slice_.receipt, NACK, delay_ms=DAY_MS))
    await life.do(life.run("t", 1))
    waiting = await life.do(op.Reserve("t", "g", 1))
    watcher = life.partition.watch(broker_epoch=0)

    await life.clock.advance_ms(1000)
    await life.do(*await life.due(scanning.ScanKind.DEAD_DEADLINES))

    assert not waiting.slices
    assert ("t", "g") in watcher.ready
    assert spans(await life.do(op.Reserve("t", "g", 1))) == [(1, 2)]


@pytest.mark.parametrize("keys", [1, 7])
async def test_a_purge_looks_once_at_what_came_back(
    life: Life, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    """Not once for every run: thousands that are delayed would hold up everybody for seconds."""
    calls = 0
    drop_runs = Group.drop_runs

    def counted(self: Group, runs: Sequence[Run]) -> list[tuple[int, int]]:
        nonlocal calls
        calls += 1
        return drop_runs(self, runs)

    monkeypatch.setattr(Group, "drop_runs", counted)
    runs = [life.run("t", 2, fairness_key=f"k{number % keys}") for number in range(50)]
    await life.do(*runs)
    slices = (await life.do(op.Reserve("t", "g", 100))).slices
    for slice_ in slices[1:]:
        await life.do(op.Settle(slice_.receipt, NACK, delay_ms=1000))

    purged = await life.do(op.Purge("t"))

    assert (purged.messages, purged.skipped) == (98, 2)
    assert calls == keys
    assert await life.rows(Table.EXCEPTIONS, Table.DELAYS) == 0
    assert await life.rows(Table.RUN_HEADERS) == 1
