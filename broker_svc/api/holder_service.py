"""Operations that other brokers forward to the holder of a partition.

An operation changes storage; the holder also forgets the queue, or caches the topic, as if its own
client had called.
"""

from typing import Any, Final

import grpc

from broker_svc.components import BrokerComponents
from tidemark.api.storage.v1 import exchange_pb2, holder_pb2, holder_pb2_grpc
from tidemark.errors import InvalidArgument, PartitionNotFound
from tidemark.rpc.topic_codec import topic_from_proto

Context = grpc.aio.ServicerContext[Any, Any]

_ADMINISTRATIVE: Final = frozenset(
    {
        "apply_topic",
        "drop_outbox",
        "pause_queue",
        "place_group",
        "purge",
        "redrive",
        "remove_dead_letters",
        "remove_group",
        "remove_queue",
        "unschedule",
    }
)


class HolderService(holder_pb2_grpc.HolderServiceServicer):
    """Operations on the partitions of this broker."""

    def __init__(self, components: BrokerComponents) -> None:
        self._components = components

    async def Operate(
        self, request: holder_pb2.OperateRequest, context: Context
    ) -> holder_pb2.OperateResponse:
        kind = request.operation.WhichOneof("kind")
        if kind not in _ADMINISTRATIVE:
            raise InvalidArgument("not an administrative operation", field="operation")
        link = self._components.links.get(request.partition)
        if link is None:
            raise PartitionNotFound(
                f"there is no partition {request.partition}", partition=str(request.partition)
            )
        result = await link.send(request.operation)
        if not result.HasField("error"):
            await self._apply(request.partition, request.operation)
        return holder_pb2.OperateResponse(result=result)

    async def _apply(self, partition: int, operation: exchange_pb2.Operation) -> None:
        components = self._components
        match operation.WhichOneof("kind"):
            case "remove_queue":
                lmq_name = operation.remove_queue.lmq_name
                components.tracking.queue_deleted(lmq_name, [partition])
                components.dispatcher.queue_forgotten(lmq_name)
            case "remove_group":
                components.dispatcher.queue_forgotten(operation.remove_group.lmq_name)
            case "apply_topic":
                await self._topic_applied(operation.apply_topic)

    async def _topic_applied(self, applied: exchange_pb2.ApplyTopic) -> None:
        components, topic = self._components, topic_from_proto(applied.topic)
        if not components.topics.learned(topic, deleted=applied.deleted):
            return
        if applied.deleted:
            components.subscriptions.topic_deleted(topic.name)
            return
        components.tracking.topic_changed(topic)
        await components.subscriptions.topic_changed(topic)
        components.dispatcher.topic_created(topic.name)
