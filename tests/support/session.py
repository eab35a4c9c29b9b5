"""A session that tests and benchmarks drive call by call, without the SDK on top.

`Consumer` keeps the deliveries of one group until they are taken, and settles nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.broker.v1.broker_pb2 import HandOuts
from tidemark.api.broker.v1.message_pb2 import (
    Delivery,
    DeliveryArray,
    Message,
    MessageBatch,
    PublishReceipt,
    PublishResult,
    PublishRun,
    Settlement,
    SettleResult,
)
from tidemark.client.transport import session
from tidemark.client.transport.codec import (
    Action,
    Range,
    Target,
    check,
    receipt_of,
    settlement_of,
)
from tidemark.errors import TidemarkError

_ADD: Final = subscription_pb2.SYNC_MODE_PARTIAL_ADD
_REMOVE: Final = subscription_pb2.SYNC_MODE_PARTIAL_REMOVE


def batch_of(messages: MessageBatch | Sequence[bytes | Message]) -> MessageBatch:
    """Messages as a proto; plain bytes are payloads without headers."""
    if isinstance(messages, MessageBatch):
        return messages
    return MessageBatch(
        messages=[Message(payload=each) if isinstance(each, bytes) else each for each in messages]
    )


class Session(session.Session):
    """The session of the client, with calls that wait for their result."""

    async def until_ended(self) -> TidemarkError:
        """Wait until the session has ended; returns the reason."""
        await self.notified.wait_for(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    async def publish(
        self,
        lmq_name: str,
        messages: MessageBatch | Sequence[bytes | Message],
        *,
        fairness_key: str = "",
        delay_ms: int = 0,
        ttl_ms: int = 0,
        sequence: int = 0,
        partition: int | None = None,
        publisher_id: int = 0,
        traceparent: str = "",
    ) -> PublishReceipt:
        """Store a run; returns once it is on disk, raises the error if it is not stored."""
        run = PublishRun(
            lmq_name=lmq_name,
            batch=batch_of(messages),
            fairness_key=fairness_key,
            delay_ms=delay_ms,
            ttl_ms=ttl_ms,
            sequence=sequence,
            partition=partition,
            publisher_id=publisher_id,
            traceparent=traceparent,
        )
        run.count = len(run.batch.messages)
        return receipt_of(await self.submit(run))

    def submit(self, run: PublishRun) -> "asyncio.Future[PublishResult]":
        """Send a run unchanged, after all submitted before it; the future gets its result."""
        run.request_id = self._next_id()
        self._outgoing.runs.append(run)
        return self._publishes.expect(run.request_id)

    def destroy_publisher(self, publisher_id: int) -> None:
        """Destroy a publisher; an unknown id is reported in `errors`."""
        self._check_open()
        self._outgoing.parts.destroy_publishers.append(publisher_id)

    def open_consumer(
        self,
        group: str = "",
        *,
        credit: int = 0,
        visibility_ms: int = 0,
        reports_hand_outs: bool = False,
        takes_arrays: bool = False,
    ) -> "Consumer":
        """A consumer without queues; a failure to open it is reported in `errors`."""
        consumer = Consumer(self, self._last_consumer_id + 1, group)
        self.open_taker(
            consumer,
            group,
            credit=credit,
            visibility_ms=visibility_ms,
            reports_hand_outs=reports_hand_outs,
            takes_arrays=takes_arrays,
        )
        return consumer

    async def settle(
        self, target: Target, action: Action, ranges: Iterable[Range] = ()
    ) -> SettleResult:
        """Settle and wait for the result; raises the error if it failed."""
        result = await self.submit_settlement(settlement_of(target, action, ranges))
        check(result)
        return result

    def submit_settlement(self, settlement: Settlement) -> "asyncio.Future[SettleResult]":
        """Send a settlement; the future gets its result."""
        settlement.request_id = self._next_id()
        self._outgoing.parts.settlements.append(settlement)
        return self._settles.expect(settlement.request_id)


class Consumer:
    """A group and a credit. Iterate over it for deliveries, in batches as they arrive."""

    def __init__(self, session: "Session", consumer_id: int, group: str) -> None:
        self.consumer_id = consumer_id
        self.group = group
        self._session = session
        self.arrays = 0
        """How many arrays of deliveries have arrived."""
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

    def take_array(self, deliveries: DeliveryArray) -> None:
        """Deliveries in columns, kept as single ones."""
        self.arrays += 1
        for tag, receipt, lmq_name, offset, count, body, visible_ms, time_ms, number, epoch in zip(
            deliveries.delivery_tags,
            deliveries.receipts,
            deliveries.lmq_names,
            deliveries.first_offsets,
            deliveries.counts,
            deliveries.bodies,
            deliveries.visibility_ms,
            deliveries.publish_times_ms,
            deliveries.partitions,
            deliveries.epochs,
            strict=True,
        ):
            self.take(
                Delivery(
                    consumer_id=deliveries.consumer_id,
                    delivery_tag=tag,
                    receipt=receipt,
                    lmq_name=lmq_name,
                    group=deliveries.group,
                    first_offset=offset,
                    count=count,
                    batch=MessageBatch.FromString(body),
                    delivery_count=1,
                    visibility_ms=visible_ms,
                    publish_time_ms=time_ms,
                    partition=number,
                    epoch=epoch,
                )
            )

    def take(self, delivery: Delivery) -> None:
        self._arrived.append(delivery)
        self._wakeup.set()

    def hand_outs_noted(self, report: HandOuts) -> None:
        """It reports none."""

    def deliveries_ended(self, tags: set[int]) -> None:
        """Those of consumers that report none are not named."""
        raise AssertionError(tags)

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
