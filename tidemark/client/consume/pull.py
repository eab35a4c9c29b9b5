"""Pulling: messages by a call instead of a stream, for programs that fetch now and then.

What was pulled is settled by calls as well. Calls go to the broker that the client is connected to,
which passes them on where another one owns the queue.
"""

from collections.abc import Iterator, Sequence

from tidemark.api.broker.v1 import message_pb2
from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.client.transport.codec import Action, Range, settlement_of
from tidemark.client.transport.unary import UnaryClient
from tidemark.clock import Clock


class PulledBatch:
    """What one pull brought: a sequence of deliveries, maybe of none."""

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[DeliveryBatch]) -> None:
        self.batches = batches
        """The same, run by run."""

    def __len__(self) -> int:
        return sum(batch.count for batch in self.batches)

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for batch in self.batches for delivery in batch)

    @property
    def payloads(self) -> list[bytes]:
        return [payload for batch in self.batches for payload in batch.payloads]


class Puller:
    """Pulls deliveries and settles them over unary calls. Calls are not repeated."""

    def __init__(self, calls: UnaryClient, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock

    async def pull(
        self, lmq_name: str, group: str, max_messages: int, wait_ms: int, visibility_ms: int
    ) -> PulledBatch:
        response = await self._calls.pull(
            lmq_name,
            group,
            max_messages=max_messages,
            wait_ms=wait_ms,
            visibility_ms=visibility_ms,
        )
        now_ms = self._clock.monotonic_ms()
        return PulledBatch(
            [DeliveryBatch(each, self, session_id=0, now_ms=now_ms) for each in response.deliveries]
        )

    async def settle_all(self, batches: Sequence[DeliveryBatch], action: Action) -> None:
        """Settle what is left of several batches in one call; raises the first failure."""
        settlements = []
        for batch in batches:
            ranges = batch.mark(action)
            if ranges is not None:
                settlements.append(settlement_of(batch.receipt, action, ranges))
        if settlements:
            await self._calls.settle(settlements)

    async def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> None:
        await self.settle(batch, message_pb2.Ack(), ranges)

    async def settle(
        self, batch: DeliveryBatch, action: Action, ranges: Sequence[Range]
    ) -> message_pb2.SettleResult:
        (result,) = await self._calls.settle([settlement_of(batch.receipt, action, ranges)])
        return result
