"""The journal of one commit: turns changes of queue states into one engine batch.

Owns the state of a single commit: the batch, records that changed several times and are written
once, bodies that are not yet in the engine, and events to report once the commit is durable.
"""

from collections.abc import Iterable, Sequence

from storage_svc.empty_containers import NO_DICT, NO_LIST, NO_SET
from storage_svc.engines import group_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.engine import Batch, Engine, Row, Table
from storage_svc.engines.history_rows import Removals, history_values, index_keys
from storage_svc.engines.keys import read_u64, u64, u64x2
from storage_svc.partition.age_journal import AgeJournal, moved_bounds
from storage_svc.partition.deadlines import Deadlines
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Reservation, Span
from storage_svc.queue.returned import Returned, ReturnPlace
from storage_svc.queue.run import Run, Slice

CONSUMED_PER_ROW_MAX = 64
"""Settled ranges that share a row: a reader decodes a chunk of rows at a time."""

QueueGroup = tuple[str, str]
"""lmq_name and group."""


class BatchJournal:
    """Implements `queue.record.Journal` for one commit of one partition."""

    __slots__ = (
        "_consumed",
        "_deadlines",
        "_groups",
        "_queues",
        "added_due",
        "age_entries",
        "appended",
        "batch",
        "bodies",
        "body_bytes",
        "changed_queues",
        "deleted",
        "deleted_bodies",
        "emptied",
        "erased_rows",
        "expired",
        "high_water",
        "loaded_briefly",
        "messages",
        "next_record",
        "now_ms",
        "published",
        "ready_queues",
        "removals",
        "removed_ids",
        "removed_names",
    )

    def __init__(self, now_ms: int, deadlines: Deadlines, next_record: int) -> None:
        self.now_ms = now_ms
        self.batch = Batch()
        self.ready_queues: dict[QueueGroup, None] = {}
        self.bodies: dict[bytes, bytes] = {}
        self.appended: dict[int, list[Run]] = {}
        """Runs of this commit by queue: headers that cannot be read yet."""
        self.deleted: set[bytes] = set()
        """Keys of headers that can still be read, but not after this commit."""
        self.deleted_bodies: list[bytes] = []
        self.erased_rows: set[tuple[Table, bytes]] = set()
        """Rows that can still be read, but not after this commit: see `erase`."""
        self.removals: Removals = NO_DICT
        """Data that this commit removes for good, for the history."""
        self.high_water: dict[tuple[int, str], int] = NO_DICT
        """Marks of outbox sources that this commit raised."""
        self.expired: list[int] = NO_LIST
        """Reservations that end with this commit without being settled: those that expire, and
        those of a queue or a group that is deleted or moved."""
        self.changed_queues: set[int] = set()
        """Queues that this commit changes: their rows in the engine are out of date."""
        self.emptied: dict[str, bytes] = NO_DICT
        """Queues that this commit empties without loading them: their rows of the catalog."""
        self.removed_names: set[str] = NO_SET
        self.removed_ids: set[int] = NO_SET
        self.added_due: list[tuple[Table, int]] = NO_LIST
        """Entries that this commit added to indexes which sweeps read, by the time they are due."""
        self.loaded_briefly: set[str] = NO_SET
        """Queues that a pass or a sweep has loaded for this commit; they are unloaded after it."""
        self.messages = 0
        """By how much this commit changes the number of stored messages."""
        self.body_bytes = 0
        """By how much this commit changes the bytes of those."""
        self.published = 0
        """Messages that join a queue with this commit."""
        self.next_record = next_record
        """Number of the next consumption or history row: makes rows of one moment distinct."""
        self._deadlines = deadlines
        self.age_entries: AgeJournal | None = None
        """Entries of the index of ages that change: most commits change none."""
        self._queues: dict[int, QueueRecord] = {}
        self._groups: dict[tuple[int, str], Group] = NO_DICT
        self._consumed: list[bytes] = []

    @property
    def ages(self) -> AgeJournal:
        """The same, to be added to."""
        if self.age_entries is None:
            self.age_entries = AgeJournal()
        return self.age_entries

    def finish(self) -> bool:
        """Add the records that changed to the batch; False if rows of the index of ages have to be
        read first: then call `finish_ages`."""
        batch = self.batch
        records = self._queues.values()
        moved = moved_bounds(records)
        if moved:
            self.ages.follow(moved)
        for record in records:
            batch.put(
                Table.CATALOG,
                queue_rows.catalog_key(record.lmq_name),
                queue_rows.queue_value(record),
            )
        if self._groups:
            for (queue_id, name), group in self._groups.items():
                batch.put(
                    Table.GROUPS,
                    group_rows.group_key(queue_id, name),
                    group_rows.group_value(group),
                )
        if self._consumed:
            for at in range(0, len(self._consumed), CONSUMED_PER_ROW_MAX):
                entries = self._consumed[at : at + CONSUMED_PER_ROW_MAX]
                batch.put(Table.CONSUMED, self.record_key(), run_rows.consumed_value(entries))
        if self.removals:
            self._put_history()
        return self.age_entries is None

    async def finish_ages(self, engine: Engine) -> None:
        """Add the entries of the index of ages."""
        if self.age_entries is not None:
            await self.age_entries.write(engine, self.batch, self._next_number)

    def _put_history(self) -> None:
        for (topic, kind, pass_id), queues in self.removals.items():
            for value in history_values(topic, kind, pass_id, queues):
                key = self.record_key()
                self.batch.put(Table.HISTORY, key, value)
                for index_key in index_keys(topic, pass_id, key):
                    self.batch.put(Table.HISTORY_INDEX, index_key, b"")

    def puts_in(self, table: Table, start: bytes, end: bytes) -> list[Row]:
        """Rows of a range within one queue that this commit has put.

        Walks over the whole batch where the commit has changed the queue: for deleting whole queues
        and groups.
        """
        if read_u64(start) not in self.changed_queues:
            return []
        return [
            (key, value)
            for where, key, value, _ in self.batch.operations
            if where is table and value is not None and start <= key < end
        ]

    def erase(self, table: Table, key: bytes) -> None:
        """Delete a row that others must not find again in this commit."""
        self.batch.delete(table, key)
        self.erased_rows.add((table, key))

    # --- queues and groups ---------------------------------------------------------------------

    def queue_created(self, record: QueueRecord) -> None:
        self.batch.put(Table.QUEUES, u64(record.queue_id), record.lmq_name.encode())
        self.queue_changed(record)

    def queue_changed(self, record: QueueRecord) -> None:
        queue_id = record.queue_id
        if self._queues.get(queue_id) is not record:  # most operations change it several times
            self._queues[queue_id] = record
            self.changed_queues.add(queue_id)

    def queue_removed(self, record: QueueRecord) -> None:
        self.removed_names = self.removed_names or set()
        self.removed_names.add(record.lmq_name)
        self.removed_ids = self.removed_ids or set()
        self.removed_ids.add(record.queue_id)
        self.messages -= record.messages
        self.body_bytes -= record.body_bytes
        self._queues.pop(record.queue_id, None)
        for key in [key for key in self._groups if key[0] == record.queue_id]:
            del self._groups[key]
        self.ages.forget(record)
        self.batch.delete(Table.QUEUES, u64(record.queue_id))
        self.batch.delete(Table.CATALOG, queue_rows.catalog_key(record.lmq_name))

    def group_changed(self, record: QueueRecord, group: Group) -> None:
        if record.groups_apart:
            self.changed_queues.add(record.queue_id)
            self._groups = self._groups or {}
            self._groups[record.queue_id, group.name] = group
            return
        self.queue_changed(record)
        if len(record.groups) > queue_rows.GROUPS_INLINE_MAX:
            record.groups_apart = True
            self._groups = self._groups or {}
            for each in record.groups.values():
                self._groups[record.queue_id, each.name] = each

    def group_removed(self, record: QueueRecord, group: Group) -> None:
        self.queue_changed(record)
        if record.groups_apart:
            if self._groups:
                self._groups.pop((record.queue_id, group.name), None)
            self.batch.delete(Table.GROUPS, group_rows.group_key(record.queue_id, group.name))

    def lane_moved(self, record: QueueRecord, group: Group, lane: Lane) -> None:
        self.changed_queues.add(record.queue_id)
        if lane.key:
            key = group_rows.lane_key(record.queue_id, group.name, lane.key)
            self.batch.put(Table.LANES, key, group_rows.lane_value(lane))
        else:
            self.group_changed(record, group)

    def lane_removed(self, record: QueueRecord, group: Group, lane: Lane) -> None:
        self.changed_queues.add(record.queue_id)
        self.batch.delete(Table.LANES, group_rows.lane_key(record.queue_id, group.name, lane.key))

    # --- runs ----------------------------------------------------------------------------------

    def put_run(self, record: QueueRecord, run: Run, body: bytes) -> None:
        queue_id, messages, body_bytes = record.queue_id, run.messages, run.body_bytes
        key = run_rows.body_key(queue_id, run.first_offset)
        self.batch.put(
            Table.RUN_HEADERS, run_rows.run_key(queue_id, run), run_rows.run_value(run, body)
        )
        if body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
            self.batch.put(Table.RUN_BODIES, key, body)
        self.bodies[key] = body
        appended = self.appended.get(queue_id)
        if appended is None:
            self.appended[queue_id] = [run]
        else:
            appended.append(run)
        self.messages += messages
        self.body_bytes += body_bytes
        self.published += messages
        if run.dead_deadline_ms:
            self.batch.put(Table.TTL, run_rows.ttl_key(queue_id, run), run.fairness_key.encode())

    def delete_runs(self, record: QueueRecord, runs: Sequence[Run]) -> None:
        """Runs of one lane."""
        if len(runs) == 1:
            self._delete_run(record.queue_id, runs[0])
            return
        queue_id = record.queue_id
        lane, queue = run_rows.lane_prefix(queue_id, runs[0].fairness_key), u64(queue_id)
        offsets = [u64(run.first_offset) for run in runs]
        headers = [lane + offset for offset in offsets]
        bodies = [queue + offset for offset in offsets]
        self.deleted.update(headers)
        self.deleted_bodies += bodies
        self.batch.delete_all(Table.RUN_HEADERS, headers)
        for key, run in zip(bodies, runs, strict=True):
            if run.body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
                self.batch.delete(Table.RUN_BODIES, key)
            self.messages -= run.messages
            self.body_bytes -= run.body_bytes
            if run.dead_deadline_ms:
                self.batch.delete(Table.TTL, run_rows.ttl_key(queue_id, run))
        if queue_id in self.appended:
            for key, run in zip(bodies, runs, strict=True):
                if self.bodies.pop(key, None) is not None:
                    self.appended[queue_id].remove(run)

    def _delete_run(self, queue_id: int, run: Run) -> None:
        """Delete one run, as most settlements do: quicker than the path for many."""
        header = run_rows.run_key(queue_id, run)
        body = run_rows.body_key(queue_id, run.first_offset)
        batch = self.batch
        batch.delete(Table.RUN_HEADERS, header)
        if run.body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
            batch.delete(Table.RUN_BODIES, body)
        if run.dead_deadline_ms:
            batch.delete(Table.TTL, run_rows.ttl_key(queue_id, run))
        self.deleted.add(header)
        self.deleted_bodies.append(body)
        self.messages -= run.messages
        self.body_bytes -= run.body_bytes
        if self.bodies and self.bodies.pop(body, None) is not None:
            self.appended[queue_id].remove(run)

    def purged(self, messages: int, body_bytes: int) -> None:
        """Count messages that are gone, whose rows are erased by later commits."""
        self.messages -= messages
        self.body_bytes -= body_bytes

    # --- reservations --------------------------------------------------------------------------

    def put_reservation(self, record: QueueRecord, reservation: Reservation) -> None:
        """Most reservations are part of the row of their queue, which changes with them anyway."""
        reservation_id = reservation.reservation_id
        if reservation.open and queue_rows.fits_inline(record, reservation):
            record.held[reservation_id] = reservation
            self.queue_changed(record)
            return
        was_held = record.held.pop(reservation_id, None) is not None
        if was_held and not reservation.open and len(reservation.done) == 1:
            self._add_settled(record, reservation)
            self.queue_changed(record)
            return
        reservation.apart = True
        if was_held or not record.reserved:
            record.reserved = True
            self.queue_changed(record)
        self.changed_queues.add(record.queue_id)
        key = reservation_rows.reservation_key(record.queue_id, reservation_id)
        self.batch.put(Table.RESERVATIONS, key, reservation_rows.reservation_value(reservation))

    def forget_oldest_settled(self, record: QueueRecord, reservation: Reservation) -> None:
        """A row of several goes with the last of them: its first ones may come back after a
        restart, which does no harm."""
        if reservation.apart:
            self._delete_reservation(record, reservation)
        elif record.settled_rows:
            (last, remembered), *later = record.settled_rows
            if remembered > 1:
                record.settled_rows = ((last, remembered - 1), *later)
            else:
                self.batch.delete(
                    Table.SETTLED, reservation_rows.reservation_key(record.queue_id, last)
                )
                record.settled_rows = tuple(later)

    def replace_settled(
        self, record: QueueRecord, gone: Sequence[Reservation], kept: Sequence[Reservation]
    ) -> None:
        """Forget settled reservations that are not the oldest; all others are written again."""
        for reservation in gone:
            if reservation.apart:
                self._delete_reservation(record, reservation)
        self._delete_settled_rows(record)
        record.settled, record.settled_count = b"", 0
        for reservation in kept:
            if not reservation.apart:
                self._add_settled(record, reservation)
        self.queue_changed(record)

    def unload_settled(self, record: QueueRecord, settled: Sequence[Reservation]) -> None:
        """Delete the rows of settled reservations. Those in the row of the queue stay there until
        it is written again: an idle queue is unloaded without writing anything."""
        for reservation in settled:
            if reservation.apart:
                self._delete_reservation(record, reservation)
        self._delete_settled_rows(record)
        if record.reserved:
            record.reserved = False
            self.queue_changed(record)

    def _add_settled(self, record: QueueRecord, reservation: Reservation) -> None:
        record.settled += reservation_rows.settled_entry(reservation)
        record.settled_count += 1
        if record.settled_count >= queue_rows.SETTLED_INLINE_MAX:
            last = reservation.reservation_id
            self.batch.put(
                Table.SETTLED,
                reservation_rows.reservation_key(record.queue_id, last),
                record.settled,
            )
            record.settled_rows += ((last, record.settled_count),)
            record.settled, record.settled_count = b"", 0
            record.reserved = True

    def _delete_settled_rows(self, record: QueueRecord) -> None:
        for last, _ in record.settled_rows:
            self.batch.delete(
                Table.SETTLED, reservation_rows.reservation_key(record.queue_id, last)
            )
        record.settled_rows = ()

    def _delete_reservation(self, record: QueueRecord, reservation: Reservation) -> None:
        key = reservation_rows.reservation_key(record.queue_id, reservation.reservation_id)
        self.batch.delete(Table.RESERVATIONS, key)

    def put_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        deadline_ms = reservation.deadline_ms
        self._deadlines.add(deadline_ms)
        key = reservation_rows.deadline_key(
            deadline_ms, record.queue_id, reservation.reservation_id
        )
        if self.erased_rows:
            self.erased_rows.discard((Table.DEADLINES, key))
        self.batch.put(Table.DEADLINES, key, u64(reservation.broker_incarnation))

    def delete_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        deadline_ms = reservation.deadline_ms
        self._deadlines.discard(deadline_ms)
        key = reservation_rows.deadline_key(
            deadline_ms, record.queue_id, reservation.reservation_id
        )
        self.erase(Table.DEADLINES, key)

    def forget_deadline(self, table: Table, key: bytes, time_ms: int) -> None:
        """Delete an entry of the deadline or delay index whose record is gone."""
        self._deadlines.discard(time_ms)
        self.erase(table, key)

    # --- returned slices -----------------------------------------------------------------------

    def put_returned(self, record: QueueRecord, group: Group, returned: Returned) -> None:
        self.changed_queues.add(record.queue_id)
        start = returned.slice.start
        key = group_rows.returned_key(record.queue_id, group.name, start)
        self.batch.put(Table.RETURNED, key, group_rows.returned_value(returned))
        if returned.place is ReturnPlace.BURIED:
            self.batch.put(Table.BURIED, key, b"")
            self.add_due(Table.BURIED, self.now_ms)
        elif returned.not_before_ms:
            self._deadlines.add(returned.not_before_ms)
            at_ms = returned.not_before_ms
            delay = group_rows.delay_key(record.queue_id, group.name, start, at_ms)
            self.erased_rows.discard((Table.DELAYS, delay))
            self.batch.put(Table.DELAYS, delay, b"")

    def delete_returned(
        self, record: QueueRecord, group: Group, start: int, not_before_ms: int = 0
    ) -> None:
        key = group_rows.returned_key(record.queue_id, group.name, start)
        self.batch.delete(Table.RETURNED, key)
        self.batch.delete(Table.BURIED, key)
        if not_before_ms:
            self._deadlines.discard(not_before_ms)
            delay = group_rows.delay_key(record.queue_id, group.name, start, not_before_ms)
            self.erase(Table.DELAYS, delay)

    # --- records and events --------------------------------------------------------------------

    def consumed(self, record: QueueRecord, group: str, span: Span, slice_: Slice) -> None:
        times_ms = slice_.run.publish_time_ms, slice_.first_delivery_ms
        self._consumed.append(run_rows.consumed_entry(record, group, *span, *times_ms))

    def removals_of(self, topic: str, kind: str, pass_id: str) -> dict[str, tuple[int, int]]:
        """Messages and bytes that this commit removes of each queue of a topic; to be added to."""
        self.removals = self.removals or {}
        return self.removals.setdefault((topic, kind, pass_id), {})

    def add_expired(self, reservation_ids: Iterable[int]) -> None:
        self.expired = self.expired or []
        self.expired += reservation_ids

    def add_due(self, table: Table, due_ms: int) -> None:
        self.added_due = self.added_due or []
        self.added_due.append((table, due_ms))

    def raise_mark(self, source: tuple[int, str], sequence: int) -> None:
        self.high_water = self.high_water or {}
        self.high_water[source] = sequence

    def record_key(self) -> bytes:
        """A key in time order for a row of history or consumption."""
        return u64x2(self.now_ms, self._next_number())

    def _next_number(self) -> int:
        self.next_record += 1
        return self.next_record

    def ready(self, record: QueueRecord, group: Group) -> None:
        self.ready_queues[record.lmq_name, group.name] = None

    def cancel_ready(self, record: QueueRecord, group: Group) -> None:
        """The consumers that waited ask again in this very commit: they need no notice."""
        self.ready_queues.pop((record.lmq_name, group.name), None)
