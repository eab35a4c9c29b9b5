"""Owners: who acts for a partition, and how it is asked (L2).

The owner is the broker that drives the partition, or storage where none does; both answer the same
call. This is the only way in which lifecycle changes anything.
"""

from collections.abc import Sequence

from tidemark.api.storage.v1.action_pb2 import Action, ActionResult, DelegateActionsRequest
from tidemark.api.storage.v1.action_pb2_grpc import OwnerServiceStub
from tidemark.clock import Clock
from tidemark.errors import NotOwner, TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool

ACTIONS_PER_CALL_MAX = 1_000
_HOPS_MAX = 3
"""Storage, the broker that it names, and storage again if that broker is gone."""


class Owners:
    """The owners of all partitions, as far as they are known."""

    def __init__(self, channels: ChannelPool, clock: Clock, timeout_ms: int) -> None:
        self._channels = channels
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._storages: dict[int, str] = {}
        self._brokers: dict[int, str] = {}

    def stored_at(self, partition: int, storage_address: str) -> None:
        """Storage says which process holds a partition."""
        self._storages[partition] = storage_address

    def driven_by(self, partition: int, broker_address: str) -> None:
        """Storage says which broker drives a partition; "": none."""
        if broker_address:
            self._brokers[partition] = broker_address
        else:
            self._brokers.pop(partition, None)

    async def act(self, partition: int, actions: Sequence[Action]) -> list[ActionResult]:
        """Have actions done; one result each. Raises when the owner cannot be asked."""
        results: list[ActionResult] = []
        for at in range(0, len(actions), ACTIONS_PER_CALL_MAX):
            results += await self._delegate(partition, actions[at : at + ACTIONS_PER_CALL_MAX])
        return results

    async def _delegate(self, partition: int, actions: Sequence[Action]) -> list[ActionResult]:
        request = DelegateActionsRequest(partition=partition, actions=actions)
        failure: TidemarkError = Unavailable(
            f"nobody has said where partition {partition} is", partition=str(partition)
        )
        for _ in range(_HOPS_MAX):
            broker = self._brokers.get(partition)
            address = broker or self._storages.get(partition)
            if address is None:
                break
            try:
                return await self._ask(address, request)
            except NotOwner as error:
                failure = error
                self.driven_by(partition, error.metadata.get("owner", ""))
            except Unavailable as error:
                failure = error
                if broker is None:
                    break
                self.driven_by(partition, "")
        raise failure

    async def _ask(self, address: str, request: DelegateActionsRequest) -> list[ActionResult]:
        owner = OwnerServiceStub(await self._channels.to(address))
        try:
            answer = await self._clock.wait_for(owner.DelegateActions(request), self._timeout_ms)
        except TimeoutError:
            raise Unavailable(f"{address} did not answer in {self._timeout_ms} ms") from None
        return list(answer.results)
