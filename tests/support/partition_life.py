"""A real partition on a real engine that tests can break and reopen."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from storage_svc.queue.group import Group
from storage_svc.queue.queue import QueueState
from storage_svc.queue.reservation import Ending
from storage_svc.reads import due_work
from tests.support.faulty_engine import FaultyEngines
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.clock import ManualClock
from tidemark.topics import Topic, TopicSettings

DAY_MS = 24 * 60 * 60 * 1000
ACK, NACK = Ending.ACK, Ending.NACK


class Life:
    """A partition that can be reopened, and short ways to ask it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.engines = FaultyEngines(RocksEngines(directory))
        self.partition = Partition(self.engines, Identity("regressions", 0, 1), self.clock)
        self._published = 0

    async def topic(self, name: str, **settings: Any) -> None:
        await self.do(PutTopic(Topic(name, TopicSettings(**settings)), create=True))

    async def do(self, *operations: Operation[object]) -> Any:
        """The answers of one commit; of one operation the answer itself."""
        answers = await self.partition.submit(operations)
        return answers if len(operations) > 1 else answers[0]

    async def reopen(self) -> None:
        await self.partition.close()
        self.partition = Partition(self.engines, self.partition.identity, self.clock)
        await self.partition.open()

    def run(self, lmq_name: str, messages: int, **fields: Any) -> Append:
        """A run of messages m0, m1, ... numbered over the whole life."""
        batch = MessageBatch()
        for _ in range(messages):
            batch.messages.add(payload=b"m%d" % self._published)
            self._published += 1
        return Append(lmq_name, messages, batch.SerializeToString(), **fields)

    async def rows(self, *tables: Table) -> int:
        """How many rows there are in tables."""
        engine = self.partition.state.engine
        return sum([len(await engine.scan(each, b"", None, limit=1000)) for each in tables])

    def state(self, lmq_name: str) -> QueueState:
        handle = self.partition.state.handles.peek(lmq_name)
        assert handle is not None
        return handle.state

    def group(self, lmq_name: str, name: str) -> Group:
        return self.state(lmq_name).groups[name]

    async def due(self, kind: due_work.ScanKind) -> list[Operation[object]]:
        page = await due_work.scan(self.partition, kind, b"", 100)
        return [due.action for due in page.due]


@asynccontextmanager
async def living(directory: Path) -> AsyncIterator[Life]:
    life = Life(directory)
    await life.partition.open()
    try:
        yield life
    finally:
        await life.partition.close()


def spans(answer: Any) -> list[tuple[int, int]]:
    return [(each.first_offset, each.first_offset + each.messages) for each in answer.slices]
