"""Rows of runs: headers, bodies, times to live, and the ranges of them that were settled."""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Row
from storage_svc.engines.keys import (
    name,
    read_text,
    read_u32,
    read_u64,
    read_u64x2,
    read_u64x3,
    text,
    u32,
    u64,
    u64x2,
    u64x3,
)
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.run import Run
from tidemark.name_caches import name_cache

BODY_INLINE_BYTES_MAX = 512
"""A body of this size or less is stored in the row of its header: a small run is one row. Larger
ones stay apart, so that scans of headers stay cheap."""

_RUN = Struct(">IQQQHH")
_CONSUMED = Struct(">QQQQQ")
_NUMBERS = Struct(">IQQQ")  # the beginning of it
_PLAIN_KEY = Struct(">QHQ")
_NO_FAIRNESS_KEY = 1  # an empty string as encoded by `text`, as a number


def lane_prefix(queue_id: int, fairness_key: str) -> bytes:
    return u64(queue_id) + name(fairness_key)


def run_key(queue_id: int, run: Run) -> bytes:
    if not run.fairness_key:
        return plain_run_key(queue_id, run.first_offset)
    return run_key_of(queue_id, run.fairness_key, run.first_offset)


def run_key_of(queue_id: int, fairness_key: str, first_offset: int) -> bytes:
    return lane_prefix(queue_id, fairness_key) + u64(first_offset)


def plain_run_key(queue_id: int, first_offset: int) -> bytes:
    """The key of a run without a fairness key, which most runs are."""
    return _PLAIN_KEY.pack(queue_id, _NO_FAIRNESS_KEY, first_offset)


def has_inline_body(run: Run) -> bool:
    return run.body_bytes <= BODY_INLINE_BYTES_MAX


def run_value(run: Run, body: bytes) -> bytes:
    """The header, with the body where that is small."""
    _, messages, body_bytes, published_ms, dead_ms, _, traced, only_for = run
    if traced or only_for:
        traceparent, group = traced.encode(), only_for.encode()
        lengths = len(traceparent), len(group)
        head = _RUN.pack(messages, body_bytes, published_ms, dead_ms, *lengths)
        head += traceparent + group
    else:
        head = _RUN.pack(messages, body_bytes, published_ms, dead_ms, 0, 0)
    return head + body if body_bytes <= BODY_INLINE_BYTES_MAX else head


def inline_body(value: bytes) -> bytes:
    """The body in the row of a header."""
    traceparent_bytes, group_bytes = _RUN.unpack_from(value)[4:]
    return value[_RUN.size + traceparent_bytes + group_bytes :]


def read_run(key: bytes, value: bytes) -> Run:
    fairness_key, at = read_text(key, 8)
    return _run(read_u64(key, at), fairness_key.decode(), value)


def read_lane_runs(page: Sequence[Row]) -> list[Run]:
    """Runs of one lane; their common key prefix is decoded once."""
    if not page:
        return []
    encoded, _ = read_text(page[0][0], 8)
    fairness_key = encoded.decode()
    return [_run(read_u64(key, len(key) - 8), fairness_key, value) for key, value in page]


def _run(first_offset: int, fairness_key: str, value: bytes) -> Run:
    messages, body_bytes, published, dead, traceparent_bytes, group_bytes = _RUN.unpack_from(value)
    group_at = _RUN.size + traceparent_bytes
    traceparent = value[_RUN.size : group_at].decode()
    group = value[group_at : group_at + group_bytes].decode() if group_bytes else ""
    return Run(
        first_offset, messages, body_bytes, published, dead, fairness_key, traceparent, group
    )


RunNumbers = tuple[int, int, int, int]
"""Messages, bytes, publish time and dead deadline of a header."""


def read_numbers(value: bytes) -> RunNumbers:
    """The numbers of a header alone, for work on many runs at once."""
    numbers: RunNumbers = _NUMBERS.unpack_from(value)
    return numbers


body_key = u64x2
"""Of a queue id and the first offset of a run."""


def ttl_key(queue_id: int, run: Run) -> bytes:
    return u64x3(run.dead_deadline_ms, queue_id, run.first_offset)


class Consumed(NamedTuple):
    """A range of messages of one run that a group has settled."""

    queue_id: int
    start: int
    end: int
    publish_time_ms: int
    first_delivery_ms: int
    group: str
    lmq_name: str


def consumed_entry(
    record: QueueRecord,
    group: str,
    start: int,
    end: int,
    publish_time_ms: int,
    first_delivery_ms: int,
) -> bytes:
    """One settled range, as a part of a row."""
    head = _CONSUMED.pack(record.queue_id, start, end, publish_time_ms, first_delivery_ms)
    return head + name(group) + _lmq_text(record.lmq_name)


@name_cache
def _lmq_text(lmq_name: str) -> bytes:
    return text(lmq_name.encode())


def consumed_value(entries: Sequence[bytes]) -> bytes:
    """A row of settled ranges; begins with their number."""
    return u32(len(entries)) + b"".join(entries)


def consumed_ranges(value: bytes) -> int:
    """How many settled ranges a row holds."""
    return read_u32(value)


def read_consumed(value: bytes) -> Iterator[Consumed]:
    at = 4
    while at < len(value):
        queue_id, start, end = read_u64x3(value, at)
        published_ms, first_ms = read_u64x2(value, at + 24)
        group, at = read_text(value, at + 40)
        lmq_name, at = read_text(value, at)
        names = group.decode(), lmq_name.decode()
        yield Consumed(queue_id, start, end, published_ms, first_ms, *names)
