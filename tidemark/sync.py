"""The blocking client: the same surface for scripts, notebooks and threads.

Runs the asynchronous client on a separate thread and waits for its results. May be used from
several threads at once. It adds no behaviour: `tidemark.Client` documents each call.

    import tidemark.sync

    with tidemark.sync.connect("127.0.0.1:7400") as client:
        client.publisher("greetings/ada").publish(b"Hello, Ada!")
        with client.subscribe(["greetings/ada"]) as deliveries:
            for delivery in deliveries:
                print(delivery.payload)
                delivery.ack()
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Self, TypeVar

from opentelemetry.trace import Span

from tidemark import client as asynchronous
from tidemark.client import Message, PublishReceipt
from tidemark.client.arguments import Duration, check_instance, check_iterable, check_lmq_names
from tidemark.client.client import DEFAULT_GROUP, MAX_LEASE_MS
from tidemark.client.consume.eviction import OnEvicted
from tidemark.client.consume.failed_acks import SettleFailed
from tidemark.client.loop_thread import LoopThread
from tidemark.errors import ClientClosed, TidemarkError
from tidemark.topics import Topic

__all__ = [
    "Client",
    "Delivery",
    "DeliveryBatch",
    "Publisher",
    "PulledBatch",
    "Subscription",
    "connect",
]

Taken = TypeVar("Taken", asynchronous.Delivery, asynchronous.DeliveryBatch)


def connect(addresses: str | Iterable[str], **options: Any) -> "Client":
    """A blocking client; use it in `with`. The options are those of `tidemark.connect`."""
    return Client(asynchronous.connect(addresses, **options))


class Client:
    """See `tidemark.Client`."""

    def __init__(self, client: asynchronous.Client) -> None:
        self.client_id = client.client_id
        self._client = client
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        self._loop.start()
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client and end its thread. Calls from other threads raise ClientClosed."""
        try:
            with suppress(ClientClosed):  # already closed, or never entered
                self._loop.run(self._client.close())
        finally:
            self._loop.stop()

    def publisher(self, lmq_name: str) -> "Publisher":
        return Publisher(self._loop.run(self._client.publisher(lmq_name)), self._loop)

    def subscribe(
        self,
        lmq_names: Iterable[str],
        *,
        group: str = DEFAULT_GROUP,
        credit: int | None = None,
        visibility_ms: Duration = 0,
        max_lease_ms: Duration = MAX_LEASE_MS,
        on_evicted: OnEvicted | None = None,
        on_settle_failed: SettleFailed | None = None,
    ) -> "Subscription":
        """Callbacks run in the client's thread: they must not call the client."""
        names = check_lmq_names(lmq_names)  # read in the caller's thread

        async def subscribe() -> asynchronous.Subscription:
            return self._client.subscribe(
                names,
                group=group,
                credit=credit,
                visibility_ms=visibility_ms,
                max_lease_ms=max_lease_ms,
                on_evicted=on_evicted,
                on_settle_failed=on_settle_failed,
            )

        return Subscription(self._loop.run(subscribe()), self._loop)

    def pull(
        self,
        lmq_name: str,
        *,
        group: str = DEFAULT_GROUP,
        max_messages: int = 100,
        wait_ms: Duration = 0,
        visibility_ms: Duration = 0,
    ) -> "PulledBatch":
        pulled = self._client.pull(
            lmq_name,
            group=group,
            max_messages=max_messages,
            wait_ms=wait_ms,
            visibility_ms=visibility_ms,
        )
        return PulledBatch(self._loop.run(pulled), self._loop)

    def settle(self, pulled: "PulledBatch", *, ack: bool = True, delay_ms: Duration = 0) -> None:
        check_instance("pulled", pulled, PulledBatch)
        self._loop.run(self._client.settle(pulled.pulled, ack=ack, delay_ms=delay_ms))

    def create_topic(self, name: str, **settings: Any) -> Topic:
        return self._loop.run(self._client.create_topic(name, **settings))


class Publisher:
    """See `tidemark.Publisher`."""

    def __init__(self, publisher: asynchronous.Publisher, loop: LoopThread) -> None:
        self.lmq_name = publisher.lmq_name
        self._publisher = publisher
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(ClientClosed):  # already closed with its client
            self._loop.run(self._publisher.close())

    def publish(
        self,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        fairness_key: str = "",
        delay_ms: Duration = 0,
        ttl_ms: Duration | None = None,
        sequence: int = 0,
    ) -> PublishReceipt:
        return self._loop.run(
            self._publisher.publish(
                payload,
                headers=headers,
                fairness_key=fairness_key,
                delay_ms=delay_ms,
                ttl_ms=ttl_ms,
                sequence=sequence,
            )
        )

    def publish_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        fairness_key: str = "",
        delay_ms: Duration = 0,
        ttl_ms: Duration | None = None,
        sequence: int = 0,
    ) -> list[PublishReceipt]:
        return self._loop.run(
            self._publisher.publish_many(
                list(check_iterable("messages", messages)),  # read in the caller's thread
                fairness_key=fairness_key,
                delay_ms=delay_ms,
                ttl_ms=ttl_ms,
                sequence=sequence,
            )
        )


class Subscription:
    """See `tidemark.Subscription`; use it in `with`, and iterate over it."""

    def __init__(self, subscription: asynchronous.Subscription, loop: LoopThread) -> None:
        self.group = subscription.group
        self._subscription = subscription
        self._loop = loop

    def __enter__(self) -> Self:
        self._loop.run(self._subscription.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def lmq_names(self) -> list[str]:
        return self._subscription.lmq_names

    def close(self) -> None:
        with suppress(ClientClosed):  # already closed with its client
            self._loop.run(self._subscription.close())

    def flush(self) -> None:
        self._loop.run(self._subscription.flush())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> "Delivery":
        delivery = self._take(self._subscription)
        if delivery is None:
            raise StopIteration
        return Delivery(delivery, self._loop)

    def batches(self) -> Iterator["DeliveryBatch"]:
        batches = self._subscription.batches()
        while (batch := self._take(batches)) is not None:
            yield DeliveryBatch(batch, self._loop)

    def _take(self, items: AsyncIterator[Taken]) -> Taken | None:
        """The next item, or None at the end. An interrupted call releases the item that it took."""
        taken: list[Taken] = []

        async def take() -> None:
            async for item in items:
                taken.append(item)
                return

        try:
            self._loop.run(take())
            return taken[0] if taken else None
        except BaseException as error:
            if isinstance(error, ClientClosed) and self._subscription.closed:
                return None  # the end, in threads that were busy as in those that waited
            self._loop.begin(_release(taken))
            raise


async def _release(taken: list[Taken]) -> None:
    with suppress(TidemarkError):
        for each in taken:
            await each.release()


class _Settleable:
    """The settlement calls that a delivery and a batch have in common."""

    def __init__(
        self, settled: asynchronous.Delivery | asynchronous.DeliveryBatch, loop: LoopThread
    ) -> None:
        self._settled = settled
        self._loop = loop

    @property
    def lmq_name(self) -> str:
        return self._settled.lmq_name

    @property
    def group(self) -> str:
        return self._settled.group

    @property
    def offset(self) -> int:
        return self._settled.offset

    @property
    def attempt(self) -> int:
        return self._settled.attempt

    @property
    def epoch(self) -> int:
        return self._settled.epoch

    @property
    def fairness_key(self) -> str:
        return self._settled.fairness_key

    @property
    def publish_time_ms(self) -> int:
        return self._settled.publish_time_ms

    def span(self) -> AbstractContextManager[Span]:
        return self._settled.span()

    def ack(self, *, wait: bool = False) -> None:
        self._loop.run(self._settled.ack(wait=wait))

    def nack(self, delay_ms: Duration = 0) -> None:
        self._loop.run(self._settled.nack(delay_ms))

    def dead_letter(self, why: str) -> None:
        self._loop.run(self._settled.dead_letter(why))

    def release(self) -> None:
        self._loop.run(self._settled.release())

    def extend(self, visibility_ms: Duration) -> int:
        return self._loop.run(self._settled.extend(visibility_ms))


class Delivery(_Settleable):
    """See `tidemark.Delivery`."""

    def __init__(self, delivery: asynchronous.Delivery, loop: LoopThread) -> None:
        super().__init__(delivery, loop)
        self._delivery = delivery

    @property
    def payload(self) -> bytes:
        return self._delivery.payload

    @property
    def headers(self) -> dict[str, str]:
        return self._delivery.headers


class DeliveryBatch(_Settleable):
    """See `tidemark.DeliveryBatch`."""

    def __init__(self, batch: asynchronous.DeliveryBatch, loop: LoopThread) -> None:
        super().__init__(batch, loop)
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __iter__(self) -> Iterator[Delivery]:
        return (Delivery(each, self._loop) for each in self._batch)

    @property
    def payloads(self) -> list[bytes]:
        return self._batch.payloads


class PulledBatch:
    """See `tidemark.PulledBatch`."""

    def __init__(self, pulled: asynchronous.PulledBatch, loop: LoopThread) -> None:
        self.pulled = pulled
        self._loop = loop

    def __len__(self) -> int:
        return len(self.pulled)

    def __iter__(self) -> Iterator[Delivery]:
        return (Delivery(each, self._loop) for each in self.pulled)

    @property
    def payloads(self) -> list[bytes]:
        return self.pulled.payloads
