"""Pulls: messages by a call instead of a stream, for programs that fetch now and then.

Pulled messages are settled by calls as well. All calls go to the broker that the client is
connected to; a queue whose partition another broker holds fails with NOT_OWNER.
"""

from collections.abc import Callable, Iterator, Sequence

from tidemark.api.broker.v1 import broker_pb2, message_pb2
from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.client.consume.failed_acks import explained
from tidemark.client.home_loop import HomeLoop
from tidemark.client.transport.codec import Action, Range, settlement_of
from tidemark.client.transport.repeater import Repeater
from tidemark.client.transport.unary import UnaryClient
from tidemark.clock import Clock
from tidemark.errors import ReservationExpired


class PulledBatch:
    """The result of one pull: a sequence of deliveries, possibly empty."""

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
    """Pulls deliveries and settles them over unary calls, which are repeated for a while.

    Repeating a settlement is a success (V6). A pull whose answer was lost may have reserved
    messages that come again after their visibility timeout, as if its caller had repeated it.
    """

    def __init__(
        self, client: Callable[[int | None], UnaryClient], repeater: Repeater, clock: Clock
    ) -> None:
        """`client` makes a client whose calls may take that long, for every try."""
        self._home_loop = HomeLoop()
        self._client = client
        self._repeater = repeater
        self._clock = clock

    async def pull(
        self, lmq_name: str, group: str, max_messages: int, wait_ms: int, visibility_ms: int
    ) -> PulledBatch:
        until_ms = self._clock.monotonic_ms() + wait_ms

        async def attempt(left_ms: int | None) -> broker_pb2.PullResponse:
            return await self._client(left_ms).pull(
                lmq_name,
                group,
                max_messages=max_messages,
                wait_ms=max(0, until_ms - self._clock.monotonic_ms()),
                visibility_ms=visibility_ms,
            )

        response = await self._repeater.repeat(attempt, extra_ms=wait_ms)
        now_ms = self._clock.monotonic_ms()
        return PulledBatch(
            [DeliveryBatch(each, self, session_id=0, now_ms=now_ms) for each in response.deliveries]
        )

    async def settle_all(self, batches: Sequence[DeliveryBatch], action: Action) -> None:
        """Settle the rest of several batches in one call; raises the first failure."""
        marked = [(batch, batch.mark_rest(action)) for batch in batches]
        settling = [(batch, ranges) for batch, ranges in marked if ranges is not None]
        if settling:
            await self._settle(action, settling)

    def check_usable(self) -> None:
        """Raise in another event loop than that of the client."""
        self._home_loop.check()

    async def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> None:
        await self.settle(batch, message_pb2.Ack(), ranges)

    async def settle_again(
        self, batch: DeliveryBatch, action: Action, ranges: Sequence[Range]
    ) -> None:
        await self.settle(batch, action, ranges)

    async def settle(
        self, batch: DeliveryBatch, action: Action, ranges: Sequence[Range]
    ) -> message_pb2.SettleResult:
        try:
            (result,) = await self._settle(action, [(batch, ranges)])
        except ReservationExpired as error:
            raise explained(batch, action, ranges, error) from None
        return result

    async def _settle(
        self, action: Action, settling: Sequence[tuple[DeliveryBatch, Sequence[Range]]]
    ) -> Sequence[message_pb2.SettleResult]:
        settlements = [settlement_of(batch.receipt, action, ranges) for batch, ranges in settling]
        try:
            return await self._repeater.repeat(
                lambda left_ms: self._client(left_ms).settle(settlements)
            )
        except BaseException:  # also cancelled: its outcome is not known here
            for batch, ranges in settling:
                batch.mark_failed(action, ranges)
            raise
