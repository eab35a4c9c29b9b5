"""The commit context: the state that operations may use while one commit is being made.

Gives the time of the commit, the state of the partition and the journal, and shows queues, runs and
bodies as they are after the commit under way: rows that it has written cannot be read from the
engine yet, and rows that it has deleted still can. It decides nothing itself; each subject has a
separate module in `operations/`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from storage_svc.empty_containers import NO_DICT, NO_LIST, NO_SET
from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.engines.keys import prefix_end, u64
from storage_svc.loading.handles import Handle
from storage_svc.loading.recovery import stored_fairness_keys
from storage_svc.loading.stored_runs import scan_run_pages, scan_runs
from storage_svc.partition import erasures
from storage_svc.partition.counters import put_counters
from storage_svc.partition.erasures import NOTHING_PURGED, Erasure
from storage_svc.partition.journal import BatchJournal
from storage_svc.partition.state import PartitionState
from storage_svc.queue.group import Group
from storage_svc.queue.lane import LANE_RUNS_MAX, Lane
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Reservation
from storage_svc.queue.run import Run
from storage_svc.turns import in_turns
from tidemark.errors import DataCorrupt, QueueNotFound, RecordUnreadable, TidemarkError
from tidemark.limits import RUN_MESSAGES_MAX
from tidemark.names import topic_of
from tidemark.telemetry import counter

if TYPE_CHECKING:
    from storage_svc.operations.reserve import Reserved
    from storage_svc.operations.standing import HandedOut
    from storage_svc.partition.frames import Frame

_log = logging.getLogger(__name__)
_unreadable = counter(
    "tidemark.storage.unreadable_records",
    "Attempts to read a body that is missing or corrupt",
    zeros=[
        {"table": table.value}
        for table in (
            Table.RUN_HEADERS,
            Table.RUN_BODIES,
            Table.SCHEDULE_BODIES,
            Table.OUTBOX_BODIES,
        )
    ],
)


_fenced_calls = counter(
    "tidemark.storage.fenced_calls",
    "Operations of brokers and clients under an old epoch",
    zeros=({"holder": "broker"}, {"holder": "client"}),
)


def count_fenced(holder: Literal["broker", "client"]) -> None:
    """A broker or a client was refused because another has taken its place."""
    _fenced_calls.add(1, {"holder": holder})


def report_unreadable(table: Table, key: bytes, lmq_name: str, why: str) -> None:
    """A record that cannot be read is left out, with its key (V3)."""
    _unreadable.add(1, {"table": table.value})
    _log.warning(
        "a record cannot be read",
        extra={"table": table.value, "key": key.hex(), "queue": lmq_name, "why": why},
    )


class CommitContext:
    """One commit in the making."""

    __slots__ = (
        "_absent",
        "_catalog",
        "_names",
        "chance",
        "counters",
        "deletions_refused",
        "disk_full",
        "ended_standing",
        "engine",
        "frames",
        "handed_out",
        "handed_out_bytes",
        "handles",
        "journal",
        "now_ms",
        "partition",
        "partitions",
        "publishes_refused",
        "results",
        "started_ns",
        "state",
        "steps",
        "topics",
    )

    def __init__(
        self,
        state: PartitionState,
        partition: int,
        partitions: int,
        now_ms: int,
        frames: "Sequence[Frame]",
        started_ns: int,
        disk_full: bool,
        publishes_refused: TidemarkError | None,
        deletions_refused: TidemarkError | None,
        chance: Callable[[], float],
    ) -> None:
        # All by position: named arguments of a class are passed in a dict, for every commit.
        self.state = state
        self.engine = state.engine
        self.counters = state.counters
        self.topics = state.topics
        self.handles = state.handles
        self.journal = BatchJournal(now_ms, state.deadlines, state.counters.record)
        self.partition = partition
        self.partitions = partitions
        self.now_ms = now_ms
        self.disk_full = disk_full
        self.publishes_refused = publishes_refused
        self.deletions_refused = deletions_refused
        self._names: dict[int, str] = NO_DICT
        self._catalog: dict[str, bytes] = NO_DICT
        self._absent: set[str] = NO_SET
        self.chance = chance
        """A random number from 0 up to 1, for the jitter of retries."""
        self.handed_out_bytes = 0
        """Bodies that the answers of this commit carry."""
        self.ended_standing: list[tuple[int, bool]] = NO_LIST
        """Standing reserves that this commit ends, and whether the broker must ask again."""
        self.frames = frames
        self.steps = frames[0].steps if len(frames) == 1 else sum(each.steps for each in frames)
        """How many operations its frames count for."""
        self.results: Sequence[Sequence[Any]] = ()
        """Those of each frame, once it is applied."""
        self.handed_out: Sequence[Reserved | HandedOut] = ()
        """Results of standing reserves."""
        self.started_ns = started_ns

    def add_due(self, table: Table, due_ms: int) -> None:
        """An entry is added to an index that sweeps scan by time."""
        self.state.due.added(table, due_ms)
        # Once more after the commit: a scan in between may raise the mark past rows that it cannot
        # see.
        self.journal.add_due(table, due_ms)

    def end_standing(self, group: Group, *, ask_again: bool = False) -> None:
        """End the standing reserve of a group; `ask_again` if its broker cannot know why."""
        standing, group.standing = group.standing, None
        if standing is not None and standing.broker_epoch == self.counters.broker_epoch:
            self.ended_standing = self.ended_standing or []
            self.ended_standing.append((standing.standing_id, ask_again))

    def count(self) -> None:
        """Bring the counters to their values once this commit is durable, and write them."""
        counters, journal, state = self.counters, self.journal, self.state
        counters.commit += 1
        counters.time_ms = self.now_ms
        counters.record = journal.next_record
        counters.messages += journal.messages
        counters.body_bytes += journal.body_bytes
        counters.published += journal.published
        counters.deadlines = state.deadlines.total
        put_counters(journal.batch, counters)
        if not state.numbers.is_written:
            state.numbers.write(journal.batch)

    # --- queues --------------------------------------------------------------------------------

    async def prefetch(self, queue_ids: Sequence[int]) -> None:
        """Read names and catalog rows of queues that are not loaded, all at once."""
        wanted = [each for each in queue_ids if self.handles.loaded_name(each) is None]
        if len(wanted) < 2:
            return
        names = await self.read_names(wanted)
        keys = [queue_rows.catalog_key(name) for name in names]
        values = await self.engine.load(Table.CATALOG, keys)
        self._catalog = self._catalog or {}
        for name, value in zip(names, values, strict=True):
            if value is not None:
                self._catalog[name] = value

    async def read_names(self, queue_ids: Sequence[int]) -> list[str]:
        """The names of those queues that are not loaded; read at once, and remembered, also that
        there is none: ids are never given again."""
        wanted = [each for each in queue_ids if self.handles.loaded_name(each) is None]
        names = await self.engine.load(Table.QUEUES, [u64(each) for each in wanted])
        found = {
            queue_id: "" if name is None else name.decode()
            for queue_id, name in zip(wanted, names, strict=True)
        }
        self._names = {**self._names, **found} if self._names else found
        return [name for name in found.values() if name]

    async def read_queues(self, lmq_names: Sequence[str]) -> None:
        """Load queues with one read, or remember that there are none; nothing was applied yet.

        Queues of which more has to be read follow together."""
        wanted = [each for each in lmq_names if self.handles.peek(each) is None]
        keys = [queue_rows.catalog_key(each) for each in wanted]
        values = await self.engine.load(Table.CATALOG, keys) if keys else []
        others: dict[str, bytes] = {}
        self._absent = self._absent or set()
        async for part in in_turns(list(zip(wanted, values, strict=True))):
            for lmq_name, value in part:
                if value is None:
                    self._absent.add(lmq_name)
                elif queue_rows.is_whole(value):
                    await self.handles.load(lmq_name, self.now_ms, value)
                else:
                    others[lmq_name] = value
        await asyncio.gather(
            *(self.handles.load(name, self.now_ms, value) for name, value in others.items()),
            return_exceptions=True,
        )

    async def find_queue(self, lmq_name: str, *, briefly: bool = False) -> Handle | None:
        """The handle of a queue, loaded if need be; None if there is no such queue.

        With `briefly`, a queue that has to be loaded is unloaded after this commit.
        """
        handle = self.handles.peek(lmq_name)
        brief = self.journal.loaded_briefly
        if brief and not briefly:
            brief.discard(lmq_name)
        if handle is None and not self._is_absent(lmq_name):
            value = self._known_row(lmq_name)
            handle = await self.handles.load(lmq_name, self.now_ms, value)
            if briefly and handle is not None:
                self._note_brief(lmq_name)
        if handle is None:
            return None
        state = handle.state
        if state.record.kept and not state.rules.keeps_settled:
            await self._erase_kept(state)
        handle.used(self.now_ms)
        return handle

    def _known_row(self, lmq_name: str) -> bytes | None:
        """The row of a queue in the catalog, if this commit has it already."""
        emptied, read = self.journal.emptied, self._catalog
        row = emptied.pop(lmq_name, None) if emptied else None
        return row or (read.pop(lmq_name, None) if read else None)

    def _note_brief(self, lmq_name: str) -> None:
        journal = self.journal
        journal.loaded_briefly = journal.loaded_briefly or set()
        journal.loaded_briefly.add(lmq_name)

    def _is_absent(self, lmq_name: str) -> bool:
        return lmq_name in self.journal.removed_names or lmq_name in self._absent

    def loaded_queue(self, lmq_name: str) -> Handle | None:
        """The handle of a queue that is in use already; None does not mean that there is no queue.

        For most operations it replaces `find_queue`, without the cost of a coroutine.
        """
        handle = self.handles.peek(lmq_name)
        if handle is None or self.journal.loaded_briefly:
            return None
        state = handle.state
        if state.record.kept and not state.rules.keeps_settled:
            return None
        handle.last_used_ms = self.now_ms
        return handle

    def loaded_by_id(self, queue_id: int) -> Handle | None:
        """The same by the identity of the queue."""
        lmq_name = self.handles.loaded_name(queue_id)
        return None if lmq_name is None else self.loaded_queue(lmq_name)

    async def queue(self, lmq_name: str) -> Handle:
        """The handle of a queue that must exist."""
        handle = await self.find_queue(lmq_name)
        if handle is None:
            raise QueueNotFound(f"there is no queue {lmq_name}", queue=lmq_name)
        return handle

    async def queue_or_new(self, lmq_name: str, *, briefly: bool = False) -> Handle:
        """The handle of a queue, which is created if it does not exist."""
        handle = await self.find_queue(lmq_name, briefly=briefly)
        if handle is None:
            handle = self._create_queue(lmq_name)
            if briefly:
                self._note_brief(lmq_name)
        return handle

    async def queue_by_id(self, queue_id: int, *, briefly: bool = False) -> Handle | None:
        """The handle of a queue by its identity; None if that queue was deleted."""
        if queue_id in self.journal.removed_ids:
            return None
        lmq_name = self.handles.loaded_name(queue_id) or self._names.get(queue_id)
        if lmq_name is None:
            lmq_name = await self.handles.stored_name(queue_id)
        if not lmq_name:
            return None
        handle = await self.find_queue(lmq_name, briefly=briefly)
        return handle if handle is not None and handle.queue_id == queue_id else None

    async def reservation(
        self, queue_id: int, reservation_id: int, *, briefly: bool = False
    ) -> tuple[Handle, Reservation] | None:
        """A reservation, live or settled, with the handle of its queue; None if it is gone."""
        handle = await self.queue_by_id(queue_id, briefly=briefly)
        reservation = None if handle is None else handle.state.reservations.get(reservation_id)
        return None if handle is None or reservation is None else (handle, reservation)

    def _create_queue(self, lmq_name: str) -> Handle:
        topic = self.topics.get(topic_of(lmq_name))
        self.counters.queue_id += 1
        self.counters.queues += 1
        record = QueueRecord(self.counters.queue_id, lmq_name, self.now_ms, self.now_ms)
        self.journal.queue_created(record)
        return self.handles.create(record, topic, self.now_ms)

    async def _erase_kept(self, state: QueueState) -> None:
        """Drop runs that every group had settled before retention was switched off (R2).

        They would stay forever and count towards the quotas: no later settlement names them.
        """
        if self.state.erasures.has(state.record.queue_id, ErasureKind.SETTLED):
            return
        if await self.has_many_runs(state):
            self.begin_erasure(state.record.queue_id, ErasureKind.SETTLED)
            return
        state.erase_settled(await self.runs(state), self.journal)
        state.record.kept = False
        self.journal.queue_changed(state.record)

    def begin_erasure(self, queue_id: int, kind: ErasureKind) -> None:
        """Leave rows to be erased by later commits."""
        erasure = Erasure(queue_id, kind, NOTHING_PURGED, began_commit=self.counters.commit)
        self.state.erasures.begin(erasure, self.journal.batch)

    # --- runs ----------------------------------------------------------------------------------

    async def runs(self, state: QueueState) -> list[Run]:
        """Every run of a queue. The cost depends on their number."""
        queue_id = state.record.queue_id
        purge = self.state.erasures.purge_of(queue_id)
        deleted = self.journal.deleted
        stored: list[Run] = []
        async for page in scan_run_pages(self.engine, purge, queue_id):
            stored += [run_rows.read_run(key, value) for key, value in page if key not in deleted]
        appended = self.journal.appended.get(queue_id, [])
        if purge is not None:
            appended = [run for run in appended if not purge.covers(run.first_offset)]
        return stored + appended

    async def has_many_runs(self, state: QueueState) -> bool:
        """Whether there are too many runs to erase them in one commit."""
        limit = erasures.ERASED_AT_ONCE_MAX
        if state.record.messages <= limit:
            return False
        start, end = queue_rows.queue_range(state.record.queue_id)
        found = await self.engine.scan(Table.RUN_HEADERS, start, end, limit=limit + 1)
        return len(found) + len(self.journal.appended.get(state.record.queue_id, ())) > limit

    async def find_run(self, queue_id: int, fairness_key: str, first_offset: int) -> Run | None:
        """The header of one run; None if it is gone."""
        purge = self.state.erasures.purge_of(queue_id)
        if purge is not None and purge.covers(first_offset):
            return None
        for run in self.journal.appended.get(queue_id, ()):
            if run.first_offset == first_offset:
                return run
        key = run_rows.run_key_of(queue_id, fairness_key, first_offset)
        (value,) = await self.engine.load(Table.RUN_HEADERS, [key])
        return (
            None if value is None or key in self.journal.deleted else run_rows.read_run(key, value)
        )

    def cached_body(self, queue_id: int, run: Run) -> bytes | None:
        """The body of a run that need not be read."""
        key = run_rows.body_key(queue_id, run.first_offset)
        return self.journal.bodies.get(key) or self.state.bodies.get(key)

    async def body(self, queue_id: int, run: Run) -> bytes:
        """The body of a run: from this commit, the cache or the engine.

        Raises RecordUnreadable: read it before anything is changed (V3).
        """
        body = self.cached_body(queue_id, run)
        if body is None:
            key = run_rows.body_key(queue_id, run.first_offset)
            lmq_name = self.handles.loaded_name(queue_id)
            if run_rows.has_inline_body(run):
                header = run_rows.run_key(queue_id, run)
                body = run_rows.inline_body(
                    await self.readable(Table.RUN_HEADERS, header, lmq_name)
                )
            else:
                body = await self.readable(Table.RUN_BODIES, key, lmq_name)
            self.state.bodies.add(key, body)
        return body

    async def readable(self, table: Table, key: bytes, lmq_name: str | None) -> bytes:
        """A row that must be there; one that is not concerns its queue and nothing else (V3)."""
        why = "it is missing"
        try:
            (value,) = await self.engine.load(table, [key])
        except DataCorrupt as error:
            value, why = None, str(error)
        if value is not None:
            return value
        report_unreadable(table, key, lmq_name or "", why)
        raise RecordUnreadable(
            f"record {key.hex()} of {table.value} cannot be read: {why}",
            table=table.value,
            key=key.hex(),
            queue=lmq_name or "",
        )

    # --- lanes ---------------------------------------------------------------------------------

    async def read_lane(self, state: QueueState, group: Group, lane: Lane) -> None:
        """Feed a lane of a group its next page of headers."""
        queue_id = state.record.queue_id
        prefix = run_rows.lane_prefix(queue_id, lane.key)
        start = prefix + u64(lane.read_from)
        purge = self.state.erasures.purge_of(queue_id)
        page = await scan_runs(self.engine, purge, start, prefix_end(prefix), limit=LANE_RUNS_MAX)
        deleted = self.journal.deleted
        runs = []
        for key, value in page:
            if key in deleted:
                continue
            run = run_rows.read_run(key, value)
            runs.append(run)
            if run_rows.has_inline_body(run):  # it was read already, and is handed out next
                body_key = run_rows.body_key(queue_id, run.first_offset)
                self.state.bodies.add(body_key, run_rows.inline_body(value))
        last = len(page) < LANE_RUNS_MAX
        read_to = run_rows.read_run(*page[-1]).end if page else lane.read_from
        if last:
            runs += (
                run
                for run in self.journal.appended.get(queue_id, ())
                if run.fairness_key == lane.key
                and run.first_offset >= read_to
                and (purge is None or not purge.covers(run.first_offset))
            )
        lane.feed((run for run in runs if run.is_for(group.name)), read_to=read_to, last=last)

    async def load_lanes(self, state: QueueState, group: Group) -> None:
        """Give a group that starts, or starts over, a lane per fairness key that is stored."""
        # Nearly every queue gets its groups before its first message: there is nothing to look for.
        read_from = max(0, group.base - RUN_MESSAGES_MAX) if state.record.messages else None
        keys = dict.fromkeys(await stored_fairness_keys(self.engine, state.record))
        appended = self.journal.appended.get(state.record.queue_id, ())
        keys.update((run.fairness_key, None) for run in appended)
        for key in keys:
            group.add_lane(key, group.base, read_from)

    async def forget_lanes(self, state: QueueState) -> None:
        """Forget lanes of which no run is stored any more: fairness keys come and go."""
        appended = {
            run.fairness_key for run in self.journal.appended.get(state.record.queue_id, ())
        }
        for group in state.groups.values():
            left_over = [
                lane
                for lane in group.idle_lanes()
                if lane.key not in appended and not await self._is_stored(state.record, lane.key)
            ]
            for lane in left_over:
                self.journal.lane_removed(state.record, group, lane)
            group.forget_lanes(left_over)

    async def _is_stored(self, record: QueueRecord, fairness_key: str) -> bool:
        """Whether the engine has runs of a key; also those that this commit deletes."""
        prefix = run_rows.lane_prefix(record.queue_id, fairness_key)
        return bool(record.messages) and bool(
            await self.engine.scan(Table.RUN_HEADERS, prefix, prefix_end(prefix), limit=1)
        )
