"""Handles: the cache of the queues that a partition has materialized.

A queue is loaded when an operation uses it, and unloaded once it is idle; an unloaded queue leaves
nothing in memory. `partition/commit.py` adds the changes of the current commit.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from storage_svc.engines import queue_rows
from storage_svc.engines.engine import Engine, Table
from storage_svc.engines.keys import u64
from storage_svc.loading.recovery import (
    ignore_orphan,
    recover_queue,
    report_orphan,
)
from storage_svc.partition.erasures import Erasures
from storage_svc.partition.topics import Topics
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import Journal, QueueRecord, Rules
from storage_svc.queue.settled import SettledBudget
from storage_svc.turns import release
from tidemark.errors import QueueNotFound
from tidemark.names import topic_of
from tidemark.topics import Topic

EXAMINED_MAX = 10_000
"""Handles that one round of housekeeping examines."""

RELOADED_RECORDS_MAX = 100
"""Reservations, returned slices and lanes of a queue that is unloaded after a pass or a sweep."""


_SHARED_RULES_MAX = 1024
"""Topics whose rules are kept to be shared by queues that are loaded later."""


class Handle:
    """One materialized queue."""

    __slots__ = ("consumers", "last_used_ms", "state", "topic")

    def __init__(self, state: QueueState, topic: Topic, now_ms: int) -> None:
        self.state = state
        self.topic = topic
        self.last_used_ms = now_ms
        self.consumers: frozenset[str] = frozenset()
        """Groups of which the broker has a consumer or an owner, as it has reported (R14)."""

    @property
    def queue_id(self) -> int:
        return self.state.record.queue_id

    def used(self, now_ms: int) -> None:
        """An operation uses the queue."""
        self.last_used_ms = now_ms


class Handles:
    """The materialized queues of one partition."""

    def __init__(self, engine: Engine, topics: Topics, erasures: Erasures) -> None:
        self._engine = engine
        self._erasures = erasures
        self._topics = topics
        self._by_name: dict[str, Handle] = {}
        self._names: dict[int, str] = {}
        self._untracked: OrderedDict[str, Handle] = OrderedDict()
        """Queues that no broker tracks, least recently examined first."""
        self._budget = SettledBudget()
        self._rules: dict[str, tuple[Topic, Rules]] = {}
        """By topic, shared by its queues; also of topics that are deleted since."""

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._by_name.values())

    def peek(self, lmq_name: str) -> Handle | None:
        """The handle of a loaded queue; does not count as a use of it."""
        return self._by_name.get(lmq_name)

    async def read_state(self, lmq_name: str) -> QueueState:
        """The state of a queue, for reading only; a queue that is not loaded stays so."""
        handle = self._by_name.get(lmq_name)
        if handle is not None:
            return handle.state
        value = await self._catalog_value(lmq_name)
        if value is None:
            raise QueueNotFound(f"there is no queue {lmq_name}", queue=lmq_name)
        return await recover_queue(
            self._engine,
            lmq_name,
            value,
            self._rules_of(self._topic_of(lmq_name)),
            SettledBudget(),
            ignore_orphan,
            self._erasures,
        )

    async def load(
        self, lmq_name: str, now_ms: int, catalog_value: bytes | None = None
    ) -> Handle | None:
        """Materialize a queue; None if the engine has none of that name."""
        value = catalog_value or await self._catalog_value(lmq_name)
        if value is None:
            return None
        topic = self._topic_of(lmq_name)
        state = await recover_queue(
            self._engine,
            lmq_name,
            value,
            self._rules_of(topic),
            self._budget,
            report_orphan,
            self._erasures,
        )
        return self._add(lmq_name, Handle(state, topic, now_ms))

    def create(self, record: QueueRecord, topic: Topic, now_ms: int) -> Handle:
        """The handle of a queue that the current commit creates."""
        state = QueueState(record, self._rules_of(topic), self._budget)
        return self._add(record.lmq_name, Handle(state, topic, now_ms))

    def loaded_name(self, queue_id: int) -> str | None:
        """The lmq_name of a queue that is loaded."""
        return self._names.get(queue_id)

    async def stored_name(self, queue_id: int) -> str | None:
        """The lmq_name of any queue; None if the engine has no queue of that id."""
        (name,) = await self._engine.load(Table.QUEUES, [u64(queue_id)])
        return None if name is None else name.decode()

    async def exists(self, lmq_name: str) -> bool:
        """Whether the engine has a queue of that name."""
        return await self._catalog_value(lmq_name) is not None

    def drop(self, lmq_name: str) -> None:
        """Forget a handle: its queue was deleted, or is unloaded."""
        handle = self._by_name.pop(lmq_name)
        self._untracked.pop(lmq_name, None)
        handle.state.forget_settled()
        del self._names[handle.queue_id]

    def release(self) -> None:
        """The partition drops all its memory: free it in parts."""
        large = [each.state.containers for each in self if len(each.state.reservations) > 1000]
        release([self._by_name, self._names, self._untracked, *chain.from_iterable(large)])

    def drop_untracked(self, lmq_name: str) -> None:
        """Forget a handle that was loaded for one commit, unless a broker tracks it by now.

        One with much in flight stays for its idle windows: a pass or a sweep comes back to it, and
        to load it costs a read for each.
        """
        handle = self._untracked.get(lmq_name)
        if handle is not None and handle.state.in_flight_records <= RELOADED_RECORDS_MAX:
            self.drop(lmq_name)

    def untracked(self, now_ms: int) -> list[str]:
        """Queues that no broker tracks and that were not used for twice their idle window (I9).

        Examines a bounded number, least recently examined first; those that must stay go to the
        end, so that the others are examined next. Tracked queues cost nothing.
        """
        idle = []
        for lmq_name, handle in list(islice(self._untracked.items(), EXAMINED_MAX)):
            window_ms = 2 * handle.topic.settings.idle_after_ms
            rested = now_ms - handle.last_used_ms >= window_ms
            if rested and not handle.state.has_inflight:
                idle.append(lmq_name)
            else:
                self._untracked.move_to_end(lmq_name)
        return idle

    def is_tracked(self, lmq_name: str) -> bool:
        """Whether the queue is loaded and tracked by a broker, which will ask to unload it."""
        return lmq_name in self._by_name and lmq_name not in self._untracked

    def track(self, lmq_name: str) -> None:
        """A broker has loaded the queue and will ask to unload it."""
        self._untracked.pop(lmq_name, None)

    def forget_trackers(self) -> None:
        """The broker has changed or is gone: no queue is tracked until it is materialized again."""
        self._untracked.update(self._by_name)
        for handle in self._by_name.values():
            handle.consumers = frozenset()

    def topic_changed(self, topic: Topic, journal: Journal) -> None:
        """Apply the new settings to loaded queues."""
        rules = self._rules_of(topic)
        for lmq_name, handle in self._by_name.items():
            if topic_of(lmq_name) == topic.name:
                handle.topic = topic
                handle.state.obey(rules, journal)

    async def _catalog_value(self, lmq_name: str) -> bytes | None:
        (value,) = await self._engine.load(Table.CATALOG, [queue_rows.catalog_key(lmq_name)])
        return value

    def _topic_of(self, lmq_name: str) -> Topic:
        """A queue that outlives its topic has the default settings until it is deleted."""
        name = topic_of(lmq_name)
        return self._topics.find(name) or Topic(name)

    def _rules_of(self, topic: Topic) -> Rules:
        known = self._rules.get(topic.name)
        if known is not None and known[0] is topic:
            return known[1]
        # On an engine that nodes share, rows are in the memory of a server.
        rules = Rules.of(topic, rows_cost_memory=self._engine.storage_epoch > 0)
        if len(self._rules) >= _SHARED_RULES_MAX:
            self._rules.clear()
        self._rules[topic.name] = topic, rules
        return rules

    def _add(self, lmq_name: str, handle: Handle) -> Handle:
        self._by_name[lmq_name] = handle
        self._names[handle.queue_id] = lmq_name
        self._untracked[lmq_name] = handle
        return handle
