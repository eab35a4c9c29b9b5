"""Holders: the brokers of the cluster, by the partitions that they hold, and calls to them.

An operation goes to the link of this broker, or to the broker that holds the partition, one hop and
no further. Who holds a partition comes from the links: they know the assignment, and which broker
has fenced this one. A broker that does not answer is suspected.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from broker_svc.links.partition_link import PartitionLink
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1 import exchange_pb2, holder_pb2
from tidemark.api.storage.v1.holder_pb2_grpc import HolderServiceStub
from tidemark.clock import Clock
from tidemark.errors import NotOwner, PartitionNotFound, TidemarkError
from tidemark.registry.protocol import View
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.statuses import from_status

FORWARDED: Final = (("tidemark-forwarded", "1"),)
"""Metadata of a call that another broker has forwarded: it is not forwarded again."""

_PROBE_EVERY_MS: Final = 300
_PROBE_TIMEOUT_MS: Final = 1_000

R = TypeVar("R")


def is_forwarded(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    metadata = context.invocation_metadata() or ()
    return any(key == FORWARDED[0][0] for key, _ in metadata)


class Holders:
    """The other brokers, as this one reaches them."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        channels: ChannelPool,
        broker_id: str,
        clock: Clock,
        on_suspected: Callable[[str], None],
    ) -> None:
        """`on_suspected` is called with the id of a broker that does not answer."""
        self.view = View()
        """The brokers of the cluster, as far as they are known."""
        self._broker_id = broker_id
        self._links = links
        self._channels = channels
        self._clock = clock
        self._on_suspected = on_suspected
        self._probed_ms: dict[str, int] = {}
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def others(self) -> Sequence[str]:
        """The addresses of all other brokers of the cluster."""
        members = self.view.members.items()
        return [each.address for member_id, each in members if member_id != self._broker_id]

    def address(self, partition: int) -> str:
        """The address of another broker that holds the partition; "" if this one is to serve it."""
        link = self._links.get(partition)
        return "" if link is None else link.holder_address

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self._channels.close()

    async def answer(self, address: str, call: Awaitable[R]) -> R:
        """The answer of another broker, which is suspected if it gives none."""
        try:
            return await call
        except TidemarkError as error:
            if not error.answered:
                self._suspect(address)
            raise

    def probe(self, address: str) -> None:
        """A client is sent to the broker at this address: make sure that it is there.

        Sessions are not forwarded, so without this only its missing beats would show its end.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._probed_ms.get(address, -_PROBE_EVERY_MS) >= _PROBE_EVERY_MS:
            self._probed_ms = {k: v for k, v in self._probed_ms.items() if k in self.others}
            self._probed_ms[address] = now_ms
            probing = asyncio.create_task(self._probe(address))
            self._probes.add(probing)
            probing.add_done_callback(self._probes.discard)

    async def why_not(self, address: str, timeout_ms: int) -> str:
        """Why the broker at this address does not answer; "" if it does."""
        health: Any = HealthStub(await self._channels.to(address))  # its types lack Check
        try:
            await self._clock.wait_for(health.Check(HealthCheckRequest()), timeout_ms)
        except TidemarkError as error:
            return str(error)
        except TimeoutError:
            return f"no answer in {timeout_ms} ms"
        return ""

    async def _probe(self, address: str) -> None:
        if await self.why_not(address, _PROBE_TIMEOUT_MS):
            self._suspect(address)

    def _suspect(self, address: str) -> None:
        for member_id, member in self.view.members.items():
            if member.address == address:
                self._on_suspected(member_id)

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
            result = (await self.answer(address, stub.Operate(request))).result
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
