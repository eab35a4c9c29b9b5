"""What the model of a partition knows, and how its operations find their queues."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from storage_svc.operations.operation import Acted, ActionOutcome
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.publish import Append, Appended
from storage_svc.operations.reserve import Reserve
from storage_svc.partition import erasures
from storage_svc.queue.record import USE_NOTED_MS
from tests.model.reference.queue import ModelGroup, Published, QueueModel
from tidemark.errors import Fenced, GroupNotFound, QueueNotFound, TidemarkError
from tidemark.names import LmqName
from tidemark.topics import TopicSettings

DAY_MS = 24 * 60 * 60 * 1000
STALE = Acted(ActionOutcome.STALE)


class Refused(Exception):
    """The operation must fail with one of these."""

    def __init__(self, *kinds: type[TidemarkError]) -> None:
        super().__init__(kinds)
        self.kinds = kinds


class Dead(NamedTuple):
    """A slice that left for the dead-letter topic."""

    payloads: tuple[bytes, ...]
    lmq_name: str
    first_offset: int
    reason: DeadReason
    fairness_key: str


@dataclass(slots=True)
class ModelProducer:
    """What one producer published."""

    answers: dict[int, tuple[Append, Appended]] = field(default_factory=dict)
    last_day: int = 0


@dataclass(slots=True)
class ModelStanding:
    """A consumer that waits in storage."""

    asked: Reserve
    left: int
    """Messages that it may still be handed."""
    told: bool = False
    """Whether its broker has had a notice since the last hand-out, and asks again."""

    @property
    def place(self) -> tuple[str, str]:
        return self.asked.lmq_name, self.asked.group


class ModelState:
    """Everything that a partition must know; its operations are functions of this."""

    def __init__(self, topics: Mapping[str, TopicSettings], remembered_max: int) -> None:
        self.topics = dict(topics)
        self.queues: dict[str, QueueModel] = {}
        self.outbox: dict[int, Dead] = {}
        self.producers: dict[str, ModelProducer] = {}
        self.consumed: dict[tuple[int, str, int], int] = {}
        """(queue_id, group, offset) -> how often it was recorded as consumed."""
        self.deleted: dict[str, int] = {}
        """Queue -> messages that left for good, by a sweep or a purge."""
        self.now_ms = 0
        self.time_is_suspicious = False
        self.reservation_id = 0
        self.expired: list[int] = []
        """Reservations that the last commit has ended without a settlement."""
        self.told: set[tuple[str, str]] = set()
        """(queue, group) that the last commit has told of ready messages."""
        self.left_behind: dict[tuple[str, str], str] = {}
        """What the last reserve of a (queue, group) in the commit should have handed out."""
        self.took_some: set[tuple[str, str]] = set()
        """(queue, group) that the commit handed out of: undeliverable messages may be buried."""
        self.remembered_max = remembered_max
        self.schedule_id = self.owner_epoch = self.outbox_sequence = self.high_water = 0
        self.standing: dict[int, ModelStanding] = {}
        """Standing reserves by their ids: each gets one last result."""
        self.ends_standing: set[int] = set()
        """Standing reserves that the commit must end."""
        self.touched: set[int] = set()
        """Ids of the queues that the commit has changed so far."""
        self.unloaded: set[int] = set()
        """Ids of the queues that the commit has unloaded, which may have changed their rows."""
        self.brief: set[str] = set()
        """Queues that are unloaded after the commit: nothing but a sweep has used them."""
        self.stored_before: dict[int, set[int]] = {}
        """Queue id -> first offsets of its runs before the commit."""
        self.erased_later: set[int] = set()
        """Ids of large queues whose settled runs are erased after the commit."""
        self.lost = False
        """Whether the answer to the operation was lost with a failed commit."""
        self._queue_id = 0

    def settings(self, queue: QueueModel) -> TopicSettings:
        return self.topics[LmqName.parse(queue.name).topic]

    def by_id(self, queue_id: int) -> QueueModel | None:
        return next((each for each in self.queues.values() if each.queue_id == queue_id), None)

    def find(self, lmq_name: str, *, briefly: bool = False) -> QueueModel | None:
        """A queue, which this is a use of; sweeps load it only for their commit."""
        queue = self.queues.get(lmq_name)
        if not briefly:
            self.brief.discard(lmq_name)
        elif queue is None or not queue.loaded:
            self.brief.add(lmq_name)
        if queue is not None:
            queue.loaded = True
            queue.last_used_ms = self.now_ms
        return queue

    def get(self, lmq_name: str) -> QueueModel:
        queue = self.find(lmq_name)
        if queue is None:
            raise Refused(QueueNotFound)
        return queue

    def get_or_create(self, lmq_name: str, *, briefly: bool = False) -> QueueModel:
        queue = self.find(lmq_name, briefly=briefly)
        if queue is None:
            self._queue_id += 1
            queue = self.queues[lmq_name] = QueueModel(self._queue_id, lmq_name)
            queue.last_used_ms = self.now_ms
            self.touched.add(queue.queue_id)
        return queue

    def use_id(self, queue_id: int, *, briefly: bool = False) -> QueueModel | None:
        queue = self.by_id(queue_id)
        return None if queue is None else self.find(queue.name, briefly=briefly)

    def get_group(self, lmq_name: str, name: str) -> tuple[QueueModel, ModelGroup]:
        queue = self.get(lmq_name)
        if name not in queue.groups:
            raise Refused(GroupNotFound)
        return queue, queue.groups[name]

    def note_use(self, queue: QueueModel, group: ModelGroup) -> None:
        """A consumer uses a group: noted, and thus a change, once in a while."""
        if self.now_ms - group.last_used_ms >= USE_NOTED_MS:
            group.last_used_ms = self.now_ms
            self.touched.add(queue.queue_id)

    def end_standing(self, lmq_name: str, group: str | None = None) -> None:
        """The reserves of a group, or of all, stand no longer; each gets a last result."""
        self.ends_standing.update(
            standing_id
            for standing_id, each in self.standing.items()
            if each.asked.lmq_name == lmq_name and group in (None, each.asked.group)
        )

    def add_group(self, queue: QueueModel, name: str, base: int = 0) -> ModelGroup:
        group = queue.add_group(name, base)
        group.last_used_ms = self.now_ms
        self.touched.add(queue.queue_id)
        return group

    def delete_settled(self, queue: QueueModel, runs: list[Published]) -> None:
        if not self.settings(queue).retention_enabled:
            queue.delete_settled(runs)

    def erase_settled(self, queue: QueueModel) -> None:
        """Delete every run that all groups have settled; of a large queue after the commit, until
        when they are stored and counted, and a group that starts over finds them."""
        limit = erasures.ERASED_AT_ONCE_MAX
        # Rows that the commit has deleted can still be read.
        rows = self.stored_before.get(queue.queue_id, set()) | queue.runs.keys()
        if queue.messages > limit and len(rows) > limit:
            self.erased_later.add(queue.queue_id)
        else:
            self.delete_settled(queue, list(queue.runs.values()))

    def count_deleted(self, queue: QueueModel, messages: int) -> None:
        if messages:
            self.deleted[queue.name] = self.deleted.get(queue.name, 0) + messages


def check_owner(group: ModelGroup, owner_epoch: int, client_id: str | None = None) -> None:
    """Also the client that settles; None where the broker acts by itself."""
    if group.owner_epoch and owner_epoch != group.owner_epoch:
        raise Refused(Fenced)
    if group.owner_epoch and client_id is not None and client_id != group.owner_client_id:
        raise Refused(Fenced)
