"""The state of an open partition: everything it keeps in memory, and its engine.

Built when the partition is opened and dropped as a whole when a commit fails. No queue is read at
opening, and one page of deadlines, so that it takes the same time however many there are.
"""

from dataclasses import dataclass, field

from storage_svc.engines import outbox_rows
from storage_svc.engines.engine import Engine, Engines, Identity, Table
from storage_svc.engines.keys import prefix_end
from storage_svc.loading.deadline_pages import read_deadlines
from storage_svc.loading.handles import Handles
from storage_svc.partition.age_marks import AgeMarks
from storage_svc.partition.broker_hold import BrokerHold
from storage_svc.partition.commit_numbers import CommitNumbers, Loss, load_commit_numbers
from storage_svc.partition.counters import Claim, Counters, first_number, load_counters
from storage_svc.partition.deadlines import Deadlines
from storage_svc.partition.due_indexes import DueIndexes
from storage_svc.partition.erasures import Erasures
from storage_svc.partition.left_out import LeftOut
from storage_svc.partition.outbox_index import OutboxIndex
from storage_svc.partition.producers import Producers
from storage_svc.partition.topics import Topics
from storage_svc.queue.bodies import BodyCache


@dataclass(slots=True)
class PartitionState:
    """The state that operations read and change; durable only as far as a commit has written it."""

    engine: Engine
    counters: Counters
    claim: Claim
    numbers: CommitNumbers
    topics: Topics
    handles: Handles
    producers: Producers
    deadlines: Deadlines
    is_shared: bool
    """Whether the engine is on servers that nodes share: its `storage_epoch` is not 0."""
    bodies: BodyCache = field(default_factory=BodyCache)
    due: DueIndexes = field(default_factory=DueIndexes)
    ages: AgeMarks = field(default_factory=AgeMarks)
    left_out: LeftOut = field(default_factory=LeftOut)
    outbox: OutboxIndex = field(default_factory=OutboxIndex)
    hold: BrokerHold = field(default_factory=BrokerHold)
    first_broker_epoch: int = 1
    """The next claim gives no lower one; the broker that holds the partition keeps its own until
    then."""
    refused_epoch: int = 0
    """The last broker epoch under which a run was refused because the partition did not serve: runs
    that were sent behind it must not overtake its repeat. 0 for none."""
    erasures: Erasures = field(default_factory=Erasures)
    loss: Loss | None = None
    """Of commits, while no operator has confirmed it: the partition must not serve."""

    def is_in_use(self, lmq_name: str, now_ms: int) -> bool:
        """Whether a connected client uses the queue, or might: it would not notice its removal."""
        return self.handles.is_tracked(lmq_name) or not self.hold.knows_clients(now_ms)

    def broker_gone(self) -> None:
        """No broker is connected: no queue is tracked until one loads it again."""
        self.handles.forget_trackers()
        self.hold.end()


async def open_state(engines: Engines, identity: Identity) -> PartitionState:
    """Open the engine of a partition; read its counters, claim, topics, deadlines, outbox
    and erasures."""
    engine = await engines.open(identity)
    try:
        counters, claim = await load_counters(engine)
        floor = first_number(engine.storage_epoch)
        numbers, loss = await load_commit_numbers(engine, counters.commit, floor)
        counters.commit = numbers.before_first
        counters.skip_to(floor)
        topics = Topics()
        await topics.load(engine)
        deadlines = Deadlines(counters.deadlines)
        await read_deadlines(engine, deadlines)
        outbox = await _load_outbox(engine)
        erasures = Erasures()
        await erasures.load(engine)
    except BaseException:
        await engine.close()
        raise
    handles = Handles(engine, topics, erasures)
    return PartitionState(
        engine,
        counters,
        claim,
        numbers,
        topics,
        handles,
        Producers(engine),
        deadlines,
        is_shared=engine.storage_epoch > 0,
        outbox=outbox,
        first_broker_epoch=floor + 1,
        erasures=erasures,
        loss=loss,
    )


async def _load_outbox(engine: Engine) -> OutboxIndex:
    """One seek per destination, however many entries wait for it."""
    outbox = OutboxIndex()
    start = b""
    while page := await engine.scan(Table.OUTBOX, start, None, limit=1):
        ((key, value),) = page
        name, first = outbox_rows.read_outbox_key(key)
        outbox.found(name, outbox_rows.outbox_partition(value), first)
        start = prefix_end(outbox_rows.outbox_prefix(name))
    return outbox
