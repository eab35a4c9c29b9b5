"""A session: one connection of one client, everything it sends and everything it is sent.

Gathers whatever is to be sent while a frame is being written into the next one. Bounded on both
sides: it stops reading while too much of what it read is unanswered, and stops reserving while too
much of what it has to send is unread; so a slow consumer or a huge publisher slows itself only.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from broker_svc.api.frames import split_to_fit
from broker_svc.components import BrokerComponents
from broker_svc.consume.consumer import Consumer, Feed, Room, Slices
from broker_svc.consume.deliveries import Deliveries, HeldDelivery, fill_delivery
from broker_svc.consume.hand_outs import HandOuts
from broker_svc.consume.renewals import check_renewal
from broker_svc.exclusive.registry import Subscriber
from broker_svc.links.partition_link import PartitionLink
from broker_svc.publish.publishers import PublisherCache
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.errors import (
    InvalidArgument,
    QuotaExceeded,
    ShuttingDown,
    TidemarkError,
)
from tidemark.names import validate_client_id, validate_group, validate_producer_id
from tidemark.rpc.statuses import to_status

UNANSWERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Runs and settlements that a session may have read and not answered."""

OVERHEAD_BYTES: Final = 256
"""What each of them, and each delivery, costs besides its bytes: many small ones are a lot, too."""

UNREAD_RESULTS_MAX: Final = 20_000
"""Results that a client may leave unread before it is read from no longer."""

UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Deliveries that a session may have reserved and not sent."""

CONSUMERS_MAX: Final = 1000
DEFAULT_GROUP: Final = "default"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """One client's connection. `frames` serves it until either side ends it."""

    def __init__(self, session_id: int, components: BrokerComponents) -> None:
        self.session_id = session_id
        self.client_id = ""
        self._producer_id = ""
        self._components = components
        self._publishers = PublisherCache(
            components.publishers, components.settings.publishers_per_connection_max
        )
        self._deliveries = Deliveries(components.directory)
        self._consumers: dict[int, Consumer] = {}
        self._subscriber = Subscriber("", session_id, self._notify)
        self._out = broker_pb2.SessionResponse()
        self._something = asyncio.Event()
        self._room = Room(UNSENT_BYTES_MAX)
        self._unsent_bytes = 0
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._read_on = asyncio.Event()
        self._read_on.set()
        self._last_heard_ms = components.clock.monotonic_ms()
        self._syncing = asyncio.Lock()
        self._closing: Exception | None = None
        self._draining = False
        self._grace: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life ----------------------------------------------------------------------------------

    async def frames(
        self, requests: AsyncIterator[broker_pb2.SessionRequest]
    ) -> AsyncGenerator[broker_pb2.SessionResponse, None]:
        """What goes to the client, until the connection ends."""
        first = await self._hello(requests)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("the first frame of a session carries `hello`", field="hello")
        self._welcome(first.hello)
        reader = asyncio.create_task(self._read(first, requests))
        try:
            while True:
                await self._something.wait()
                self._something.clear()
                if self._closing is not None:
                    raise self._closing
                frame, self._out = self._out, broker_pb2.SessionResponse()
                if frame_bytes := frame.ByteSize():
                    sent_bytes, self._unsent_bytes = self._unsent_bytes, 0
                    for piece in split_to_fit(frame, frame_bytes):
                        yield piece
                    self._room.taken_bytes -= sent_bytes
                    self._components.dispatcher.room_made(self._room)
                    self._make_room()
                if self._may_end(reader) and not self._something.is_set():
                    return
        finally:
            reader.cancel()
            self._close()  # before anything waits: the call may be cancelled a second time
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self, grace_ms: int) -> None:
        """Tell the client that the broker is going away.

        It gets no more messages, and has the grace to settle those that it holds: what it handles
        meanwhile is not handled again. The session ends when all is answered.
        """
        self._draining = True
        for consumer in self._consumers.values():
            self._components.dispatcher.close(consumer)
        self._out.go_aways.add(grace_ms=grace_ms)
        self._something.set()
        self._grace = asyncio.create_task(self._components.clock.sleep_ms(grace_ms))
        self._grace.add_done_callback(lambda _: self._something.set())

    def _may_end(self, reader: asyncio.Task[None]) -> bool:
        if self._unanswered:
            return False
        if reader.done():
            return True
        return self._grace is not None and (self._grace.done() or not len(self._deliveries))

    def partition_moved(self, link: PartitionLink) -> None:
        """Tell the client that its queues in a partition are another broker's now."""
        self._out.go_aways.add(partition=link.partition, address=link.owner_address)
        self._something.set()

    def check_alive(self, now_ms: int) -> None:
        """End the session of a client that was silent for too long."""
        if self._unanswered_bytes > UNANSWERED_BYTES_MAX:
            self._last_heard_ms = now_ms  # storage is slow: what the client says is not read
        if now_ms - self._last_heard_ms > self._components.settings.client_timeout_ms:
            self._closing = InvalidArgument(
                f"client {self.client_id} sent nothing, not even a heartbeat", field="heartbeat"
            )
            self._something.set()

    def expire_publishers(self, now_ms: int, idle_ms: int) -> None:
        self._publishers.expire(now_ms, idle_ms)

    async def _hello(
        self, requests: AsyncIterator[broker_pb2.SessionRequest]
    ) -> broker_pb2.SessionRequest | None:
        """The first frame; a stream that sends none does not hold a session for ever."""
        try:
            timeout_ms = self._components.settings.client_timeout_ms
            return await self._components.clock.wait_for(anext(requests, None), timeout_ms)
        except TimeoutError:
            return None

    def _welcome(self, hello: broker_pb2.Hello) -> None:
        validate_client_id(hello.client_id)
        if hello.producer_id:
            validate_producer_id(hello.producer_id)
        self.client_id = self._subscriber.client_id = hello.client_id
        self._producer_id = hello.producer_id or hello.client_id
        self._components.subscriptions.attach(self._subscriber)
        settings = self._components.settings
        self._out.welcome.session_id = self.session_id
        self._out.welcome.broker_id = settings.broker_id
        self._out.welcome.cluster_id = settings.cluster_id
        self._out.welcome.partitions = settings.partitions
        self._out.welcome.client_timeout_ms = settings.client_timeout_ms
        for link in self._components.links.values():
            if link.fenced:
                self.partition_moved(link)
        self._something.set()

    def _close(self) -> None:
        """Everything the client held goes back at once (V6), and its leases are dropped."""
        if self._grace is not None:
            self._grace.cancel()
        for task in self._tasks:
            task.cancel()
        self._components.subscriptions.detach(self._subscriber)
        for consumer in self._consumers.values():
            self._components.dispatcher.close(consumer)
        held = self._deliveries.take_all()
        self._components.settlements.give_back(held, failed=not self._draining)
        self._publishers.close()

    async def _read(
        self,
        first: broker_pb2.SessionRequest,
        requests: AsyncIterator[broker_pb2.SessionRequest],
    ) -> None:
        try:
            self._take(first)
            async for request in requests:
                self._last_heard_ms = self._components.clock.monotonic_ms()
                if request.HasField("hello"):
                    raise InvalidArgument("hello comes once, in the first frame", field="hello")
                self._take(request)
                await self._read_on.wait()
        except Exception as error:  # also what nobody foresaw ends the session, not only its reader
            self._closing = error
        finally:
            self._something.set()

    # --- frames --------------------------------------------------------------------------------

    def _take(self, request: broker_pb2.SessionRequest) -> None:
        """One frame; its parts in the order of the contract. Nothing here waits."""
        _check_parts(request)
        for consumer in request.open_consumers:
            self._guard(self._open_consumer, consumer, consumer_id=consumer.consumer_id)
        for opened in request.open_publishers:
            self._start(self._open_publisher(opened))
        for publisher_id in request.destroy_publishers:
            self._guard(
                self._components.publishers.destroy, publisher_id, publisher_id=publisher_id
            )
        for sync in request.syncs:
            self._start(self._sync(sync))
        for credit in request.credits:
            self._guard(self._credit, credit, consumer_id=credit.consumer_id)
        if len(request.settlements) > limits.SETTLEMENTS_PER_FRAME_MAX:
            raise InvalidArgument(
                f"at most {limits.SETTLEMENTS_PER_FRAME_MAX} settlements a frame",
                field="settlements",
            )
        for settlement in request.settlements:
            size = settlement.ByteSize() + OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.settlements.submit(
                settlement, self.client_id, self._deliveries, partial(self._settled, size)
            )
        if request.HasField("heartbeat"):
            self._heartbeat(request.heartbeat)
        for report in request.hand_outs:
            self._guard(self._hand_out, report, consumer_id=report.consumer_id)
        for renewal in request.renewals:
            check_renewal(renewal)
            size = renewal.ByteSize() + OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.renewals.submit(
                renewal, self.client_id, self._deliveries, partial(self._renewed, size)
            )
        if len(request.runs) > limits.FRAME_RUNS_MAX:
            raise InvalidArgument(f"at most {limits.FRAME_RUNS_MAX} runs a frame", field="runs")
        for run in request.runs:
            size = run.batch.ByteSize() + OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.publish_path.submit(
                run, self._publishers, self._producer_id, _Published(self, size)
            )
        self._make_room()

    def _guard(self, do: Callable[[T], None], what: T, **whose: int) -> None:
        """Do something that has no result of its own; a failure is told as such."""
        try:
            do(what)
        except TidemarkError as error:
            self._out.errors.add(error=to_status(error), **whose)
            self._something.set()

    def published(self, result: message_pb2.PublishResult, size: int) -> None:
        self._out.published.append(result)
        self._something.set()
        self._unanswered -= 1
        self._unanswered_bytes -= size
        self._make_room()

    def _settled(self, size: int, result: message_pb2.SettleResult) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= size
        if result.request_id or result.HasField("error"):
            self._out.settled.append(result)
        self._something.set()
        if not self._read_on.is_set():
            self._make_room()

    def _renewed(self, size: int, result: broker_pb2.RenewalResult) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= size
        self._out.renewed.append(result)
        self._something.set()
        self._make_room()

    def _make_room(self) -> None:
        """Read on while what was read is answered, and what was answered is read."""
        out = self._out
        unread = len(out.published) + len(out.settled) + len(out.errors) + len(self._tasks)
        unread += len(out.publishers) + len(out.synced) + len(out.unsubscribed)
        unread += len(out.hand_outs) + len(out.renewed)
        if self._unanswered_bytes > UNANSWERED_BYTES_MAX or unread > UNREAD_RESULTS_MAX:
            self._read_on.clear()
        else:
            self._read_on.set()

    async def _open_publisher(self, opened: broker_pb2.OpenPublisher) -> None:
        result = broker_pb2.OpenPublisherResult(request_id=opened.request_id)
        try:
            publisher = await self._components.publish_path.open(opened.lmq_name, self._publishers)
            result.publisher_id = publisher.publisher_id
            result.partitions.extend(self._components.publish_path.healthy(publisher.partitions))
        except TidemarkError as error:
            result.error.CopyFrom(to_status(error))
        self._out.publishers.append(result)
        self._something.set()

    # --- consuming -----------------------------------------------------------------------------

    def _open_consumer(self, opened: broker_pb2.OpenConsumer) -> None:
        if self._draining:
            raise ShuttingDown("the broker is stopping")
        if opened.consumer_id in self._consumers or not opened.consumer_id:
            raise InvalidArgument("a consumer has a number of its own", field="consumer_id")
        if len(self._consumers) >= CONSUMERS_MAX:
            raise QuotaExceeded(f"at most {CONSUMERS_MAX} consumers a session")
        group = opened.group or DEFAULT_GROUP
        validate_group(group)
        if opened.visibility_ms and not (
            limits.VISIBILITY_TIMEOUT_MS_MIN
            <= opened.visibility_ms
            <= limits.VISIBILITY_TIMEOUT_MS_MAX
        ):
            raise InvalidArgument(
                f"{limits.VISIBILITY_TIMEOUT_MS_MIN} to {limits.VISIBILITY_TIMEOUT_MS_MAX} ms",
                field="visibility_ms",
            )
        consumer = Consumer(
            opened.consumer_id,
            group,
            self.session_id,
            opened.visibility_ms,
            self._deliver,
            partial(self._refuse, opened.consumer_id),
            self._room,
            HandOuts() if opened.reports_hand_outs else None,
        )
        self._consumers[opened.consumer_id] = consumer
        consumer.credit = min(opened.credit, limits.CREDIT_MAX)

    def _refuse(self, consumer_id: int, error: TidemarkError) -> None:
        self._out.errors.add(error=to_status(error), consumer_id=consumer_id)
        self._something.set()

    def _credit(self, given: broker_pb2.ConsumerCredit) -> None:
        consumer = self._consumer(given.consumer_id)
        if given.close:
            self._components.subscriptions.close_consumer(self._subscriber, consumer)
            self._components.dispatcher.close(consumer)
            del self._consumers[given.consumer_id]
            return
        consumer.stopped = given.stop
        consumer.credit = min(consumer.credit + given.messages, limits.CREDIT_MAX)
        self._components.dispatcher.reserve_for(consumer)

    def _hand_out(self, report: broker_pb2.HandOuts) -> None:
        """Note how far the client hands out, and confirm it."""
        consumer = self._consumer(report.consumer_id)
        if consumer.hand_outs is None:
            raise InvalidArgument("the consumer reports no hand-outs", field="reports_hand_outs")
        consumer.hand_outs.report(report)
        self._out.hand_outs.append(report)
        if report.urgent:
            self._something.set()

    def _consumer(self, consumer_id: int) -> Consumer:
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise InvalidArgument(f"there is no consumer {consumer_id}", field="consumer_id")
        return consumer

    async def _sync(self, sync: subscription_pb2.SubscriptionSync) -> None:
        try:
            consumer = self._consumer(sync.consumer_id)
            async with self._syncing:  # in the order in which they came
                result = await self._components.subscriptions.sync(
                    self._subscriber, sync, consumer.group, consumer
                )
        except TidemarkError as error:
            # Whoever waits for the sync hears it for each of its entries.
            result = subscription_pb2.SubscriptionSyncResult(request_id=sync.request_id)
            for entry in sync.entries:
                result.results.add(lmq_name=entry.lmq_name, error=to_status(error))
            if not sync.entries:
                self._out.errors.add(error=to_status(error), consumer_id=sync.consumer_id)
        self._out.synced.append(result)
        self._something.set()

    def _heartbeat(self, heartbeat: broker_pb2.HeartbeatFrame) -> None:
        """Tell again what the client reports and does not own (E5)."""
        for held in heartbeat.held:
            group = held.group or DEFAULT_GROUP
            notices = self._components.subscriptions.heartbeat(
                self._subscriber, group, held.entries
            )
            self._out.unsubscribed.extend(notices)
        self._something.set()

    def _notify(self, notice: subscription_pb2.UnsubscribeNotice) -> None:
        self._out.unsubscribed.append(notice)
        self._something.set()

    def _deliver(self, consumer: Consumer, feed: Feed, slices: Slices) -> None:
        now_ms = self._components.clock.monotonic_ms()
        for each in slices:
            held = HeldDelivery.of(each, feed.queue, feed.group, consumer.hand_outs, now_ms)
            delivery = self._out.deliveries.add()
            fill_delivery(delivery, each, feed.lmq_name, feed.group, feed.partition)
            delivery.consumer_id = consumer.consumer_id
            delivery.delivery_tag = self._deliveries.add(held)
            if held.place is not None:
                self._components.given_notes.watch(self._deliveries, held)
            self._unsent_bytes += len(each.body) + OVERHEAD_BYTES
            self._room.taken_bytes += len(each.body) + OVERHEAD_BYTES
        self._something.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._unanswered += 1
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unanswered -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception), "only a cancellation is more than that"
            self._closing = error
        self._something.set()


def check_held(held: Sequence[broker_pb2.HeldSubscriptions]) -> None:
    """Raise for a heartbeat that reports more than any client can have subscribed to."""
    entries = sum(len(each.entries) for each in held)
    if max(len(held), entries) > limits.SUBSCRIPTIONS_PER_SESSION_MAX:
        raise InvalidArgument(
            f"a client has at most {limits.SUBSCRIPTIONS_PER_SESSION_MAX} subscriptions",
            field="held",
        )


def _check_parts(request: broker_pb2.SessionRequest) -> None:
    parts: tuple[tuple[str, Sequence[object]], ...] = (
        ("open_consumers", request.open_consumers),
        ("open_publishers", request.open_publishers),
        ("destroy_publishers", request.destroy_publishers),
        ("syncs", request.syncs),
        ("credits", request.credits),
        ("hand_outs", request.hand_outs),
        ("renewals", request.renewals),
    )
    for field, items in parts:
        if len(items) > limits.FRAME_PARTS_MAX:
            raise InvalidArgument(f"at most {limits.FRAME_PARTS_MAX} {field} a frame", field=field)
    if sum(len(each.entries) for each in request.syncs) > limits.FRAME_ENTRIES_MAX:
        raise InvalidArgument(
            f"at most {limits.FRAME_ENTRIES_MAX} subscriptions a frame", field="syncs"
        )
    renewed = sum(len(each.delivery_tags) + len(each.receipts) for each in request.renewals)
    if renewed > limits.RENEWALS_PER_FRAME_MAX:
        raise InvalidArgument(
            f"at most {limits.RENEWALS_PER_FRAME_MAX} reservations a frame", field="renewals"
        )
    check_held(request.heartbeat.held)


class _Published:
    """Tells a session the result of one of its runs."""

    __slots__ = ("_session", "_size")

    def __init__(self, session: Session, size: int) -> None:
        self._session = session
        self._size = size

    def __call__(self, result: message_pb2.PublishResult) -> None:
        self._session.published(result, self._size)
