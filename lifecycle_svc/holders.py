"""Holders: the process that acts for a partition, and how to reach it (L2).

A partition is held by the connected broker, or by storage if no broker is connected. Both implement
`DelegateActions`, which is the only call by which lifecycle changes anything.
"""

from collections.abc import Sequence

from tidemark.api.storage.v1.action_pb2 import Action, ActionResult, DelegateActionsRequest
from tidemark.api.storage.v1.action_pb2_grpc import DelegationServiceStub
from tidemark.clock import Clock
from tidemark.errors import NotOwner, TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool

ACTIONS_PER_CALL_MAX = 1_000
_HOPS_MAX = 3
"""Storage, the broker that it names, and storage again if that broker is gone."""


class Holders:
    """The last known holder of each partition."""

    def __init__(self, channels: ChannelPool, clock: Clock, timeout_ms: int) -> None:
        self._channels = channels
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._storages: dict[int, str] = {}
        self._brokers: dict[int, str] = {}

    def set_storage(self, partition: int, address: str) -> None:
        """Record the storage process that has the partition open."""
        self._storages[partition] = address

    def set_broker(self, partition: int, address: str) -> None:
        """Record the broker that holds the partition; empty if none does."""
        if address:
            self._brokers[partition] = address
        else:
            self._brokers.pop(partition, None)

    async def delegate(self, partition: int, actions: Sequence[Action]) -> list[ActionResult]:
        """Have the holder carry out actions; one result each. Raises if it cannot be reached."""
        results: list[ActionResult] = []
        for at in range(0, len(actions), ACTIONS_PER_CALL_MAX):
            results += await self._delegate(partition, actions[at : at + ACTIONS_PER_CALL_MAX])
        return results

    async def _delegate(self, partition: int, actions: Sequence[Action]) -> list[ActionResult]:
        request = DelegateActionsRequest(partition=partition, actions=actions)
        failure: TidemarkError = Unavailable(
            f"the address of partition {partition} is not known", partition=str(partition)
        )
        for _ in range(_HOPS_MAX):
            broker = self._brokers.get(partition)
            address = broker or self._storages.get(partition)
            if address is None:
                break
            try:
                return await self._call(address, request)
            except NotOwner as error:
                failure = error
                self.set_broker(partition, error.metadata.get("owner", ""))
            except Unavailable as error:
                failure = error
                if broker is None:
                    break
                self.set_broker(partition, "")
        raise failure

    async def _call(self, address: str, request: DelegateActionsRequest) -> list[ActionResult]:
        holder = DelegationServiceStub(await self._channels.to(address))
        try:
            response = await self._clock.wait_for(holder.DelegateActions(request), self._timeout_ms)
        except TimeoutError:
            raise Unavailable(f"{address} did not answer in {self._timeout_ms} ms") from None
        return list(response.results)
