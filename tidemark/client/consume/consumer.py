"""A consumer of a session: its deliveries, until they are taken.

For programs that use sessions directly. It owns the deliveries of one group that were not taken
yet, and settles nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, Protocol

from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.broker.v1.broker_pb2 import HandOuts
from tidemark.api.broker.v1.message_pb2 import Delivery
from tidemark.client.transport.codec import check
from tidemark.errors import TidemarkError

_ADD: Final = subscription_pb2.SYNC_MODE_PARTIAL_ADD
_REMOVE: Final = subscription_pb2.SYNC_MODE_PARTIAL_REMOVE


class Taker(Protocol):
    """Receives the deliveries of one consumer."""

    def take(self, delivery: Delivery) -> None: ...
    def hand_outs_noted(self, report: HandOuts) -> None: ...
    def end(self, error: TidemarkError) -> None: ...


class Host(Protocol):
    """The session that a consumer is part of."""

    def give_credit(self, consumer_id: int, messages: int) -> None: ...
    def close_consumer(self, consumer_id: int) -> None: ...
    async def sync(
        self, sync: subscription_pb2.SubscriptionSync
    ) -> subscription_pb2.SubscriptionSyncResult: ...


class Consumer:
    """A group and a credit. Iterate over it for deliveries, in batches as they arrive."""

    def __init__(self, session: Host, consumer_id: int, group: str) -> None:
        self.consumer_id = consumer_id
        self.group = group
        self._session = session
        self._arrived: list[Delivery] = []
        self._wakeup = asyncio.Event()
        self._ended: TidemarkError | None = None

    async def subscribe(
        self, *lmq_names: str, start: subscription_pb2.StartPosition | None = None
    ) -> None:
        """Subscribe to queues; raises the first refusal."""
        await self._sync(_ADD, lmq_names, start)

    async def unsubscribe(self, *lmq_names: str) -> None:
        await self._sync(_REMOVE, lmq_names)

    def give_credit(self, messages: int) -> None:
        """Allow that many messages in addition."""
        self._session.give_credit(self.consumer_id, messages)

    def close(self) -> None:
        """No further deliveries; what arrived can still be taken and settled."""
        self._session.close_consumer(self.consumer_id)

    async def deliveries(self) -> list[Delivery]:
        """Everything that has arrived, at least one; raises the error of an ended session."""
        while not self._arrived:
            if self._ended is not None:
                raise self._ended
            self._wakeup.clear()
            await self._wakeup.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    async def __aiter__(self) -> AsyncIterator[list[Delivery]]:
        while True:
            yield await self.deliveries()

    def take(self, delivery: Delivery) -> None:
        self._arrived.append(delivery)
        self._wakeup.set()

    def hand_outs_noted(self, report: HandOuts) -> None:
        """It reports none."""

    def end(self, error: TidemarkError) -> None:
        self._ended = error
        self._wakeup.set()

    async def _sync(
        self,
        mode: subscription_pb2.SyncMode.ValueType,
        lmq_names: Iterable[str],
        start: subscription_pb2.StartPosition | None = None,
    ) -> None:
        sync = subscription_pb2.SubscriptionSync(
            group=self.group, mode=mode, consumer_id=self.consumer_id
        )
        for lmq_name in lmq_names:
            sync.entries.add(lmq_name=lmq_name, start=start)
        for result in (await self._session.sync(sync)).results:
            check(result)
