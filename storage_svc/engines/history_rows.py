"""The rows of the retention history, and of the index that lists them from the newest (R6).

Pure. A row of HISTORY counts the removals of one commit for one topic, type and pass, by queue.
Names are in the row, so that it outlives its queues. HISTORY_INDEX has three empty rows for it,
whose keys order it behind all newer ones: among all, among those of its topic, and those of its
pass.
"""

from collections.abc import Mapping
from typing import NamedTuple

from storage_svc.engines.keys import read_text, read_u64x2, text, u64x2

QUEUES_PER_ROW_MAX = 1_000
_LAST = 2**64 - 1

Removals = dict[tuple[str, str, str], dict[str, tuple[int, int]]]
"""Messages and bytes by queue, by topic, type and pass."""


class HistoryRow(NamedTuple):
    """The removals of one commit, for one topic, type and pass."""

    topic: str
    type: str
    pass_id: str
    queues: tuple[tuple[str, int, int], ...]
    """lmq_name, messages and bytes of each queue."""
    executed_at_ms: int
    number: int


def history_values(
    topic: str, kind: str, pass_id: str, queues: Mapping[str, tuple[int, int]]
) -> list[bytes]:
    """The values of the rows that count these queues; several if they are many."""
    head = text(topic.encode()) + text(kind.encode()) + text(pass_id.encode())
    names = list(queues)
    return [
        head
        + b"".join(
            u64x2(*queues[name]) + text(name.encode())
            for name in names[start : start + QUEUES_PER_ROW_MAX]
        )
        for start in range(0, len(names), QUEUES_PER_ROW_MAX)
    ]


def read_history(key: bytes, value: bytes) -> HistoryRow:
    topic, at = read_text(value)
    kind, at = read_text(value, at)
    pass_id, at = read_text(value, at)
    queues = []
    while at < len(value):
        messages, body_bytes = read_u64x2(value, at)
        name, at = read_text(value, at + 16)
        queues.append((name.decode(), messages, body_bytes))
    return HistoryRow(
        topic.decode(), kind.decode(), pass_id.decode(), tuple(queues), *read_u64x2(key)
    )


def index_prefix(*, topic: str = "", pass_id: str = "") -> bytes:
    """The prefix of the index keys of a pass, a topic or all rows."""
    if pass_id:
        return b"p" + text(pass_id.encode())
    return b"t" + text(topic.encode()) if topic else b"a"


def index_keys(topic: str, pass_id: str, key: bytes) -> list[bytes]:
    """The keys of the index for a row of HISTORY."""
    place = newest_first(*read_u64x2(key))
    prefixes = (index_prefix(), index_prefix(topic=topic), index_prefix(pass_id=pass_id))
    return [prefix + place for prefix in prefixes]


def newest_first(time_ms: int, number: int) -> bytes:
    """How an index key ends: it sorts by time and number, from the last to the first."""
    return u64x2(_LAST - time_ms, _LAST - number)


def history_key(index_key: bytes) -> bytes:
    """The key in HISTORY that an index key stands for."""
    time_ms, number = read_u64x2(index_key, len(index_key) - 16)
    return u64x2(_LAST - time_ms, _LAST - number)
