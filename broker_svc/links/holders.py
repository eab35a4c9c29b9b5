"""Holders: the brokers of the cluster, by the partitions that they hold, and calls to them.

An operation goes to the link of this broker, or to the broker that holds the partition, one hop and
no further. Who holds a partition comes from the links: they know the assignment, and which broker
has fenced this one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc

from broker_svc.links.partition_link import PartitionLink
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1 import exchange_pb2, holder_pb2
from tidemark.api.storage.v1.holder_pb2_grpc import HolderServiceStub
from tidemark.errors import NotOwner, PartitionNotFound
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.statuses import from_status

FORWARDED: Final = (("tidemark-forwarded", "1"),)
"""Metadata of a call that another broker has forwarded: it is not forwarded again."""


def is_forwarded(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    metadata = context.invocation_metadata() or ()
    return any(key == FORWARDED[0][0] for key, _ in metadata)


class Holders:
    """The other brokers, as this one reaches them."""

    def __init__(
        self, links: Mapping[int, PartitionLink], channels: ChannelPool, others: Sequence[str]
    ) -> None:
        """`others` are the addresses of all other brokers of the cluster."""
        self.others = others
        self._links = links
        self._channels = channels

    def address(self, partition: int) -> str:
        """The address of another broker that holds the partition; "" if this one is to serve it."""
        link = self._links.get(partition)
        return "" if link is None else link.holder_address

    async def close(self) -> None:
        await self._channels.close()

    async def channel(self, address: str) -> grpc.aio.Channel:
        """Use it at once."""
        return await self._channels.to(address)

    async def broker(self, address: str) -> BrokerServiceStub:
        return BrokerServiceStub(await self._channels.to(address))

    async def topics(self, address: str) -> TopicServiceStub:
        return TopicServiceStub(await self._channels.to(address))

    async def call(
        self, partition: int, operation: exchange_pb2.Operation
    ) -> exchange_pb2.OperationResult:
        """Carry out an operation where the partition is held; raises its error."""
        link = self._links.get(partition)
        if link is None:
            raise PartitionNotFound(f"there is no partition {partition}", partition=str(partition))
        address = self.address(partition)
        if not address:
            return await link.call(operation)
        stub = HolderServiceStub(await self._channels.to(address))
        request = holder_pb2.OperateRequest(partition=partition, operation=operation)
        try:
            result = (await stub.Operate(request)).result
        except NotOwner as error:
            raise _not_here(partition, error) from None
        if result.HasField("error"):
            raise from_status(result.error)
        return result


def _not_here(partition: int, error: NotOwner) -> NotOwner:
    """The named holder does not hold it: repeated by the caller, never followed here."""
    return NotOwner(
        f"partition {partition} is changing hands",
        partition=str(partition),
        owner=error.metadata.get("owner", ""),
    )
