"""Handles: the queues of a partition that are materialized.

Owns how a queue's state comes out of the engine and leaves memory again. A materialize reads
headers of what is live, page by page, never bodies; an unloaded queue leaves nothing behind. Every
operation that needs a queue gets its handle here, so that cold queues wake by being used.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator

from storage_svc.engines import rows
from storage_svc.engines.engine import Engine, Reader, Row, Table
from storage_svc.engines.keys import prefix_end, successor, u64
from storage_svc.operations import Eviction
from storage_svc.partition.counters import Counters
from storage_svc.partition.journal import BatchJournal
from storage_svc.partition.topics import Topics
from storage_svc.queue.group import Group
from storage_svc.queue.lane import LANE_RUNS_MAX, Lane, Run
from storage_svc.queue.queue import QueueRecord, QueueState, Remembered, Rules
from tidemark.errors import QueueNotFound
from tidemark.limits import RUN_MESSAGES_MAX
from tidemark.names import topic_of
from tidemark.telemetry import counter
from tidemark.topics import Topic

LOOKED_AT_MAX = 10_000
"""Handles that one round of housekeeping looks at."""

ERASED_PER_USE_MAX = 10_000
"""Kept runs that one use of a queue drops once retention is off; the next use goes on."""

_PAGE_ROWS = 1000
LeftOut = Callable[[Table, bytes], None]
"""Told of a record whose run or group is gone."""

_UNREAD_RUN = (0, 0, 0, 0, "", "")  # what is left to know of a run that is gone

_log = logging.getLogger(__name__)
_corrupt_records = counter(
    "tidemark.storage.corrupt_records", "Records that were left out at recovery", zeros=()
)


class Handle:
    """One materialized queue."""

    __slots__ = ("last_used_ms", "stamp", "state", "topic", "tracked")

    def __init__(self, state: QueueState, topic: Topic, now_ms: int) -> None:
        self.state = state
        self.topic = topic
        self.stamp = 1
        """Grows with every use: tells whether something happened since somebody looked."""
        self.tracked = False
        """Whether a broker has asked for it, and will ask to unload it."""
        self.last_used_ms = now_ms

    @property
    def queue_id(self) -> int:
        return self.state.record.queue_id


class Handles:
    """The materialized queues of one partition, least recently used first."""

    def __init__(self, engine: Engine, topics: Topics, counters: Counters) -> None:
        self._engine = engine
        self._topics = topics
        self._counters = counters
        self._by_name: OrderedDict[str, Handle] = OrderedDict()
        self._names: dict[int, str] = {}
        self._remembered = Remembered()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._by_name.values())

    def peek(self, lmq_name: str) -> Handle | None:
        """The handle if there is one; this is no use of the queue."""
        return self._by_name.get(lmq_name)

    async def glimpse(self, lmq_name: str) -> QueueState:
        """The state of a queue to look at; an idle one stays idle."""
        handle = self._by_name.get(lmq_name)
        if handle is not None:
            return handle.state
        (value,) = await self._engine.load(Table.CATALOG, [rows.catalog_key(lmq_name)])
        if value is None:
            raise QueueNotFound(f"there is no queue {lmq_name}", queue=lmq_name)
        return await self._recover(lmq_name, value, Remembered(), _gone_meanwhile)

    async def find(self, lmq_name: str, journal: BatchJournal) -> Handle | None:
        """The handle of a queue, materialized if need be; None if there is no such queue."""
        handle = self._by_name.get(lmq_name)
        if handle is None and lmq_name not in journal.removed_names:
            handle = await self._materialize(lmq_name, journal.now_ms)
        if handle is None:
            return None
        if handle.state.record.kept and not handle.state.rules.keeps_settled:
            await self._erase_kept(handle.state, journal)
        return self._use(lmq_name, handle, journal.now_ms)

    async def get(self, lmq_name: str, journal: BatchJournal) -> Handle:
        """The handle of a queue that must exist."""
        handle = await self.find(lmq_name, journal)
        if handle is None:
            raise QueueNotFound(f"there is no queue {lmq_name}", queue=lmq_name)
        return handle

    async def get_or_create(self, lmq_name: str, journal: BatchJournal) -> Handle:
        return await self.find(lmq_name, journal) or self._create(lmq_name, journal)

    async def by_id(self, queue_id: int, journal: BatchJournal) -> Handle | None:
        """The handle of a queue by its identity; None if that queue is gone."""
        if queue_id in journal.removed_ids:
            return None
        lmq_name = self._names.get(queue_id)
        if lmq_name is None:
            (name,) = await self._engine.load(Table.QUEUES, [u64(queue_id)])
            if name is None:
                return None
            lmq_name = name.decode()
        handle = await self.find(lmq_name, journal)
        return handle if handle is not None and handle.state.record.queue_id == queue_id else None

    async def unload(self, lmq_name: str, expected_stamp: int, journal: BatchJournal) -> Eviction:
        """Forget a queue that nobody uses, and say what came of it (I4)."""
        handle = self._by_name.get(lmq_name)
        if handle is None:
            (value,) = await self._engine.load(Table.CATALOG, [rows.catalog_key(lmq_name)])
            gone = value is None or lmq_name in journal.removed_names
            return Eviction.NOT_PRESENT if gone else Eviction.NOT_MATERIALIZED
        if handle.state.has_inflight:
            return Eviction.HAS_INFLIGHT
        # What this commit changes is not in the engine yet: it could not be loaded again.
        if expected_stamp not in (0, handle.stamp) or handle.queue_id in journal.touched:
            return Eviction.RACE_LOST
        await self.forget_lanes(handle.state, journal)
        handle.state.prepare_to_unload(journal)
        self.drop(lmq_name)
        return Eviction.EVICTED

    def drop(self, lmq_name: str) -> None:
        """Forget a handle: its queue was deleted, or is unloaded."""
        handle = self._by_name.pop(lmq_name)
        handle.state.forget_settled()
        del self._names[handle.state.record.queue_id]

    def untracked(self, now_ms: int) -> list[str]:
        """Queues that no broker tracks and nobody used for twice their idle window (I9).

        Looks at a bounded number, least recently used first; those that must stay go to the end of
        the line, so that the others get their turn.
        """
        idle = []
        looked_at = [name for name, _ in zip(self._by_name, range(LOOKED_AT_MAX), strict=False)]
        for lmq_name in looked_at:
            handle = self._by_name[lmq_name]
            window_ms = 2 * handle.topic.settings.idle_after_ms
            rested = now_ms - handle.last_used_ms >= window_ms
            if rested and not handle.tracked and not handle.state.has_inflight:
                idle.append(lmq_name)
            else:
                self._by_name.move_to_end(lmq_name)
        return idle

    def forget_trackers(self) -> None:
        """Another broker took over: nobody tracks anything until it says so."""
        for handle in self._by_name.values():
            handle.tracked = False

    def topic_changed(self, topic: Topic) -> None:
        """Loaded queues obey the new settings from now on."""
        for lmq_name, handle in self._by_name.items():
            if topic_of(lmq_name) == topic.name:
                handle.topic = topic
                handle.state.rules = rules_of(topic)
                for group in handle.state.groups.values():
                    group.ring.weights = topic.settings.fairness_weights

    # --- reading on ----------------------------------------------------------------------------

    async def read_lane(self, state: QueueState, lane: Lane, journal: BatchJournal) -> None:
        """Feed a lane its next page of headers, as they are after the commit under way."""
        queue_id = state.record.queue_id
        prefix = rows.lane_prefix(queue_id, lane.key)
        start = prefix + u64(lane.read_from)
        page = await self._engine.scan(
            Table.RUN_HEADERS, start, prefix_end(prefix), limit=LANE_RUNS_MAX
        )
        runs = [rows.read_run(key, value) for key, value in page if key not in journal.deleted]
        last = len(page) < LANE_RUNS_MAX
        read_to = rows.read_run(*page[-1]).end if page else lane.read_from
        if last:
            runs += (
                run
                for run in journal.appended.get(queue_id, ())
                if run.fairness_key == lane.key and run.first_offset >= read_to
            )
        lane.feed(runs, read_to=read_to, last=last)

    async def load_lanes(self, state: QueueState, group: Group, journal: BatchJournal) -> None:
        """Give a group that begins, or begins anew, the lanes of everything that is stored."""
        read_from = max(0, group.base - RUN_MESSAGES_MAX)
        keys = dict.fromkeys(await self._fairness_keys(state.record))
        keys.update(
            (run.fairness_key, None) for run in journal.appended.get(state.record.queue_id, ())
        )
        for key in keys:
            group.add_lane(key, group.base, read_from)

    async def forget_lanes(self, state: QueueState, journal: BatchJournal) -> None:
        """Forget lanes of which nothing is stored any more: fairness keys come and go."""
        queue_id = state.record.queue_id
        appended = {run.fairness_key for run in journal.appended.get(queue_id, ())}
        for group in state.groups.values():
            left_over = [
                lane
                for lane in group.idle_lanes()
                if lane.key not in appended and not await self._is_stored(state.record, lane.key)
            ]
            for lane in left_over:
                journal.lane_removed(state.record, group, lane)
            group.forget_lanes(left_over)

    async def _is_stored(self, record: QueueRecord, fairness_key: str) -> bool:
        """Whether the engine has runs of a key; also those that this commit deletes."""
        prefix = rows.lane_prefix(record.queue_id, fairness_key)
        return bool(record.messages) and bool(
            await self._engine.scan(Table.RUN_HEADERS, prefix, prefix_end(prefix), limit=1)
        )

    async def runs(self, state: QueueState, journal: BatchJournal) -> list[Run]:
        """Every run of a queue, as it is after the commit under way. Costs what is stored."""
        start, end = rows.queue_range(state.record.queue_id)
        stored = [
            rows.read_run(key, value)
            async for key, value in self.scan_all(Table.RUN_HEADERS, start, end)
            if key not in journal.deleted
        ]
        return stored + journal.appended.get(state.record.queue_id, [])

    async def _erase_kept(self, state: QueueState, journal: BatchJournal) -> None:
        """Drop what every group had settled before retention was switched off (R2).

        It would stay for ever, and count towards the quotas: no settlement will name it again.
        """
        runs = await self.runs(state, journal)
        settled = [run for run in runs if state.is_settled(run)]
        state.erase_settled(settled[:ERASED_PER_USE_MAX], journal)
        state.record.kept = len(settled) > ERASED_PER_USE_MAX
        journal.queue_changed(state.record)

    async def scan_all(self, table: Table, start: bytes, end: bytes | None) -> AsyncIterator[Row]:
        """Rows of a range, page by page."""
        while page := await self._engine.scan(table, start, end, limit=_PAGE_ROWS):
            for row in page:
                yield row
            if len(page) < _PAGE_ROWS:
                return
            start = successor(page[-1][0])

    # --- materialize ---------------------------------------------------------------------------

    async def _materialize(self, lmq_name: str, now_ms: int) -> Handle | None:
        (value,) = await self._engine.load(Table.CATALOG, [rows.catalog_key(lmq_name)])
        if value is None:
            return None
        state = await self._recover(lmq_name, value, self._remembered, _left_out)
        handle = Handle(state, self._topic_of(lmq_name), now_ms)
        self._add(lmq_name, handle)
        return handle

    async def _recover(
        self, lmq_name: str, value: bytes, remembered: Remembered, left_out: LeftOut
    ) -> QueueState:
        """The state of a queue as the engine has it."""
        topic = self._topic_of(lmq_name)
        state = QueueState(rows.read_queue(lmq_name, value), rules_of(topic), remembered)
        start, end = rows.queue_range(state.record.queue_id)
        marks: dict[tuple[str, str], tuple[int, int]] = {}
        async for key, value in self.scan_all(Table.GROUPS, start, end):
            group, mark = rows.read_group(key, value)
            group.ring.weights = topic.settings.fairness_weights
            state.groups[group.name] = group
            marks[group.name, ""] = mark
        if state.groups:
            if state.record.keyed:
                async for key, value in self.scan_all(Table.LANES, start, end):
                    group_name, fairness_key, mark = rows.read_lane(key, value)
                    marks[group_name, fairness_key] = mark
            for fairness_key in await self._fairness_keys(state.record):
                for group in state.groups.values():
                    run_start, position = marks.get((group.name, fairness_key), (0, group.base))
                    # A run that begins before the base may reach beyond it.
                    if run_start <= group.base:
                        run_start = max(0, group.base - RUN_MESSAGES_MAX)
                    # An empty queue keeps its marks, and has nothing to read.
                    unread = run_start if state.record.messages else None
                    group.add_lane(fairness_key, position, unread)
            if state.record.reserved:
                await self._recover_reservations(state, start, end, left_out)
            if state.record.returned:
                await self._recover_exceptions(state, start, end, left_out)
        return state

    async def _fairness_keys(self, record: QueueRecord) -> list[str]:
        if not record.keyed:
            return [""]
        return await fairness_keys(self._engine, record.queue_id)

    async def _recover_reservations(
        self, state: QueueState, start: bytes, end: bytes, left_out: LeftOut
    ) -> None:
        async for key, value in self.scan_all(Table.RESERVATIONS, start, end):
            run = Run(0, *_UNREAD_RUN)
            if rows.is_live(value):
                run_key = rows.reservation_run_key(key, value)
                (header,) = await self._engine.load(Table.RUN_HEADERS, [run_key])
                if header is None:
                    left_out(Table.RESERVATIONS, key)
                    continue
                run = rows.read_run(run_key, header)
            reservation = rows.read_reservation(key, value, run)
            if reservation.group not in state.groups:
                left_out(Table.RESERVATIONS, key)
                continue
            state.recover_reservation(reservation)
            if reservation.live:
                _count_outstanding(state.groups[reservation.group], run, reservation.open_messages)

    async def _recover_exceptions(
        self, state: QueueState, start: bytes, end: bytes, left_out: LeftOut
    ) -> None:
        async for key, value in self.scan_all(Table.EXCEPTIONS, start, end):
            run_key = rows.exception_run_key(key, value)
            (header,) = await self._engine.load(Table.RUN_HEADERS, [run_key])
            if header is None:
                left_out(Table.EXCEPTIONS, key)
                continue
            group_name, returned = rows.read_exception(key, value, rows.read_run(run_key, header))
            group = state.groups.get(group_name)
            if group is None:
                left_out(Table.EXCEPTIONS, key)
                continue
            state.recover_exception(group, returned)
            _count_outstanding(group, returned.slice.run, returned.slice.messages)

    def _topic_of(self, lmq_name: str) -> Topic:
        """A queue may outlive its topic until somebody deletes it: it obeys the defaults then."""
        name = topic_of(lmq_name)
        return self._topics.find(name) or Topic(name)

    def _create(self, lmq_name: str, journal: BatchJournal) -> Handle:
        now_ms = journal.now_ms
        topic = self._topics.get(topic_of(lmq_name))
        self._counters.queue_id += 1
        self._counters.queues += 1
        record = QueueRecord(self._counters.queue_id, lmq_name, now_ms, now_ms)
        journal.queue_created(record)
        state = QueueState(record, rules_of(topic), self._remembered)
        handle = Handle(state, topic, now_ms)
        self._add(lmq_name, handle)
        return handle

    def _add(self, lmq_name: str, handle: Handle) -> None:
        self._by_name[lmq_name] = handle
        self._names[handle.state.record.queue_id] = lmq_name

    def _use(self, lmq_name: str, handle: Handle, now_ms: int) -> Handle:
        handle.stamp += 1
        handle.last_used_ms = now_ms
        self._by_name.move_to_end(lmq_name)
        return handle


async def fairness_keys(
    source: Engine | Reader, queue_id: int, limit: int | None = None
) -> list[str]:
    """The distinct keys of the stored runs: one seek per key, however many runs it has."""
    keys: list[str] = []
    start, end = rows.queue_range(queue_id)
    while limit is None or len(keys) < limit:
        page = await source.scan(Table.RUN_HEADERS, start, end, limit=1)
        if not page:
            break
        keys.append(rows.read_run(*page[0]).fairness_key)
        start = prefix_end(rows.lane_prefix(queue_id, keys[-1]))
    return keys


def rules_of(topic: Topic) -> Rules:
    settings = topic.settings
    return Rules(
        settings.max_attempts,
        settings.retention_enabled,
        settings.fairness_weights,
        not settings.consumption_records_disabled,
    )


def _count_outstanding(group: Group, run: Run, messages: int) -> None:
    group.outstanding[run.first_offset] = group.outstanding.get(run.first_offset, 0) + messages


def _left_out(table: Table, key: bytes) -> None:
    """A record whose run or group is gone: it is left out, and the rest goes on (V3)."""
    _corrupt_records.add(1, {"table": table.value})
    _log.warning("a record was left out", extra={"table": table.value, "key": key.hex()})


def _gone_meanwhile(table: Table, key: bytes) -> None:
    """A look reads beside the writer: what is gone between two reads is no corrupt record."""
