"""Compares a partition with its model: what is in memory, what is on disk, and what is counted.

A queue is looked at twice: as its handle has it, and as it would be recovered from the engine now.
Both must agree with the model, so that a wrong row is found in the step that wrote it and not
when the partition is reopened.
"""

from storage_svc.engines import group_rows, outbox_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.age_rows import AgeKind, age_prefix, read_age
from storage_svc.engines.engine import Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.engines.history_rows import read_history
from storage_svc.engines.keys import read_text, read_u64, u64, u64x2, u64x3
from storage_svc.loading.handles import Handles
from storage_svc.operations import outbox
from storage_svc.operations.dead_letter_filter import HEADER_OFFSET, HEADER_QUEUE
from storage_svc.partition.deadlines import BUCKET_MS
from storage_svc.partition.partition import Partition
from storage_svc.queue.group import Group
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.run import Run, Slice
from storage_svc.reads import queues
from tests.model.reference.partition import PartitionModel
from tests.model.reference.queue import ModelGroup, Place, Published, QueueModel
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.names import topic_of

Standings = dict[int, tuple[Place, int, int]]
_EVERYTHING = 1_000_000


async def audit(partition: Partition, model: PartitionModel) -> None:
    """Raise AssertionError where the partition and its model differ."""
    handles = partition.state.handles
    counters = partition.state.counters
    # What no group waits for is counted until it is erased; a purge is complete before.
    await _erased(partition, ErasureKind.SETTLED)
    on_disk = Handles(partition.state.engine, partition.state.topics, partition.state.erasures)
    for queue in model.queues.values():
        recovered = await on_disk.read_state(queue.name)
        handle = handles.peek(queue.name)
        assert (handle is not None) == queue.loaded, f"{queue.name} is loaded: {not queue.loaded}"
        state = recovered if handle is None else handle.state
        _adopt_buried(state, queue, model)
        _compare_queue(state, queue, "in memory")
        _compare_queue(recovered, queue, "on disk")
    await _erased(partition, *ErasureKind)
    assert counters.queues == len(model.queues)
    assert counters.paused_queues == sum(queue.paused for queue in model.queues.values())
    catalog = await partition.state.engine.scan(Table.CATALOG, b"", None, limit=_EVERYTHING)
    stored = [queue_rows.read_queue(queue_rows.lmq_name_of(key), value) for key, value in catalog]
    assert counters.messages == sum(record.messages for record in stored)
    assert counters.body_bytes == sum(record.body_bytes for record in stored)
    assert len(handles) == sum(queue.loaded for queue in model.queues.values())
    await _compare_tables(partition, model)
    await _compare_ages(partition, model, stored)
    await _compare_records(partition, model)
    _compare_deadlines(partition, model)
    _compare_standing(partition, model)
    _no_consumer_waits_in_vain(model)


async def _erased(partition: Partition, *kinds: ErasureKind) -> None:
    """Wait until nothing of some kinds is left to erase.

    Makes no commit where there is nothing: each expires what is due, which the model would miss.
    """
    over = not any(each.kind in kinds for each in partition.state.erasures)
    while not over:
        over = not any(each.kind in kinds for each in partition.state.erasures)
        await partition.submit([])  # once more at the end: the last commit is durable then


async def compare_looks(partition: Partition, queue: QueueModel) -> None:
    """What people are shown of a queue, which wakes no queue."""
    view, views = await queues.get_queue(partition, queue.name)
    assert view.materialized == queue.loaded
    assert {each.name for each in views} == queue.groups.keys()
    for seen in views:
        group = queue.groups[seen.name]
        unsettled = group.unsettled
        assert seen.unsettled == len(unsettled)
        assert seen.cursor <= min([queue.next_offset, *unsettled])
        peeked, _ = await queues.peek(partition, queue.name, 0, _EVERYTHING, seen.name)
        assert [each.offset for each in peeked] == unsettled
        for each in peeked:
            run = group.standings[each.offset].run
            assert each.message.payload == run.payloads[each.offset - run.first_offset]


def _adopt_buried(state: QueueState, queue: QueueModel, model: PartitionModel) -> None:
    """A hand-out is free to set undeliverable messages aside that it came across."""
    max_attempts = model.settings(queue).max_attempts
    for group in queue.groups.values():
        if (queue.name, group.name) not in model.took_some:
            continue
        for start, slice_ in state.groups[group.name].buried.items():
            found = [group.standings.get(offset) for offset in range(start, slice_.end)]
            if any(each is None or each.place is not Place.READY for each in found):
                continue
            for each in found:
                assert each is not None
                assert each.undeliverable(model.now_ms, max_attempts), f"{start} was deliverable"
                each.place = Place.BURIED
            group.buried[start] = slice_.end


# --- one queue ------------------------------------------------------------------------------------


def _compare_queue(state: QueueState, queue: QueueModel, where: str) -> None:
    record = state.record
    scheduled = sum(run.messages for _, run in queue.scheduled.values())
    facts = (record.queue_id, record.next_offset, record.messages, record.body_bytes)
    expected = (
        queue.queue_id,
        queue.next_offset,
        queue.messages,
        sum(run.body_bytes for run in queue.runs.values()),
    )
    assert facts == expected, f"{queue.name} {where}: {facts} != {expected}"
    assert record.scheduled == scheduled
    assert record.paused == queue.paused, f"{queue.name} {where}"
    assert state.groups.keys() == queue.groups.keys(), f"groups of {queue.name} {where}"
    for name, model in queue.groups.items():
        _compare_group(state, state.groups[name], queue, model, f"{queue.name} {name} {where}")


def _compare_group(
    state: QueueState, group: Group, queue: QueueModel, model: ModelGroup, where: str
) -> None:
    assert group.base == model.base, where
    assert (group.owner_client_id, group.owner_epoch) == (model.owner_client_id, model.owner_epoch)
    real = _standings(group, queue, where)
    expected: Standings = {
        offset: (each.place, each.attempts, each.deliveries)
        for offset, each in model.standings.items()
        if each.place is not Place.SETTLED
    }
    assert real == expected, f"{where}: {_difference(real, expected)}"
    # Ready, reserved, delayed and buried add up with what is settled to all that was published.
    assert len(real) + group.settled == queue.next_offset - group.base, where
    live = {each.reservation_id: each for each in queue.live_of(model.name)}
    assert group.live.keys() == live.keys(), where
    for reservation_id, reservation in group.live.items():
        held = live[reservation_id]
        assert reservation.deadline_ms == held.deadline_ms, where
        assert reservation.given_messages == held.given - held.start, where
        assert state.reservations[reservation_id] is reservation, where
    outstanding: dict[int, int] = {}
    for each in model.standings.values():
        if (each.deliveries and each.place is not Place.SETTLED) or each.place is Place.BURIED:
            first = each.run.first_offset
            outstanding[first] = outstanding.get(first, 0) + 1
    assert group.outstanding == outstanding, f"{where}: {group.outstanding} != {outstanding}"
    assert group.cursor(queue.next_offset) <= min([queue.next_offset, *model.unsettled]), where
    for run in queue.runs.values():
        _compare_run(group, run, model, where)
    for key, lane in group.lanes.items():
        retries = [] if lane.retries is None else lane.retries.slices
        line = [offset for each in retries for offset in range(each.start, each.end)]
        assert line == _retries(model, key), f"{where}: retries of {key!r} in another order"


def _retries(model: ModelGroup, key: str) -> list[int]:
    """The messages of a key that go behind what is ready, in their order."""
    offsets = [
        offset
        for offset in model.in_place(Place.READY)
        if model.standings[offset].retry_of and model.standings[offset].run.fairness_key == key
    ]
    return sorted(offsets, key=lambda offset: model.standings[offset].rank(offset))


def _compare_run(group: Group, published: Published, model: ModelGroup, where: str) -> None:
    """What a group answers about a run, to those who delete runs or move them."""
    places = {offset: model.place(offset) for offset in published.offsets}
    run = Run(
        published.first_offset,
        published.messages,
        published.body_bytes,
        published.publish_time_ms,
        published.dead_deadline_ms,
        published.fairness_key,
        traceparent="",
    )
    assert group.has_settled(run) == model.has_settled(published), where
    assert group.holds(run) == (Place.RESERVED in places.values()), where
    unsettled = [at for start, end in group.unsettled_spans(run) for at in range(start, end)]
    free = [at for at, place in places.items() if place not in (Place.SETTLED, Place.RESERVED)]
    assert unsettled == free, f"{where}: {unsettled} != {free}"


def _standings(group: Group, queue: QueueModel, where: str) -> Standings:
    """Where every message is that has a place, with attempts and deliveries."""
    found: Standings = {}

    def put(place: Place, slice_: Slice, start: int, end: int) -> None:
        for offset in range(start, end):
            assert offset not in found, f"{where}: {offset} is in two places"
            found[offset] = (place, slice_.attempts, slice_.deliveries)

    for reservation in group.live.values():
        for start, end in reservation.open:
            put(Place.RESERVED, reservation.slice, start, end)
    for delayed in group.delayed.values():
        put(Place.DELAYED, delayed.slice, delayed.slice.start, delayed.slice.end)
    for slice_ in group.buried.values():
        put(Place.BURIED, slice_, slice_.start, slice_.end)
    for key, lane in group.lanes.items():
        for slice_ in lane.all_returned:
            put(Place.READY, slice_, slice_.start, slice_.end)
        if not lane.drained and not lane.holding:
            assert key in group.ring, f"{where}: lane {key!r} has messages and no turn"
    for run in queue.runs.values():
        fresh = group.lanes.get(run.fairness_key)
        if fresh is None:
            continue
        at_hand = any(each.first_offset == run.first_offset for each in fresh.fresh)
        if at_hand or (fresh.unread and run.first_offset >= fresh.read_from):
            for offset in range(max(fresh.position, run.first_offset), run.end):
                assert offset not in found, f"{where}: {offset} is in two places"
                found[offset] = (Place.READY, 0, 0)
    return found


def _difference(real: Standings, expected: Standings) -> str:
    return ", ".join(
        f"{offset} is {real.get(offset)} and should be {expected.get(offset)}"
        for offset in sorted(real.keys() | expected.keys())
        if real.get(offset) != expected.get(offset)
    )


# --- tables ---------------------------------------------------------------------------------------


async def _keys(partition: Partition, table: Table) -> set[bytes]:
    found = await partition.state.engine.scan(table, b"", None, limit=_EVERYTHING)
    return {key for key, _ in found}


async def _compare_tables(partition: Partition, model: PartitionModel) -> None:
    """Every row belongs to something, and everything has its rows."""
    expected: dict[Table, set[bytes]] = {table: set() for table in _COMPARED}
    groups: set[bytes] = set()
    reservations: set[bytes] = set()
    forgettable: set[bytes] = set()
    parts: dict[Table, set[bytes]] = {Table.RETURNED: set()}
    for queue in model.queues.values():
        queue_id = queue.queue_id
        expected[Table.CATALOG].add(queue_rows.catalog_key(queue.name))
        expected[Table.QUEUES].add(u64(queue_id))
        for run in queue.runs.values():
            first = run.first_offset
            expected[Table.RUN_HEADERS].add(run_rows.run_key_of(queue_id, run.fairness_key, first))
            if run.body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
                expected[Table.RUN_BODIES].add(u64x2(queue_id, first))
            if run.dead_deadline_ms:
                expected[Table.TTL].add(u64x3(run.dead_deadline_ms, queue_id, first))
        for schedule_id, (due_ms, _) in queue.scheduled.items():
            expected[Table.SCHEDULE].add(u64x2(due_ms, schedule_id))
            expected[Table.SCHEDULED].add(u64x2(queue_id, schedule_id))
            expected[Table.SCHEDULE_BODIES].add(u64(schedule_id))
        for each in queue.reservations.values():
            key = reservation_rows.reservation_key(queue_id, each.reservation_id)
            (forgettable if each.fading or each.forgotten else reservations).add(key)
            if each.live:
                deadline = reservation_rows.deadline_key(
                    each.deadline_ms, queue_id, each.reservation_id
                )
                expected[Table.DEADLINES].add(deadline)
        for group in queue.groups.values():
            groups.add(group_rows.group_key(queue_id, group.name))
            came_back = [o for o in group.in_place(Place.READY) if group.standings[o].deliveries]
            for start, end in group.slices(came_back):
                expected[Table.RETURNED].add(group_rows.returned_key(queue_id, group.name, start))
                # Neighbours that were first delivered at other times are stored apart. That they
                # do not overlap shows what is recovered from them.
                parts[Table.RETURNED].update(
                    group_rows.returned_key(queue_id, group.name, offset)
                    for offset in range(start + 1, end)
                )
            for start, (_, at_ms) in group.delayed.items():
                expected[Table.RETURNED].add(group_rows.returned_key(queue_id, group.name, start))
                expected[Table.DELAYS].add(group_rows.delay_key(queue_id, group.name, start, at_ms))
            for start in group.buried:
                expected[Table.RETURNED].add(group_rows.returned_key(queue_id, group.name, start))
                expected[Table.BURIED].add(group_rows.returned_key(queue_id, group.name, start))
    for table, keys in expected.items():
        real = await _keys(partition, table)
        surplus, missing = sorted(real - keys - parts.get(table, set())), sorted(keys - real)
        assert not surplus, f"{table.value} has rows that belong to nothing: {surplus}"
        assert not missing, f"{table.value} lacks rows: {missing}"
    stored_groups, stored_reservations = await _inline_or_apart(partition)
    assert stored_groups == sorted(groups), "each group is stored once"
    assert len(set(stored_reservations)) == len(stored_reservations), "each is stored once"
    assert set(stored_reservations) - forgettable == reservations
    for key in await _keys(partition, Table.LANES):
        group_key = key[: read_text(key, 8)[1]]
        assert group_key in groups, f"a lane is left of a group: {key.hex()}"


async def _inline_or_apart(partition: Partition) -> tuple[list[bytes], list[bytes]]:
    """Keys of all groups and reservations, in the rows of their queues or in rows of their own."""
    groups = list(await _keys(partition, Table.GROUPS))
    reservations = list(await _keys(partition, Table.RESERVATIONS))
    settled: list[tuple[bytes, bytes]] = []
    engine = partition.state.engine
    for _, value in await engine.scan(Table.CATALOG, b"", None, limit=_EVERYTHING):
        inline = queue_rows.read_inline(value)
        groups += [key for key, _ in inline.groups]
        reservations += [key for key, _ in inline.held]
        settled.append((value[:8], inline.settled))
    for key, value in await engine.scan(Table.SETTLED, b"", None, limit=_EVERYTHING):
        settled.append((key[:8], value))
    any_run = Run(0, 1, 0, 0, 0, "", "")
    reservations += [
        queue + u64(each.reservation_id)
        for queue, value in settled
        for each in reservation_rows.read_settled(value, any_run)
    ]
    return sorted(groups), reservations


_COMPARED = (
    Table.CATALOG,
    Table.QUEUES,
    Table.RUN_HEADERS,
    Table.RUN_BODIES,
    Table.RETURNED,
    Table.BURIED,
    Table.DELAYS,
    Table.DEADLINES,
    Table.SCHEDULE,
    Table.SCHEDULED,
    Table.SCHEDULE_BODIES,
    Table.TTL,
)


async def _compare_ages(
    partition: Partition, model: PartitionModel, stored: list[QueueRecord]
) -> None:
    """No message is older than the bound of its kind, and every bound has its row.

    A queue with groups has a bound for these.
    """
    expected: list[tuple[bytes, int, int]] = []
    for record in stored:
        queue = model.queues[record.lmq_name]
        for run in queue.runs.values():
            groups = queue.groups.values()
            settled = bool(groups) and all(group.has_settled(run) for group in groups)
            bound_ms = record.settled_since_ms if settled else record.waiting_since_ms
            assert 0 < bound_ms <= max(1, run.publish_time_ms), f"{queue.name}: {run}, {record}"
        if not queue.runs and not queue.scheduled:
            assert 0 < record.idle_since_ms <= max(1, record.last_activity_ms), record
        assert record.groups_since_ms or not queue.groups, record
        topic = topic_of(record.lmq_name)
        for kind, of_topic, time_ms in (
            (AgeKind.WAITING, topic, record.waiting_since_ms),
            (AgeKind.SETTLED, topic, record.settled_since_ms),
            (AgeKind.IDLE, "", record.idle_since_ms),
            (AgeKind.GROUPS, topic, record.groups_since_ms),
        ):
            if time_ms:
                expected.append((age_prefix(kind, of_topic), time_ms, record.queue_id))
    rows = await partition.state.engine.scan(Table.AGES, b"", None, limit=_EVERYTHING)
    found = [(key[:-16], read_age(key, value)) for key, value in rows]
    assert all(row.queue_ids for _, row in found)
    entries = [(prefix, row.time_ms, each) for prefix, row in found for each in row.queue_ids]
    assert sorted(entries) == sorted(expected)


async def _compare_records(partition: Partition, model: PartitionModel) -> None:
    """Outbox, history and consumption records count each message that left once."""
    engine = partition.state.engine
    entries = await engine.scan(Table.OUTBOX, b"", None, limit=_EVERYTHING)
    stored = await engine.scan(Table.OUTBOX_BODIES, b"", None, limit=_EVERYTHING)
    assert len(entries) == len(stored) == len(model.outbox)
    bodies = {read_u64(key): body for key, body in stored}
    for key, value in entries:
        _, sequence = outbox_rows.read_outbox_key(key)
        entry = outbox.decode(key, value, bodies[sequence])
        dead = model.outbox[entry.sequence]
        messages = MessageBatch.FromString(entry.body).messages
        assert tuple(each.payload for each in messages) == dead.payloads
        assert (entry.reason, entry.fairness_key) == (dead.reason, dead.fairness_key)
        for offset, message in enumerate(messages, dead.first_offset):
            assert message.headers[HEADER_QUEUE] == dead.lmq_name
            assert message.headers[HEADER_OFFSET] == str(offset)
    deleted: dict[str, int] = {}
    for row in await engine.scan(Table.HISTORY, b"", None, limit=_EVERYTHING):
        for lmq_name, count, _ in read_history(*row).queues:
            deleted[lmq_name] = deleted.get(lmq_name, 0) + count
    assert deleted == model.deleted
    consumed: dict[tuple[int, str, int], int] = {}
    for _, value in await engine.scan(Table.CONSUMED, b"", None, limit=_EVERYTHING):
        for each in run_rows.read_consumed(value):
            for offset in range(each.start, each.end):
                row_of = (each.queue_id, each.group, offset)
                consumed[row_of] = consumed.get(row_of, 0) + 1
    assert consumed == model.consumed


# --- counts and events ----------------------------------------------------------------------------


def _compare_deadlines(partition: Partition, model: PartitionModel) -> None:
    deadlines = [
        *(each.deadline_ms for queue in model.queues.values() for each in queue.live),
        *(
            at_ms
            for queue in model.queues.values()
            for group in queue.groups.values()
            for _, at_ms in group.delayed.values()
        ),
    ]
    assert partition.reservations == len(deadlines)
    next_ms = partition.next_deadline_ms
    if not deadlines:
        assert next_ms is None
    else:
        assert next_ms is not None
        assert min(deadlines) <= next_ms <= min(deadlines) + BUCKET_MS


def _compare_standing(partition: Partition, model: PartitionModel) -> None:
    groups = [group for handle in partition.state.handles for group in handle.state.groups.values()]
    stands = {
        each.standing.standing_id: each.standing.messages_max for each in groups if each.standing
    }
    assert stands == {number: each.left for number, each in model.standing.items()}


def _no_consumer_waits_in_vain(model: PartitionModel) -> None:
    """A consumer that asked for more than there was gets a notice when there is more."""
    for queue in model.queues.values():
        max_attempts = model.settings(queue).max_attempts
        for group in queue.groups.values():
            if (queue.name, group.name) in model.told:
                group.waits = False
            ready = group.deliverable(model.now_ms, max_attempts)
            waits = group.waits and not queue.paused
            assert not (waits and ready), f"{queue.name} {group.name} was not told of {ready}"
