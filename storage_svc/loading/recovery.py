"""Recovery: the state of one queue, rebuilt from the engine.

Reads headers of live messages, page by page, and never a body, so that the cost of loading a queue
depends on the messages in flight and not on its backlog. A record whose run or group is gone is
left out and reported.
"""

import logging
from collections.abc import Callable, Iterable

from storage_svc.engines import group_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.engine import Engine, Reader, Row, Table
from storage_svc.engines.keys import prefix_end, read_u64
from storage_svc.engines.paging import scan_all, scan_pages
from storage_svc.partition.erasures import Erasures
from storage_svc.queue.purge import PurgeMark
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord, Rules
from storage_svc.queue.reservation import Reservation
from storage_svc.queue.run import Run
from storage_svc.queue.settled import SettledBudget
from tidemark.limits import RUN_MESSAGES_MAX
from tidemark.telemetry import counter

OnOrphan = Callable[[Table, bytes], None]
"""Called with the key of a record whose run or group is gone."""

_UNREAD_RUN = Run(0, 0, 0, 0, 0, "", "")
"""Stands for the run of a settled reservation, which may be deleted."""

_log = logging.getLogger(__name__)
_corrupt_records = counter(
    "tidemark.storage.corrupt_records",
    "Records that were left out at recovery",
    zeros=[{"table": table.value} for table in (Table.RESERVATIONS, Table.RETURNED)],
)


def report_orphan(table: Table, key: bytes) -> None:
    """An orphan in the engine is corruption: it is left out, and the rest is loaded (V3)."""
    _corrupt_records.add(1, {"table": table.value})
    _log.warning("a record was left out", extra={"table": table.value, "key": key.hex()})


def ignore_orphan(table: Table, key: bytes) -> None:
    """A read beside the writer may see a record whose run was deleted between two reads."""


async def recover_queue(
    engine: Engine,
    lmq_name: str,
    catalog_value: bytes,
    rules: Rules,
    budget: SettledBudget,
    on_orphan: OnOrphan,
    erasures: Erasures,
) -> QueueState:
    """The state of a queue, from its row of the catalog."""
    record = queue_rows.read_queue(lmq_name, catalog_value)
    state = QueueState(record, rules, budget)
    inline = queue_rows.read_inline(catalog_value)
    start, end = queue_rows.queue_range(record.queue_id)
    # By group and fairness key: where a lane continues (`Lane.mark`). A group's row has the mark of
    # its lane without a key.
    marks: dict[tuple[str, str], tuple[int, int]] = {}
    stored = inline.groups
    if record.groups_apart:
        stored = [row async for row in scan_all(engine, Table.GROUPS, start, end)]
    for key, value in stored:
        group, mark = group_rows.read_group(key, value)
        group.ring.weights = rules.weights
        state.groups[group.name] = group
        marks[group.name, ""] = mark
    if not state.groups:
        return state  # lanes, reservations and returned slices belong to groups
    if record.keyed:
        async for key, value in scan_all(engine, Table.LANES, start, end):
            group_name, fairness_key, mark = group_rows.read_lane(key, value)
            marks[group_name, fairness_key] = mark
    for fairness_key in await stored_fairness_keys(engine, record) if record.keyed else ("",):
        for group in state.groups.values():
            run_start, position = marks.get((group.name, fairness_key), (0, group.base))
            # A run that begins before the base may reach beyond it.
            if run_start <= group.base:
                run_start = max(0, group.base - RUN_MESSAGES_MAX)
            # An empty queue keeps its marks, and has nothing to read.
            read_from = run_start if record.messages else None
            group.add_lane(fairness_key, position, read_from)
    if record.reserved or inline.held:
        await _recover_reservations(engine, state, inline.held, on_orphan)
    record.settled = inline.settled
    record.settled_count = _recover_settled(state, inline.settled)
    if record.returned:
        await _recover_returned(engine, state, on_orphan, erasures.purge_of(record.queue_id))
    return state


async def _recover_reservations(
    engine: Engine, state: QueueState, held: list[Row], on_orphan: OnOrphan
) -> None:
    record = state.record
    for reservation in await _recover_page(engine, state, held, on_orphan):
        record.held[reservation.reservation_id] = reservation
    if record.reserved:
        start, end = queue_rows.queue_range(record.queue_id)
        async for page in scan_pages(engine, Table.RESERVATIONS, start, end):
            for reservation in await _recover_page(engine, state, page, on_orphan):
                reservation.apart = True
        async for key, value in scan_all(engine, Table.SETTLED, start, end):
            record.settled_rows += ((read_u64(key, 8), _recover_settled(state, value)),)


async def _recover_page(
    engine: Engine, state: QueueState, page: list[Row], on_orphan: OnOrphan
) -> list[Reservation]:
    """Reservations as they are stored, without those whose run or group is gone."""
    run_keys = {
        key: reservation_rows.reservation_run_key(key, value)
        for key, value in page
        if reservation_rows.is_live(value)
    }
    headers = await _load_headers(engine, run_keys.values())
    recovered = []
    for key, value in page:
        run = _UNREAD_RUN
        if key in run_keys:
            run_key = run_keys[key]
            header = headers[run_key]
            if header is None:
                on_orphan(Table.RESERVATIONS, key)
                continue
            run = run_rows.read_run(run_key, header)
        reservation = reservation_rows.read_reservation(key, value, run)
        if reservation.group not in state.groups:
            on_orphan(Table.RESERVATIONS, key)
            continue
        state.recover_reservation(reservation)
        if reservation.live:
            state.groups[reservation.group].count_outstanding(run, reservation.open_messages)
        recovered.append(reservation)
    return recovered


async def _load_headers(engine: Engine, run_keys: Iterable[bytes]) -> dict[bytes, bytes | None]:
    keys = list(dict.fromkeys(run_keys))
    return dict(zip(keys, await engine.load(Table.RUN_HEADERS, keys), strict=True)) if keys else {}


def _recover_settled(state: QueueState, value: bytes) -> int:
    """Add settled reservations that share a row; returns how many there are."""
    count = 0
    for reservation in reservation_rows.read_settled(value, _UNREAD_RUN):
        state.recover_reservation(reservation)
        count += 1
    return count


async def _recover_returned(
    engine: Engine, state: QueueState, on_orphan: OnOrphan, purge: PurgeMark | None
) -> None:
    start, end = queue_rows.queue_range(state.record.queue_id)
    async for page in scan_pages(engine, Table.RETURNED, start, end):
        if purge is not None:
            page = [row for row in page if not purge.covers(group_rows.returned_times(row[1])[0])]
        run_keys = [group_rows.returned_run_key(key, value) for key, value in page]
        headers = await _load_headers(engine, run_keys)
        for (key, value), run_key in zip(page, run_keys, strict=True):
            header = headers[run_key]
            if header is None:
                on_orphan(Table.RETURNED, key)
                continue
            group_name, returned = group_rows.read_returned(
                key, value, run_rows.read_run(run_key, header)
            )
            group = state.groups.get(group_name)
            if group is None:
                on_orphan(Table.RETURNED, key)
                continue
            state.recover_returned(group, returned)
            group.count_outstanding(returned.slice.run, returned.slice.messages)


async def stored_fairness_keys(engine: Engine, record: QueueRecord) -> list[str]:
    """The fairness keys of a queue; costs no read for a queue that never had any."""
    return await fairness_keys(engine, record.queue_id) if record.keyed else [""]


async def fairness_keys(
    source: Engine | Reader, queue_id: int, limit: int | None = None
) -> list[str]:
    """The distinct keys of the stored runs: one seek per key, however many runs it has."""
    keys: list[str] = []
    start, end = queue_rows.queue_range(queue_id)
    while limit is None or len(keys) < limit:
        page = await source.scan(Table.RUN_HEADERS, start, end, limit=1)
        if not page:
            break
        keys.append(run_rows.read_run(*page[0]).fairness_key)
        start = prefix_end(run_rows.lane_prefix(queue_id, keys[-1]))
    return keys
