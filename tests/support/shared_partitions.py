"""A partition that several storage nodes open, on a store in memory, for as long as a test."""

from contextlib import AsyncExitStack
from typing import Any

from storage_svc.engines.engine import Engines, Identity
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from tests.support.shared_engine import SharedEngines, SharedStore
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.clock import ManualClock
from tidemark.topics import Topic

RUN = Append("t/a", 1, MessageBatch(messages=[Message(payload=b"m")]).SerializeToString())


class Nodes:
    """Storage nodes that share a store; each opens the one partition."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.store = SharedStore()
        self.clock = ManualClock()
        self._stack = stack

    async def start(self, engines: Engines | None = None, **options: Any) -> Partition:
        """A node with engines of its own, unless others are given."""
        engines = engines or SharedEngines(self.store)
        partition = Partition(engines, Identity("shared", 0, 1), self.clock, **options)
        await partition.open()
        self._stack.push_async_callback(partition.close)
        return partition


async def do(partition: Partition, *operations: Operation[object]) -> Any:
    answers = await partition.submit(operations)
    return answers if len(operations) > 1 else answers[0]


async def started(nodes: Nodes) -> Partition:
    partition = await nodes.start()
    await do(partition, PutTopic(Topic("t"), create=True))
    await do(partition, RUN)
    return partition


def reasons(partition: Partition) -> list[str]:
    return [fault.reason.value for fault in partition.health.faults]
