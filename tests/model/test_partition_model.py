"""A partition against its model: random operations, faults and restarts, checked step by step.

Proves on a real RocksDB that nothing answered is lost and nothing settled comes back (S2), that
attempts, deliveries, order and payloads agree (V2, V8), that receipts stay good over reopening
(V4), and that ready, reserved, delayed, buried and settled always add up to what was published.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from storage_svc.engines import paging, queue_rows, run_rows
from storage_svc.engines.engine import Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.loading import recovery, stored_runs
from storage_svc.operations import erase, reserve
from storage_svc.operations.acks import AckReservations
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.loading import RunHousekeeping
from storage_svc.operations.operation import Operation
from storage_svc.operations.outbox import AppendFromOutbox, ClearOutbox
from storage_svc.operations.ownership import Ownership
from storage_svc.operations.publish import Append
from storage_svc.operations.renew import HeldReservation, Renew
from storage_svc.operations.reserve import Reserve, Reserved, ReservedSlice
from storage_svc.operations.schedule import Unschedule
from storage_svc.operations.settle import Extend, Settle
from storage_svc.operations.standing import HandedOut, Recall
from storage_svc.operations.topics import PutTopic
from storage_svc.partition import commit, erasures
from storage_svc.partition.clock import FORWARD_JUMP_MS_MAX
from storage_svc.partition.exchange_events import ExchangeEvents
from storage_svc.partition.partition import Partition
from storage_svc.queue import group as group_module
from storage_svc.queue import lane as lane_module
from storage_svc.queue import settled
from storage_svc.queue.reservation import Ending, Span
from storage_svc.reads import due_work
from storage_svc.reads.due_work import ScanKind
from storage_svc.turns import give_way
from tests.model.partition_audit import audit, compare_looks
from tests.model.partition_strategies import (
    ALL,
    RUN_MESSAGES_MAX,
    TOPICS,
    Run,
    Settlement,
    Wish,
    administrations,
    limits,
    more,
    queues,
    runs,
    settlements,
    wishes,
)
from tests.model.reference.partition import PartitionModel
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.standing_results import in_long_form
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.clock import ManualClock
from tidemark.errors import CommitOutcomeUnknown
from tidemark.receipts import Receipt
from tidemark.topics import Topic

T = TypeVar("T")

IDENTITY = Identity("model", 0, 1)
QUEUES = ("jobs", "jobs/a", "kept/a", "own/a")
DAY_MS = 24 * 60 * 60 * 1000
TURN_MS_MAX = 60_000

# Bounds that a short example reaches: what lies beyond them is read again, page by page.
SMALL_BOUNDS = [
    (lane_module, "LANE_RUNS_MAX", 2),
    (commit, "LANE_RUNS_MAX", 2),
    (commit, "RUN_MESSAGES_MAX", RUN_MESSAGES_MAX),
    (recovery, "RUN_MESSAGES_MAX", RUN_MESSAGES_MAX),
    (paging, "PAGE_ROWS", 2),
    (erasures, "ERASED_AT_ONCE_MAX", 2),
    (erase, "ROWS_PER_COMMIT_MAX", 2),
    (erase, "PAGE_ROWS", 2),
    (stored_runs, "PAGE_ROWS", 2),
    (run_rows, "BODY_INLINE_BYTES_MAX", 8),
    (queue_rows, "GROUPS_INLINE_MAX", 1),
    (queue_rows, "HELD_INLINE_MAX", 2),
    (queue_rows, "SPANS_INLINE_MAX", 2),
    (queue_rows, "SETTLED_INLINE_MAX", 3),
    (group_module, "PASSED_MAX", 2),
    (group_module, "IDLE_LANES_MAX", 1),
    (reserve, "PASSED_MAX", 2),
    (settled, "SETTLED_PER_QUEUE_MIN", 12),
    (settled, "SETTLED_SHARED_MAX", 0),
]


class Held(NamedTuple):
    """A receipt, good or not, and how many messages it was for."""

    receipt: bytes
    messages: int


class StillClock(ManualClock):
    """Never wakes: housekeeping happens when a rule asks for it, so that an example repeats."""

    async def sleep_ms(self, duration_ms: int) -> None:
        await asyncio.get_running_loop().create_future()


def _is_settled_in(machine: "PartitionMachine") -> bool:
    """Whether enough has happened since it was opened: opening takes as long as many commits."""
    return machine.partition.commits >= 3


class PartitionMachine(RuleBasedStateMachine):
    """One partition in one directory, and what it must be."""

    def __init__(self) -> None:
        super().__init__()
        self._bounds = pytest.MonkeyPatch()
        for module, name, bound in SMALL_BOUNDS:
            self._bounds.setattr(module, name, bound)
        self.loop = asyncio.new_event_loop()
        self.home = Path(tempfile.mkdtemp(prefix="tidemark-model-"))
        self.lives = 0
        self.clock = StillClock()
        self.model = PartitionModel(TOPICS, settled.SETTLED_PER_QUEUE_MIN)
        self.frame: list[Operation[object]] = []
        self.numbered: dict[int, Append] = {}
        self.names: dict[str, str] = {}
        self.held: list[Held] = []
        self.epochs = [0]
        self.plan: list[Operation[object]] = []
        self.published = 0
        self.committed_ms = 0
        self.changed = asyncio.Event()
        self.standing_id = 0
        self.handed_out: list[Reserved | HandedOut] = []
        self.partition, self.engines, self.events = self.run(self._open())
        for name, each in TOPICS.items():
            self.run(self.partition.call(PutTopic(Topic(name, each), create=True)))

    @initialize(
        names=st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2, unique=True),
        backlog=st.lists(runs, min_size=2, max_size=6),
        taken=st.lists(queues, max_size=4),
        ended=st.lists(settlements, max_size=6),
    )
    def begin_with_a_backlog(
        self, names: list[str], backlog: list[Run], taken: list[str], ended: list[Settlement]
    ) -> None:
        """So that the first operations find messages in every place."""
        self.names = {"first": names[0], "second": names[-1], "dead": "dead"}
        self.add([self._append(run) for run in backlog])
        self.add([Reserve(self.names[queue], "g", 10) for queue in taken])
        self.add([self._settle(each) for each in ended if self.held])

    def teardown(self) -> None:
        try:
            self.send()
        finally:
            self.run(self.partition.close())
            self.loop.close()
            self._bounds.undo()
            shutil.rmtree(self.home)

    # --- publishing ----------------------------------------------------------------------------

    @rule(runs=st.lists(runs, min_size=1, max_size=3), more=more)
    def publish(self, runs: list[Run], more: bool) -> None:
        self.add([self._append(run) for run in runs], more)

    # --- delivering ----------------------------------------------------------------------------

    @rule(wishes=st.lists(wishes, min_size=1, max_size=3), more=more)
    def reserve(self, wishes: list[Wish], more: bool) -> None:
        # Which messages are handed out is for storage to say, so its answer may only be lost as the
        # last of its commit: then what it was can be read back.
        if self.engines.next_commit is Fault.AFTER_WRITING:
            wishes, more = wishes[:1], False
        self.add([self._reserve(wish) for wish in wishes], more)

    @rule(count=st.integers(1, 3), more=more)
    def recall(self, count: int, more: bool) -> None:
        """The newest standing reserves, or such as have ended."""
        self.add(self._recalls(range(self.standing_id, self.standing_id - count, -1)), more)

    @precondition(lambda self: self.held)
    @rule(settlements=st.lists(settlements, min_size=1, max_size=3), more=more)
    def settle(self, settlements: list[Settlement], more: bool) -> None:
        self.add([self._settle(each) for each in settlements], more)

    # --- groups, owners, queues ----------------------------------------------------------------

    @rule(operations=st.lists(administrations, min_size=1, max_size=3), more=more)
    def administer(self, operations: list[Any], more: bool) -> None:
        for operation in operations:
            # The moment from which a changed topic makes messages undeliverable must be clear, and
            # the id of a scheduled run is not known before it was answered.
            if isinstance(operation, (PutTopic, Unschedule)):
                self.send()
            self.add([self._administer(operation)], more=True)
        self.add([], more)

    # --- sweeps and looks ----------------------------------------------------------------------

    @rule(kinds=st.lists(st.sampled_from(ScanKind), min_size=1, max_size=6, unique=True))
    def plan_a_sweep(self, kinds: list[ScanKind]) -> None:
        self.send()
        for kind in kinds:
            page = self.run(due_work.scan(self.partition, kind, b"", 100))
            self.plan += (due.action for due in page.due)
            self.plan += (
                ClearOutbox(due.action.entry.destination_lmq_name, due.action.entry.sequence)
                for due in page.due
                if isinstance(due.action, AppendFromOutbox)
            )
        for queue in self.model.queues.values():
            self.run(compare_looks(self.partition, queue))

    @precondition(lambda self: self.plan)
    @rule(count=st.integers(1, 8), again=st.booleans(), more=more)
    def act_on_the_plan(self, count: int, again: bool, more: bool) -> None:
        """At once or much later, and sometimes twice: what has moved on is left alone (L8)."""
        if any(isinstance(each, Reserve) for each in self.frame):
            self.send()  # it may have buried what an action is about
        self.add(self.plan[:count], more)
        if not again:
            del self.plan[:count]

    # --- time ----------------------------------------------------------------------------------

    @rule(step_ms=st.sampled_from((60, 300, 1100, 1100, 5000)), limit=limits, more=more)
    def time_passes(self, step_ms: int, limit: int, more: bool) -> None:
        """What is due expires, together with what has gathered and often with what comes next."""
        if limit != ALL:
            self.send()  # which of many are expired is only clear if nothing else happens
        self.run(self.clock.advance_ms(step_ms))
        self.add([ExpireDue(limit)], more and limit == ALL)

    @rule(
        step_ms=st.sampled_from((0, 1_300_000, 9 * DAY_MS)),
        jump_ms=st.sampled_from((0, -DAY_MS, -2000, 900, 2 * FORWARD_JUMP_MS_MAX)),
        confirmed=st.booleans(),
    )
    def a_strange_time_passes(self, step_ms: int, jump_ms: int, confirmed: bool) -> None:
        """Nothing happens for long, the wall clock jumps, and then housekeeping runs."""
        self.send()
        before_ms = self.partition.now_ms()
        self.clock.set_wall_ms(self.clock.wall_ms() + jump_ms)
        jumped_ms = self.partition.now_ms() - before_ms
        assert jumped_ms >= 0, "partition time never goes back"
        self.model.time_is_suspicious |= jumped_ms > FORWARD_JUMP_MS_MAX
        if confirmed and self.engines.next_commit is None:  # it is a commit of its own
            self.run(self.partition.confirm_time())
            self.model.time_is_suspicious = False
            self._begin_a_commit(self.partition.now_ms())
            self._conclude_a_commit()
            self.run(self._audit())  # its notices are those of one commit
        self.run(self.clock.advance_ms(step_ms))
        self.add([RunHousekeeping()])

    # --- faults --------------------------------------------------------------------------------

    @precondition(_is_settled_in)
    @rule(fault=st.sampled_from(Fault))
    def the_next_commit_fails(self, fault: Fault) -> None:
        if any(isinstance(each, Reserve) for each in self.frame):
            self.send()
        # The same goes for what stands: its hand-outs would be lost with the commit.
        self.add(self._recalls(self.model.standing))
        self.engines.next_commit = fault

    @precondition(_is_settled_in)
    @rule(dies=st.booleans())
    def reopen(self, dies: bool) -> None:
        """If it dies, the files as they are now are what its next life finds."""
        self.send()
        if dies:
            _copy(self._directory, self.home / str(self.lives + 1))
            self.lives += 1
        self.run(self.partition.close())
        self._begin_a_life()

    # --- inside --------------------------------------------------------------------------------

    def add(self, operations: Sequence[Operation[object]], more: bool = False) -> None:
        self.frame += operations
        if not more:
            self.send()

    def send(self) -> None:
        """Submit what has gathered, as two frames of one commit, and compare everything."""
        if not self.frame:
            return
        operations, self.frame = self.frame, []
        fault = self.engines.next_commit
        now_ms = self.partition.now_ms()
        assert now_ms >= self.committed_ms, "partition time never goes back"
        commits = self.engines.commits
        answers = self.run(self._submit(operations))
        self.engines.next_commit = None
        written = self.engines.commits != commits
        if answers is None:
            written = fault is Fault.AFTER_WRITING
        if written:
            self.committed_ms = now_ms
        self._begin_a_commit(now_ms)
        if answers is not None:
            for operation, answer in zip(operations, answers, strict=True):
                self._learn(answer)
                self.model.perform(operation, answer)
            self._conclude_a_commit()
        else:
            for operation in operations if written else ():
                self.model.perform(operation, self._read_back(operation), lost=True)
            if written:
                self.model.conclude()
            self.model.reloaded()
            assert not self.events.expired, "the outcome is unknown"
        self.run(self._audit())

    def _begin_a_commit(self, now_ms: int) -> None:
        told = set(self.events.ready)
        self.events.ready.clear()
        self.model.begin(now_ms, told)

    def _conclude_a_commit(self) -> None:
        """Every commit ends with what is due, and with what reserves that stand hand out."""
        self.run(self._until_handed_out())
        handed_out = list(in_long_form(self.handed_out))
        self.handed_out.clear()
        self.model.conclude(handed_out)
        for each in handed_out:
            self._learn(each)
        # A removed group or queue ends its reservations in no particular order.
        assert sorted(self.events.expired) == sorted(self.model.expired)
        self.events.expired.clear()

    async def _until_handed_out(self) -> None:
        """Hand-outs come one turn after the answers. A commit that erases may begin in that turn,
        and must not be looked at halfway."""
        erases = len(self.partition.state.erasures) > 0
        await give_way()
        if erases:
            await self.partition.submit([])

    async def _audit(self) -> None:
        """Compare, once nothing is being written: the commit that ends an erasure may still be, and
        would count as one of a later time."""
        await audit(self.partition, self.model)
        while self.engines.writing:
            await give_way()

    async def _submit(self, operations: list[Operation[object]]) -> list[object] | None:
        """The answers; None if the commit failed and the partition has opened again."""
        half = len(operations) // 2
        first, second = (
            self.partition.submit(operations[:half]),
            self.partition.submit(operations[half:]),
        )
        try:
            return [*await first, *await second]
        except CommitOutcomeUnknown:
            with pytest.raises(CommitOutcomeUnknown):
                await second
            while self.partition.health.faults:
                self.changed.clear()
                await self.changed.wait()
            return None

    def _learn(self, answer: object) -> None:
        match answer:
            case Reserved(slices):
                self.held += (Held(each.receipt, each.messages) for each in slices)
            case Ownership(epoch=epoch) if epoch not in self.epochs:
                self.epochs.append(epoch)

    def _read_back(self, operation: Operation[object]) -> object:
        """What a hand-out must have been, of which the answer was lost."""
        known = isinstance(operation, Reserve) and self.model.queues.get(operation.lmq_name)
        if not isinstance(operation, Reserve) or not known:
            return None
        state = self.run(self.partition.state.handles.read_state(operation.lmq_name))
        slices = [
            ReservedSlice(
                reservation_id=each.reservation_id,
                receipt=Receipt(0, known.queue_id, each.reservation_id, each.owner_epoch).encode(),
                queue_id=known.queue_id,
                first_offset=each.slice.start,
                messages=each.slice.messages,
                body=b"",
                attempt_count=each.slice.attempts,
                delivery_count=each.slice.deliveries,
                owner_epoch=each.owner_epoch,
                visibility_ms=each.deadline_ms - self.model.now_ms,
                publish_time_ms=0,
                fairness_key=each.slice.run.fairness_key,
                traceparent="",
                last_attempt=each.slice.attempts + 1 == state.rules.max_attempts,
            )
            for each in state.reservations.values()
            if each.reservation_id > self.model.reservation_id
        ]
        answer = Reserved(tuple(slices))
        self._learn(answer)
        return answer

    def _append(self, run: Run) -> Append:
        if run.again and run.sequence in self.numbered:
            return self.numbered[run.sequence]
        messages = min(run.messages, 5) if run.padding else run.messages
        append = Append(
            self.names[run.queue],
            messages,
            self._body(messages, run.padding),
            run.fairness_key,
            delay_ms=run.delay_ms,
            ttl_ms=run.ttl_ms,
            producer_id="p" if run.sequence else "",
            sequence=run.sequence,
        )
        if append.sequence:
            self.numbered.setdefault(append.sequence, append)
        return append

    def append(self, messages: int) -> Append:
        return Append("jobs", messages, self._body(messages, 0))

    def _reserve(self, wish: Wish) -> Reserve:
        reserve = Reserve(
            self.names[wish.queue],
            wish.group,
            wish.messages_max,
            wish.bytes_max,
            wish.visibility_ms,
            owner_epoch=_pick(self.epochs, wish.epoch),
            reports_hand_outs=wish.reports_hand_outs,
        )
        if self.engines.next_commit is not None:  # its hand-outs would be lost with the commit
            return reserve
        place = (reserve.lmq_name, reserve.group)
        before = [key for key, each in self.model.standing.items() if each.place == place]
        self.standing_id += 1
        return reserve._replace(
            standing_id=self.standing_id if wish.standing_messages else 0,
            standing_messages=wish.standing_messages,
            standing_bytes=wish.standing_bytes,
            replaces=before[-1] if before and wish.replaces else 0,
        )

    def _recalls(self, standing_ids: Iterable[int]) -> list[Operation[object]]:
        known = [(each, self.model.standing.get(each)) for each in standing_ids]
        return [
            Recall(*(self.names["first"], "g") if standing is None else standing.place, number)
            for number, standing in known
        ]

    def _settle(self, settlement: Settlement) -> Operation[object]:
        pick, ending, cuts, delay_ms, epoch, client_id = settlement
        held = _pick(self.held, pick)
        owner_epoch = _pick(self.epochs, epoch) if epoch > 1 else 0
        if ending is None and cuts:  # several at once, with what was given of each
            receipts = [held.receipt, _pick(self.held, pick + 1).receipt]
            several = tuple(
                HeldReservation(receipt, given, owner_epoch, client_id, at_least=pick % 2 == 1)
                for receipt, given in zip(receipts, cuts, strict=False)
            )
            return Renew(several, delay_ms, keep_deadlines=len(cuts) > 2)
        if ending is None:
            return Extend(
                held.receipt, delay_ms, owner_epoch, client_id, (None, 0, 1, 2, 3)[pick % 5]
            )
        if ending is Ending.ACK and not cuts and pick % 2:
            return AckReservations((held.receipt, _pick(self.held, pick + 1).receipt), client_id)
        delay_ms = delay_ms if ending is Ending.NACK else 0
        spans = _spans(cuts, held.messages)
        return Settle(
            held.receipt,
            ending,
            spans,
            delay_ms,
            owner_epoch=owner_epoch,
            client_id=client_id,
            given_messages=cuts[0] if cuts else None,
        )

    def _administer(self, operation: Any) -> Operation[object]:
        """The operation on the real queue."""
        if isinstance(operation, PutTopic):
            return operation
        lmq_name = self.names[operation.lmq_name]
        resolved: Operation[object] = operation._replace(lmq_name=lmq_name)
        return resolved

    def _body(self, messages: int, padding: int) -> bytes:
        batch = MessageBatch()
        for _ in range(messages):
            self.published += 1
            batch.messages.add(payload=b"%d" % self.published + b"." * padding)
        return batch.SerializeToString()

    def _begin_a_life(self) -> None:
        self.partition, self.engines, self.events = self.run(self._open())
        assert self.partition.now_ms() >= self.committed_ms, "partition time never goes back"
        self.model.begin(self.partition.now_ms(), set())
        self.model.reloaded()
        self.model.time_is_suspicious = self.partition.deletions_suspended
        self.run(self._audit())

    async def _open(self) -> tuple[Partition, FaultyEngines, ExchangeEvents]:
        engines = FaultyEngines(RocksEngines(self._directory))
        partition = Partition(engines, IDENTITY, self.clock)
        await partition.open()
        return partition, engines, partition.connect(0, self.changed.set, self.handed_out.extend)

    @property
    def _directory(self) -> Path:
        return self.home / str(self.lives)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(TURN_MS_MAX / 1000):
                return await work

        return self.loop.run_until_complete(bounded())


def _copy(source: Path, target: Path) -> None:
    """The files of one moment, although the store tidies them up in the background."""
    while True:
        before = sorted(source.rglob("*"))
        with suppress(shutil.Error):  # a file went away
            shutil.copytree(source, target)
            if sorted(source.rglob("*")) == before:
                return
        shutil.rmtree(target)


def _pick(choices: list[T], pick: int) -> T:
    """The newest for 0, then older ones."""
    return choices[-1 - pick % len(choices)]


def _spans(cuts: list[int], messages: int) -> tuple[Span, ...]:
    """Pairs of cuts that lie within a slice; most are good, some are not."""
    inside = [cut for cut in cuts if cut <= messages]
    return tuple(zip(inside[::2], inside[1::2], strict=False))


TestPartition = PartitionMachine.TestCase
TestPartition.settings = settings(
    max_examples=2000 if settings.get_current_profile_name() == "long" else 40,
    stateful_step_count=80 if settings.get_current_profile_name() == "long" else 50,
)
