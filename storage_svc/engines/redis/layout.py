"""The layout of a partition in Redis: its keys, the kinds of its tables, and how rows are encoded.

Pure. All keys of a partition carry one hash tag, so that one script reaches them all:

    {tidemark/<cluster>/<partition>}:mark     HASH   epoch, opening; last sequence and id
    {tidemark/<cluster>/<partition>}:<table>  HASH   point and ordered tables: key -> value
    {tidemark/<cluster>/<partition>}:<table>< ZSET   ordered tables: keys; packed tables: whole rows

Every script declares the keys that it may reach: while a slot moves key by key, a server of a
cluster runs it where all of them are, or not at all.

Each table is of one kind, and pays for what it is used for:

    point     HASH. Never scanned, and its ranges are never deleted.
    ordered   ZSET of keys and HASH of values. For rows that change.
    packed    ZSET of rows: key, value, u16 length of the key. For indexes, and for rows that are
              written once; half the memory of an ordered row. No key begins with another one, and
              the end of a scan is not longer than a key.

An idle queue is a row of CATALOG (ordered), one of QUEUES (point) and one of AGES (packed).
docs/ENGINES.md has the measured bytes of each.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from struct import Struct
from typing import Final

from storage_svc.engines.engine import Batch, Identity, Row, Table
from storage_svc.engines.keys import u16

Argument = bytes | str | int


class Kind(Enum):
    """The values are on the wire to the scripts."""

    POINT = b"h"
    ORDERED = b"o"
    PACKED = b"p"


_POINT: Final = (
    Table.META,
    Table.QUEUES,
    Table.SCHEDULE_BODIES,
    Table.OUTBOX_BODIES,
    Table.HIGH_WATER,
)
_PACKED: Final = (
    Table.RUN_HEADERS,
    Table.BURIED,
    Table.DELAYS,
    Table.SETTLED,
    Table.DEADLINES,
    Table.SCHEDULE,
    Table.SCHEDULED,
    Table.TTL,
    Table.AGES,
    Table.OUTBOX,
    Table.PRODUCERS,
    Table.PRODUCER_INDEX,
    Table.HISTORY,
    Table.HISTORY_INDEX,
    Table.CONSUMED,
    Table.METRICS,
)
KINDS: Final = {
    table: Kind.POINT if table in _POINT else Kind.PACKED if table in _PACKED else Kind.ORDERED
    for table in Table
}

_LENGTHS = Struct(">II")
_LENGTH = Struct(">I")
_HASH: Final = b"hash"
_ZSET: Final = b"zset"


def base_key(identity: Identity) -> bytes:
    return f"{{tidemark/{identity.cluster_id}/{identity.partition}}}".encode()


def mark_key(identity: Identity) -> bytes:
    return base_key(identity) + b":mark"


def key_types(identity: Identity) -> dict[bytes, bytes]:
    """Every key that a partition may have, and the type under which the server stores it."""
    base = base_key(identity) + b":"
    tables = {key: kind for table in Table for key, kind in _keys_of(base, table)}
    return {mark_key(identity): _HASH, **tables}


def declared_keys(mark: bytes, base: bytes, tables: Iterable[Table]) -> list[bytes]:
    """The keys of a script that reaches the mark, which is the first, and these tables."""
    return [mark, *(key for table in tables for key, _ in _keys_of(base, table))]


def _keys_of(base: bytes, table: Table) -> Iterator[tuple[bytes, bytes]]:
    kind, name = KINDS[table], base + table.encode()
    if kind is not Kind.PACKED:
        yield name, _HASH
    if kind is not Kind.POINT:
        yield name + b"<", _ZSET


def packed(key: bytes, value: bytes) -> bytes:
    return key + value + u16(len(key))


def read_values(answer: bytes) -> list[bytes | None]:
    """Values as the script joins them: their length plus one, 0 where there is none."""
    values: list[bytes | None] = []
    at = 0
    while at < len(answer):
        (length,) = _LENGTH.unpack_from(answer, at)
        at += 4
        values.append(answer[at : at + length - 1] if length else None)
        at += max(0, length - 1)
    return values


def read_rows(answer: bytes) -> list[Row]:
    """Rows as the script joins them: both lengths, then key and value."""
    rows: list[Row] = []
    at = 0
    while at < len(answer):
        key_length, value_length = _LENGTHS.unpack_from(answer, at)
        key_end = at + 8 + key_length
        value_end = key_end + value_length
        rows.append((answer[at + 8 : key_end], answer[key_end:value_end]))
        at = value_end
    return rows


def write_steps(batch: Batch) -> list[Argument]:
    """The steps of a commit. Changes to one table travel together; the last to a key wins."""
    steps: list[Argument] = []
    changes: dict[Table, dict[bytes, bytes | None]] = {}
    for table, key, value, end in batch.operations:
        if end is None:
            changes.setdefault(table, {})[key] = value
            continue
        assert KINDS[table] is not Kind.POINT, f"{table} has no order"
        steps += _changes(changes)  # what came before the range delete
        changes = {}
        steps += (b"range", KINDS[table].value, table, 2, key, end)
    steps += _changes(changes)
    return steps


def _changes(changes: dict[Table, dict[bytes, bytes | None]]) -> Iterator[Argument]:
    for table, rows in changes.items():
        kind = KINDS[table]
        gone = [key for key, value in rows.items() if value is None]
        puts = [(key, value) for key, value in rows.items() if value is not None]
        if kind is Kind.PACKED:
            # A row is found by its key, whatever its value: remove before adding.
            yield from _step(b"unpack", table, list(rows))
            yield from _step(b"zadd", table, [packed(key, value) for key, value in puts])
            continue
        yield from _step(b"hdel", table, gone)
        yield from _step(b"hset", table, [part for row in puts for part in row])
        if kind is Kind.ORDERED:
            yield from _step(b"zrem", table, gone)
            yield from _step(b"zadd", table, [key for key, _ in puts])


def _step(what: bytes, table: Table, arguments: Sequence[bytes]) -> Iterator[Argument]:
    if arguments:
        yield from (what, b"", table, len(arguments))
        yield from arguments
