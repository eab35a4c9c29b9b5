"""The layout of a partition in Redis: its keys, the kinds of its tables, and how rows are encoded.

Pure. All keys of a partition carry one hash tag, so that one script reaches them all:

    {tidemark/<cluster>/<partition>}:mark     HASH   epoch, opening, generation of the node;
                                                     last sequence and id; layout
    {tidemark/<cluster>/<partition>}:staged   LIST   pieces of a large commit (`scripts.py`)
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

Values of tables that consist of numbers are stored with their zeros squeezed: they are most of the
bytes of a row. A row of CATALOG shrinks by 40 %, and takes a microsecond to squeeze.

An idle queue is a row of CATALOG (ordered), one of QUEUES (point) and a share of rows of AGES
(packed). It costs 320 to 340 bytes of the server's memory, and 27 in AGES, with an lmq_name of 16
bytes, which is stored three times (`python -m bench storage-redis`; docs/ENGINES.md).
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from struct import Struct
from typing import Final, NamedTuple

from storage_svc.engines.engine import Batch, Identity, Row, Table
from storage_svc.engines.keys import u16, u32

LAYOUT_VERSION: Final = 2
"""Version of what this module describes; the rows themselves have `FORMAT_VERSION`."""

SCRIPT_US_MAX: Final = 5_000
"""CPU time of the server that one script may take; the costs below are measured (docs/ENGINES.md),
for rows in any order in tables of a hundred thousand."""
PIECE_BYTES_MAX: Final = 1024 * 1024
"""Bytes of rows that one script writes, unless a single row is larger."""

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

WRITE_US: Final = {Kind.POINT: 3, Kind.ORDERED: 5, Kind.PACKED: 7}
"""The cost of a row that is written or deleted."""

_SQUEEZED: Final = frozenset(
    {Table.CATALOG, Table.GROUPS, Table.LANES, Table.RETURNED, Table.RESERVATIONS}
)

_NAMES: Final = {table: table.encode() for table in Table}

_LENGTHS = Struct(">II")
_LENGTH = Struct(">I")
_HASH: Final = b"hash"
_ZSET: Final = b"zset"
_LIST: Final = b"list"

_ESCAPE: Final = b"\xff"
_ESCAPED: Final = b"\xff\x00"
_ZEROS: Final = tuple((bytes(count), bytes((0xFF, count))) for count in (32, 16, 8, 7, 4, 3))


def base_key(identity: Identity) -> bytes:
    return f"{{tidemark/{identity.cluster_id}/{identity.partition}}}".encode()


def mark_key(identity: Identity) -> bytes:
    return base_key(identity) + b":mark"


def staged_key(identity: Identity) -> bytes:
    return base_key(identity) + b":staged"


def key_types(identity: Identity) -> dict[bytes, bytes]:
    """Every key that a partition may have, and the type under which the server stores it."""
    base = base_key(identity) + b":"
    tables = {key: kind for table in Table for key, kind in _keys_of(base, table)}
    return {mark_key(identity): _HASH, staged_key(identity): _LIST, **tables}


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


def squeezed(value: bytes) -> bytes:
    """A value with its runs of zeros as two bytes each: 0xff, and how many."""
    if _ESCAPE in value:
        value = value.replace(_ESCAPE, _ESCAPED)
    for zeros, short in _ZEROS:
        value = value.replace(zeros, short)
    return value


def expanded(value: bytes) -> bytes:
    """The inverse of `squeezed`. Every 0xff begins one of its pairs, so that none is mistaken."""
    for zeros, short in _ZEROS:
        value = value.replace(short, zeros)
    return value.replace(_ESCAPED, _ESCAPE) if _ESCAPE in value else value


def read_answers(joined: bytes) -> Iterator[bytes]:
    """The answers to the requests of one script: their lengths, then they themselves."""
    at = 0
    while at < len(joined):
        (length,) = _LENGTH.unpack_from(joined, at)
        at += 4 + length
        yield joined[at - length : at]


def read_values(table: Table, answer: bytes) -> list[bytes | None]:
    """Values as the script joins them: their length plus one, 0 where there is none."""
    values: list[bytes | None] = []
    at = 0
    while at < len(answer):
        (length,) = _LENGTH.unpack_from(answer, at)
        at += 4
        values.append(answer[at : at + length - 1] if length else None)
        at += max(0, length - 1)
    if table in _SQUEEZED:
        return [None if value is None else expanded(value) for value in values]
    return values


def read_rows(table: Table, answer: bytes) -> list[Row]:
    """Rows as the script joins them: both lengths, then key and value."""
    rows: list[Row] = []
    at = 0
    while at < len(answer):
        key_length, value_length = _LENGTHS.unpack_from(answer, at)
        key_end = at + 8 + key_length
        value_end = key_end + value_length
        rows.append((answer[at + 8 : key_end], answer[key_end:value_end]))
        at = value_end
    if table in _SQUEEZED:
        return [(key, expanded(value)) for key, value in rows]
    return rows


class Piece(NamedTuple):
    """The part of a commit that one script applies."""

    steps: list[bytes]
    tables: tuple[Table, ...]

    @property
    def is_range(self) -> bool:
        return self.steps[0] == b"range"

    def packed(self) -> bytes:
        """As the server stores it until it is applied: the steps as an array of MessagePack."""
        parts = [b"\xdd" + u32(len(self.steps))]
        for each in self.steps:
            parts += (b"\xdb" + u32(len(each)), each)
        return b"".join(parts)


def write_pieces(batch: Batch) -> list[Piece]:
    """The steps of a commit, in pieces that one script can apply, in their order.

    Changes to one table travel together; the last to a key wins. A range is a piece of its own,
    because it may take several scripts.
    """
    pieces: list[Piece] = []
    changes: dict[Table, dict[bytes, bytes | None]] = {}
    rows: dict[bytes, bytes | None] = {}
    current: Table | None = None
    cost_us = row_us = size = 0
    for table, key, value, end in batch.operations:
        if cost_us > SCRIPT_US_MAX - row_us or size >= PIECE_BYTES_MAX or end is not None:
            if changes:
                pieces.append(Piece(_steps(changes), tuple(changes)))
            changes, current, cost_us, size = {}, None, 0, 0
        if end is not None:
            assert KINDS[table] is not Kind.POINT, f"{table} has no order"
            steps = [b"range", KINDS[table].value, _NAMES[table], b"2", key, end]
            pieces.append(Piece(steps, (table,)))
            continue
        if table is not current:  # an Enum is slow as a key
            current = table
            rows = changes.setdefault(table, {})
            row_us = WRITE_US[KINDS[table]]
        rows[key] = value
        cost_us += row_us
        size += len(value) if value is not None else 0
    if changes:
        pieces.append(Piece(_steps(changes), tuple(changes)))
    return pieces


def _steps(changes: dict[Table, dict[bytes, bytes | None]]) -> list[bytes]:
    steps: list[bytes] = []
    for table, rows in changes.items():
        kind, name = KINDS[table], _NAMES[table]
        gone = [key for key, value in rows.items() if value is None]
        puts = [(key, value) for key, value in rows.items() if value is not None]
        if kind is Kind.PACKED:
            # A row is found by its key, whatever its value: remove before adding.
            _add_step(steps, b"unpack", name, list(rows), b"k" if puts else b"")
            _add_step(steps, b"zadd", name, [packed(key, value) for key, value in puts])
            continue
        if table in _SQUEEZED:
            puts = [(key, squeezed(value)) for key, value in puts]
        _add_step(steps, b"hset", name, [part for row in puts for part in row])
        _add_step(steps, b"hdel", name, gone)
        if kind is Kind.ORDERED:
            _add_step(steps, b"zadd", name, [key for key, _ in puts])
            _add_step(steps, b"zrem", name, gone)
    return steps


def _add_step(
    steps: list[bytes], what: bytes, name: bytes, arguments: Sequence[bytes], kind: bytes = b""
) -> None:
    if arguments:
        steps += (what, kind, name, b"%d" % len(arguments))
        steps += arguments
