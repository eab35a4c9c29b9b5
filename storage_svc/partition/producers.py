"""Idempotent publishing: a repeat of (producer, sequence) gets the first answer (S11).

Remembers the last sequences of each producer, independently of retention, for a bounded window: as
many runs as `limits.PRODUCER_SEQUENCES_MAX`, and for as long as `limits.PRODUCER_WINDOW_MS` after
the producer's last run. Older sequences are refused, never stored a second time.

The answers that a commit gives to one producer are one row, under the last of their sequences. A
sequence has one answer, so no two rows share a key; the row goes once that sequence leaves the
window.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import prefix_end, read_text, read_u64, text, u64
from tidemark.errors import SequenceConflict, SequenceTooOld
from tidemark.limits import PRODUCER_SEQUENCES_MAX, PRODUCER_WINDOW_MS

_CACHED_MAX = 4096
_DAY_MS = 24 * 60 * 60 * 1000
_ENTRY = Struct(">QQQQII")  # sequence, answer


class Answer(NamedTuple):
    """The first answer to a sequence, and the identity of its run."""

    queue_id: int
    first_offset: int
    schedule_id: int
    messages: int
    checksum: int


def checksum(lmq_name: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(lmq_name.encode()))


class Producer:
    """The answers of one producer that are remembered."""

    __slots__ = ("answers", "day", "highest", "prefix", "rows", "unwritten")

    def __init__(self, producer_id: str) -> None:
        self.prefix = text(producer_id.encode())
        """Of its keys."""
        self.answers: dict[int, bytes] = {}
        """By sequence, as they are stored."""
        self.highest = 0
        self.day = 0  # of its last run, as in PRODUCER_INDEX
        self.rows: dict[int, list[int]] = {}
        """The sequences of each stored row, by the last of them; oldest row first."""
        self.unwritten: list[int] = []
        """Sequences of the commit under way."""

    def is_new(self, sequence: int) -> bool:
        """Whether a run of this sequence was not stored before, for certain."""
        return sequence > self.highest - PRODUCER_SEQUENCES_MAX and sequence not in self.answers

    def add(self, sequence: int, entry: bytes) -> None:
        self.answers[sequence] = entry
        if sequence > self.highest:
            self.highest = sequence

    def drop_row(self, last: int) -> None:
        for sequence in self.rows.pop(last):
            del self.answers[sequence]


def _first_day_kept(now_ms: int) -> int:
    return max(0, now_ms - PRODUCER_WINDOW_MS) // _DAY_MS


class Producers:
    """The producers that published recently, a bounded number of them in memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cached: OrderedDict[str, Producer] = OrderedDict()
        self._unwritten: list[Producer] = []
        """Producers with answers of the commit under way."""
        self._searched_to = 0
        """No producer that is still stored published last before this day."""

    async def find(
        self, producer_id: str, sequence: int, messages: int, checksum: int
    ) -> Answer | None:
        """The first answer if this run was stored before; None if it never was.

        Raises SequenceConflict for another run under the same sequence, SequenceTooOld for one
        that lies before the window.
        """
        producer = await self.load(producer_id)
        if sequence <= producer.highest - PRODUCER_SEQUENCES_MAX:
            raise SequenceTooOld(
                f"sequence {sequence} lies before the window of producer {producer_id}",
                highest=str(producer.highest),
            )
        entry = producer.answers.get(sequence)
        if entry is None:
            return None
        first = Answer(*_ENTRY.unpack(entry)[1:])
        if first[3:] != (messages, checksum):
            raise SequenceConflict(
                f"producer {producer_id} used sequence {sequence} for another run",
                sequence=str(sequence),
            )
        return first

    def loaded(self, producer_id: str) -> Producer | None:
        """A producer that need not be read."""
        producer = self._cached.get(producer_id)
        if producer is not None:
            self._cached.move_to_end(producer_id)
        return producer

    async def load(self, producer_id: str) -> Producer:
        """A producer, which stays in memory until the commit under way is complete."""
        producer = self.loaded(producer_id)
        if producer is None:
            producer = self._cached[producer_id] = await self._read(producer_id)
        return producer

    def remember(
        self, producer: Producer, sequence: int, answer: Iterable[int], now_ms: int, batch: Batch
    ) -> None:
        """Keep the answer of a run that the commit under way stores; `write` stores it."""
        producer.add(sequence, _ENTRY.pack(sequence, *answer))
        if not producer.unwritten:
            self._unwritten.append(producer)
            if now_ms // _DAY_MS != producer.day:
                self._note_day(producer, now_ms // _DAY_MS, batch)
        producer.unwritten.append(sequence)

    def _note_day(self, producer: Producer, day: int, batch: Batch) -> None:
        prefix = producer.prefix
        if producer.day:
            batch.delete(Table.PRODUCER_INDEX, u64(producer.day) + prefix)
        producer.day = day
        batch.put(Table.PRODUCER_INDEX, u64(day) + prefix, b"")
        batch.put(Table.PRODUCERS, prefix, u64(day))

    def write(self, batch: Batch) -> None:
        """Store the answers of the commit under way: a row for each of its producers. None of them
        is read again before the commit is durable, so that memory can be bounded here."""
        if len(self._cached) > _CACHED_MAX:
            self._trim()
        if not self._unwritten:
            return
        for producer in self._unwritten:
            sequences, producer.unwritten = producer.unwritten, []
            answers, rows = producer.answers, producer.rows
            if len(sequences) == 1:  # as in most commits of one of many partitions
                last = sequences[0]
                value = answers[last]
            else:
                last = max(sequences)
                value = b"".join([answers[each] for each in sequences])
            batch.put(Table.PRODUCERS, producer.prefix + u64(last), value)
            rows[last] = sequences
            oldest = producer.highest - PRODUCER_SEQUENCES_MAX
            while (first := next(iter(rows))) <= oldest:
                producer.drop_row(first)
                batch.delete(Table.PRODUCERS, producer.prefix + u64(first))
        self._unwritten.clear()

    async def has_old(self, now_ms: int) -> bool:
        """Whether there is a producer to forget. Reads once for each day that begins."""
        before = _first_day_kept(now_ms)
        if before <= self._searched_to:
            return False
        if await self._engine.scan(Table.PRODUCER_INDEX, b"", u64(before), limit=1):
            return True
        self._searched_to = before
        return False

    async def forget_old(self, now_ms: int, limit: int, batch: Batch) -> int:
        """Forget producers that published nothing for the whole window; returns how many."""
        before = _first_day_kept(now_ms)
        old = await self._engine.scan(Table.PRODUCER_INDEX, b"", u64(before), limit=limit)
        for key, _ in old:
            encoded, _ = read_text(key, 8)
            producer_id = encoded.decode()
            producer = await self.load(producer_id)
            if producer.day != read_u64(key):
                continue  # it has published since; its entry moves with this commit
            batch.delete(Table.PRODUCER_INDEX, key)
            batch.delete(Table.PRODUCERS, producer.prefix)
            for last in producer.rows:
                batch.delete(Table.PRODUCERS, producer.prefix + u64(last))
            del self._cached[producer_id]
        return len(old)

    def _trim(self) -> None:
        while len(self._cached) > _CACHED_MAX:
            self._cached.popitem(last=False)

    async def _read(self, producer_id: str) -> Producer:
        producer = Producer(producer_id)
        prefix = producer.prefix
        for key, value in await self._engine.scan(
            Table.PRODUCERS, prefix, prefix_end(prefix), limit=2 * PRODUCER_SEQUENCES_MAX
        ):
            if key == prefix:
                producer.day = read_u64(value)
                continue
            sequences = producer.rows[read_u64(key, len(prefix))] = []
            for at in range(0, len(value), _ENTRY.size):
                sequence = read_u64(value, at)
                sequences.append(sequence)
                producer.add(sequence, value[at : at + _ENTRY.size])
        return producer
