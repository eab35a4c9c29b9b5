"""Traffic through a cluster, while its members come and go: what was published and acknowledged."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count

import tidemark
from tests.support.local_broker import in_time, until
from tidemark.errors import TidemarkError
from tidemark.names import partition_of


def name_in(partition: int, topic: str, partitions: int) -> str:
    """The name of a lite queue that lives in the partition."""
    names = (f"{topic}/{number}" for number in range(10_000))
    return next(name for name in names if partition_of(name, partitions) == partition)


_numbers = count(1)


class Traffic:
    """One client that publishes to plain, shared and exclusive queues, and consumes from them.

    Its payloads are its own: other tests may have left messages in the same queues, which are
    consumed and not counted.
    """

    def __init__(self, client: tidemark.Client, partitions: int) -> None:
        """The topics `orders`, and `own`, which is exclusive, exist."""
        self._client = client
        lite = [name_in(number, "orders", partitions) for number in range(partitions)]
        self._owned = [name_in(number, "own", partitions) for number in range(partitions)]
        self._names = ["orders", *lite, *self._owned]
        self._shared = ["orders", *lite]
        self.published: Counter[tuple[str, bytes]] = Counter()
        self.acked: Counter[tuple[str, bytes]] = Counter()
        self._prefix = b"%d." % next(_numbers)
        self._round = 0
        self._stop = asyncio.Event()

    async def publish(self) -> None:
        """Until stopped: one message to each queue, again and again."""
        publishers = [await self._client.publisher(name) for name in self._names]
        while not self._stop.is_set():
            await self.publish_once(publishers)

    async def publish_once(self, publishers: list[tidemark.Publisher]) -> None:
        payload = self._prefix + b"%d" % self._round
        self._round += 1
        await asyncio.gather(*(each.publish(payload) for each in publishers))
        self.published.update((each.lmq_name, payload) for each in publishers)

    async def rounds(self, count: int) -> None:
        """Until so many rounds more were published."""
        until_round = self._round + count

        async def is_over() -> bool:
            return self._round >= until_round

        await until(is_over)

    async def consume(self, deliveries: tidemark.Subscription) -> None:
        async for delivery in deliveries:
            with suppress(TidemarkError):  # its time ran out, or its broker was gone for long
                await delivery.ack(wait=True)
                if delivery.payload.startswith(self._prefix):
                    self.acked[delivery.lmq_name, delivery.payload] += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publishing and consuming; then everything that was published is consumed."""
        async with AsyncExitStack() as stack:
            shared = await stack.enter_async_context(self._client.subscribe(self._shared))
            owned = await stack.enter_async_context(self._client.subscribe(self._owned, group="o"))
            consuming = [asyncio.create_task(self.consume(each)) for each in (shared, owned)]
            publishing = asyncio.create_task(self.publish())
            yield
            self._stop.set()
            await in_time(publishing)

            async def all_acked() -> bool:
                return not self.published - self.acked

            await until(all_acked)
            for each in consuming:
                each.cancel()
            await asyncio.gather(*consuming, return_exceptions=True)
