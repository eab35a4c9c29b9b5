"""The queues of one partition, as far as the walking skeleton needs them.

Keeps which runs are ready and which are reserved in memory, rebuilt from the headers at open.
Reservations are not durable yet: after a restart everything unsettled is ready again.
"""

from collections import deque
from dataclasses import dataclass, field
from struct import Struct

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import read_text, read_u64, successor, text, u64

_HEADER = Struct(">IQ")  # count, publish time; the traceparent follows
_QUEUE = Struct(">Q")  # next offset
_ROWS_PER_READ = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """The header of a stored run."""

    first_offset: int
    count: int
    publish_time_ms: int
    fairness_key: str
    traceparent: str


@dataclass(slots=True)
class Queue:
    """One queue: its runs in the order of their offsets."""

    queue_id: int
    next_offset: int = 0
    ready: deque[Run] = field(default_factory=deque)
    reserved: dict[int, Run] = field(default_factory=dict)


class Queues:
    """All queues of a partition. Changes go into the batch of the commit under way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_name: dict[str, Queue] = {}
        self._by_id: dict[int, Queue] = {}

    async def recover(self) -> None:
        """Read names, next offsets and the headers of all runs."""
        for key, value in await self._rows(Table.CATALOG):
            name, _ = read_text(key)
            queue = Queue(read_u64(value))
            self._by_name[name.decode()] = self._by_id[queue.queue_id] = queue
        for key, value in await self._rows(Table.QUEUES):
            (self._by_id[read_u64(key)].next_offset,) = _QUEUE.unpack(value)
        for key, value in await self._rows(Table.RUN_HEADERS):
            fairness_key, at = read_text(key, 8)
            count, publish_time_ms = _HEADER.unpack_from(value)
            traceparent = value[_HEADER.size :].decode()
            run = Run(read_u64(key, at), count, publish_time_ms, fairness_key.decode(), traceparent)
            self._by_id[read_u64(key)].ready.append(run)
        for queue in self._by_id.values():
            queue.ready = deque(sorted(queue.ready, key=lambda run: run.first_offset))

    def find(self, lmq_name: str) -> Queue | None:
        return self._by_name.get(lmq_name)

    def by_id(self, queue_id: int) -> Queue | None:
        return self._by_id.get(queue_id)

    def get_or_create(self, lmq_name: str, batch: Batch) -> Queue:
        queue = self._by_name.get(lmq_name)
        if queue is None:
            queue = Queue(max(self._by_id, default=0) + 1)
            self._by_name[lmq_name] = self._by_id[queue.queue_id] = queue
            batch.put(Table.CATALOG, text(lmq_name.encode()), u64(queue.queue_id))
        return queue

    def append(self, queue: Queue, run: Run, body: bytes, batch: Batch) -> None:
        queue.next_offset = run.first_offset + run.count
        queue.ready.append(run)
        header = _HEADER.pack(run.count, run.publish_time_ms) + run.traceparent.encode()
        batch.put(Table.RUN_HEADERS, _header_key(queue, run), header)
        batch.put(Table.RUN_BODIES, u64(queue.queue_id) + u64(run.first_offset), body)
        batch.put(Table.QUEUES, u64(queue.queue_id), _QUEUE.pack(queue.next_offset))

    async def body(self, queue: Queue, run: Run) -> bytes:
        key = u64(queue.queue_id) + u64(run.first_offset)
        (body,) = await self._engine.load(Table.RUN_BODIES, [key])
        assert body is not None, "a header is written and deleted together with its body"
        return body

    def delete(self, queue: Queue, run: Run, batch: Batch) -> None:
        batch.delete(Table.RUN_HEADERS, _header_key(queue, run))
        batch.delete(Table.RUN_BODIES, u64(queue.queue_id) + u64(run.first_offset))

    async def _rows(self, table: Table) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        start = b""
        while page := await self._engine.scan(table, start, None, limit=_ROWS_PER_READ):
            rows += page
            start = successor(page[-1][0])
        return rows


def _header_key(queue: Queue, run: Run) -> bytes:
    return u64(queue.queue_id) + text(run.fairness_key.encode()) + u64(run.first_offset)
