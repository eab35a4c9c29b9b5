"""Queues, groups and messages for operators, read beside the writer without loading a queue (K5).

A loaded queue is shown from memory; an idle one is read from the engine and stays idle.
"""

from collections.abc import AsyncIterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.engine import Reader, Table
from storage_svc.engines.keys import prefix_end, successor
from storage_svc.loading.recovery import fairness_keys
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.partition.partition import Partition
from storage_svc.queue.group import Group
from storage_svc.queue.purge import PurgeMark
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.run import Run
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.errors import InvalidArgument
from tidemark.limits import RUN_MESSAGES_MAX

PEEK_BYTES_MAX = 4 * 1024 * 1024
"""Bodies that one peek reads; its answer must fit one frame."""

_KEYS_EXAMINED_MAX = 16
"""Fairness keys that are read to find the oldest message of a queue."""


class QueueView(NamedTuple):
    """One queue."""

    record: QueueRecord
    materialized: bool
    inflight: int
    oldest_publish_time_ms: int | None


class GroupView(NamedTuple):
    """One group of a queue."""

    name: str
    cursor: int
    unsettled: int
    inflight: int
    owner_client_id: str
    owner_epoch: int


class Peeked(NamedTuple):
    """One stored message."""

    offset: int
    message: Message
    run: Run


async def list_queues(
    partition: Partition, topic: str, lite_prefix: str, token: bytes, limit: int
) -> tuple[list[QueueView], bytes]:
    """A page of queues by name, and the token of the next page."""
    start, end = queue_rows.topic_range(topic, lite_prefix) if topic else (b"", None)
    if token and (token < start or (end is not None and token >= end)):
        raise InvalidArgument("not a page token of this call", field="page_token")
    with partition.reader() as reader:
        found = await reader.scan(Table.CATALOG, token or start, end, limit=limit)
        views = [
            await _view(
                partition, reader, queue_rows.read_queue(queue_rows.lmq_name_of(key), value)
            )
            for key, value in found
        ]
    return views, successor(found[-1][0]) if len(found) == limit else b""


async def get_queue(partition: Partition, lmq_name: str) -> tuple[QueueView, list[GroupView]]:
    """One queue and its groups."""
    state = await partition.state.handles.read_state(lmq_name)
    with partition.reader() as reader:
        view = await _view(partition, reader, state.record)
    return view, [group_view(state, group) for group in state.groups.values()]


async def peek(
    partition: Partition, lmq_name: str, offset: int, limit: int, group: str
) -> tuple[list[Peeked], int | None]:
    """A page of messages from `offset` on, and the offset of the next page; None after the last.

    With a group, only messages that it has not settled.
    """
    state = await partition.state.handles.read_state(lmq_name)
    only_for = state.group(group) if group else None
    peeked: list[Peeked] = []
    read_bytes = 0
    queue_id = state.record.queue_id
    with partition.reader() as reader:
        purge = partition.state.erasures.purge_of(queue_id)
        async for run in _runs_from(reader, purge, queue_id, offset):
            body = await _body(reader, queue_id, run)
            if body is None:
                continue  # deleted between the two reads
            for at, message in enumerate(MessageBatch.FromString(body).messages, run.first_offset):
                settled = only_for is not None and only_for.has_settled_message(run, at)
                if at >= offset and not settled:
                    peeked.append(Peeked(at, message, run))
            read_bytes += len(body)
            if len(peeked) >= limit:
                return peeked[:limit], peeked[limit - 1].offset + 1
            if read_bytes > PEEK_BYTES_MAX:
                return peeked, run.end
    return peeked, None


async def _body(reader: Reader, queue_id: int, run: Run) -> bytes | None:
    """The messages of a run; None if it was deleted meanwhile."""
    if run_rows.has_inline_body(run):
        (header,) = await reader.load(Table.RUN_HEADERS, [run_rows.run_key(queue_id, run)])
        return None if header is None else run_rows.inline_body(header)
    (body,) = await reader.load(Table.RUN_BODIES, [run_rows.body_key(queue_id, run.first_offset)])
    return body


async def _view(partition: Partition, reader: Reader, record: QueueRecord) -> QueueView:
    handle = partition.state.handles.peek(record.lmq_name)
    if handle is not None:
        record = handle.state.record
    purge = partition.state.erasures.purge_of(record.queue_id)
    oldest = await _oldest_publish_time_ms(reader, record, purge) if record.messages else None
    inflight = 0 if handle is None else handle.state.inflight
    return QueueView(record, handle is not None, inflight, oldest)


def group_view(state: QueueState, group: Group) -> GroupView:
    next_offset = state.record.next_offset
    return GroupView(
        group.name,
        group.cursor(next_offset),
        next_offset - group.base - group.settled,
        sum(each.open_messages for each in group.live.values()),
        group.owner_client_id,
        group.owner_epoch,
    )


async def _oldest_publish_time_ms(
    reader: Reader, record: QueueRecord, purge: PurgeMark | None
) -> int | None:
    """The first run of each of the first fairness keys: exact unless a queue has many keys."""
    times: list[int] = []
    for key in await fairness_keys(reader, record.queue_id, _KEYS_EXAMINED_MAX):
        prefix = run_rows.lane_prefix(record.queue_id, key)
        first = await scan_runs(reader, purge, prefix, prefix_end(prefix), limit=1)
        times += (run_rows.read_run(*row).publish_time_ms for row in first)
    return min(times, default=None)


async def _runs_from(
    reader: Reader, purge: PurgeMark | None, queue_id: int, offset: int
) -> AsyncIterator[Run]:
    """Runs of all fairness keys in the order of their offsets: a seek per key and per run."""
    heads: list[Run] = []
    for key in await fairness_keys(reader, queue_id):
        # A run that begins before the offset may reach beyond it.
        heads += await _next_run(reader, purge, queue_id, key, max(0, offset - RUN_MESSAGES_MAX))
    heapify(heads)
    while heads:
        run = heappop(heads)
        if run.end > offset:
            yield run
        for following in await _next_run(reader, purge, queue_id, run.fairness_key, run.end):
            heappush(heads, following)


async def _next_run(
    reader: Reader, purge: PurgeMark | None, queue_id: int, key: str, offset: int
) -> list[Run]:
    """The first run of a key that begins at an offset or later, as a list of one or none."""
    start = run_rows.run_key_of(queue_id, key, offset)
    end = prefix_end(run_rows.lane_prefix(queue_id, key))
    found = await scan_runs(reader, purge, start, end, limit=1)
    return [run_rows.read_run(*row) for row in found]
