"""A session: one connection of one client. It reads frames and has their parts carried out.

Results that arrive while a frame is being written go into the next one. Bounded on both sides: it
stops reading while too many requests are unanswered, and stops reserving while too many deliveries
are unsent; so a slow consumer or a huge publisher slows only itself.
"""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from broker_svc.api.frames import split_to_fit
from broker_svc.api.request_checks import check_counts
from broker_svc.api.session_consumers import DEFAULT_GROUP, SessionConsumers
from broker_svc.api.session_output import SessionOutput
from broker_svc.components import BrokerComponents
from broker_svc.exclusive.registry import Subscriber
from broker_svc.links.partition_link import PartitionLink
from broker_svc.publish.publishers import Publisher, PublisherCache
from broker_svc.publish.run_arrays import Run, runs_of
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.errors import (
    InvalidArgument,
    ShuttingDown,
    TidemarkError,
)
from tidemark.names import validate_client_id, validate_producer_id
from tidemark.rpc.statuses import to_status
from tidemark.turns import NEXT_TURN

UNANSWERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Runs, settlements and renewals that a session may have read and not answered."""

OVERHEAD_BYTES: Final = 256
"""The cost of each of them, and of each reservation in a renewal, beside its bytes: many
small ones add up."""

UNREAD_RESULTS_MAX: Final = 20_000
"""Results that a client may leave unread before the broker stops reading from it."""

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
        self._output = SessionOutput()
        self._consumers = SessionConsumers(components, self._output)
        self._subscriber = Subscriber("", self._notify)
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._read_on = asyncio.Event()
        self._read_on.set()
        self._last_frame_ms = components.clock.monotonic_ms()
        self._syncing = asyncio.Lock()
        self._closing: Exception | None = None
        self._draining = False
        self._grace: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = 0
        """Publishers that are being opened without a task."""

    # --- life ----------------------------------------------------------------------------------

    async def frames(
        self, requests: AsyncIterator[broker_pb2.SessionRequest]
    ) -> AsyncGenerator[broker_pb2.SessionResponse, None]:
        """The frames to the client, until the connection ends."""
        first = await self._hello(requests)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("the first frame of a session carries `hello`", field="hello")
        self._welcome(first.hello)
        reader = asyncio.create_task(self._read(first, requests))
        try:
            while True:
                await self._output.wakeup.wait()
                self._output.wakeup.clear()
                if self._closing is not None:
                    raise self._closing
                frame, unsent_bytes = self._output.take()
                if frame_bytes := frame.ByteSize():
                    for piece in split_to_fit(frame, frame_bytes):
                        yield piece
                    self._output.room.taken_bytes -= unsent_bytes
                    self._components.dispatcher.room_made(self._output.room)
                    self._make_room()
                if self._may_end(reader) and not self._output.wakeup.is_set():
                    return
        finally:
            reader.cancel()
            self._close()  # before anything waits: the call may be cancelled a second time
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self, grace_ms: int) -> None:
        """Notify the client that the broker is going away.

        It gets no more messages, and has the grace period to settle those that it holds, so that
        they are not handled twice. The session ends when everything is answered.
        """
        self._draining = True
        self._consumers.close()
        self._output.frame.go_aways.add(grace_ms=grace_ms)
        self._output.wakeup.set()
        self._grace = asyncio.create_task(self._components.clock.sleep_ms(grace_ms))
        self._grace.add_done_callback(lambda _: self._output.wakeup.set())

    def _may_end(self, reader: asyncio.Task[None]) -> bool:
        if self._unanswered:
            return False
        if reader.done():
            return True
        return self._grace is not None and (
            self._grace.done() or not len(self._consumers.deliveries)
        )

    def partition_moved(self, link: PartitionLink) -> None:
        """Notify the client that another broker holds a partition now."""
        self._output.frame.go_aways.add(partition=link.partition, address=link.holder_address)
        self._output.wakeup.set()

    def check_alive(self, now_ms: int) -> None:
        """End the session of a client that was silent for too long."""
        if self._unanswered_bytes > UNANSWERED_BYTES_MAX:
            self._last_frame_ms = now_ms  # storage is slow, so the client's frames are not read
        if now_ms - self._last_frame_ms > self._components.settings.client_timeout_ms:
            self._closing = InvalidArgument(
                f"client {self.client_id} sent nothing, not even a heartbeat", field="heartbeat"
            )
            self._output.wakeup.set()

    def expire_publishers(self, now_ms: int, idle_ms: int) -> None:
        self._publishers.expire(now_ms, idle_ms)

    async def _hello(
        self, requests: AsyncIterator[broker_pb2.SessionRequest]
    ) -> broker_pb2.SessionRequest | None:
        """The first frame; None from a stream that sends nothing within the client timeout."""
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
        self._output.frame.welcome.session_id = self.session_id
        self._output.frame.welcome.broker_id = settings.broker_id
        self._output.frame.welcome.cluster_id = settings.cluster_id
        self._output.frame.welcome.partitions = settings.partitions
        self._output.frame.welcome.client_timeout_ms = settings.client_timeout_ms
        for link in self._components.links.values():
            if link.holder_address:
                self.partition_moved(link)
        self._output.wakeup.set()

    def _close(self) -> None:
        """Everything the client held goes back at once (V6), and its leases are dropped."""
        if self._grace is not None:
            self._grace.cancel()
        for task in self._tasks:
            task.cancel()
        self._components.subscriptions.detach(self._subscriber)
        self._consumers.close()
        held = self._consumers.deliveries.take_all()
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
                self._last_frame_ms = self._components.clock.monotonic_ms()
                if request.HasField("hello"):
                    raise InvalidArgument("hello comes once, in the first frame", field="hello")
                self._take(request)
                await NEXT_TURN  # the frame to storage is on its way before another is asked for
                if not self._read_on.is_set():
                    await self._read_on.wait()
        except Exception as error:  # an unexpected error ends the session, not only its reader
            self._closing = error
        finally:
            self._output.wakeup.set()

    # --- frames --------------------------------------------------------------------------------

    def _take(self, request: broker_pb2.SessionRequest) -> None:
        """One frame; its parts in the order of the contract. Nothing here waits."""
        frame_bytes = request.ByteSize()
        if frame_bytes > limits.SMALL_FRAME_BYTES:
            check_counts(request)
        # Read, and so checked, before anything is carried out.
        arrays = [runs for each in request.run_arrays[:] if (runs := runs_of(each))]
        if len(request.ListFields()) > bool(arrays):  # else it is a frame of plain runs
            self._take_parts(request)
        for runs in arrays:
            share_bytes = frame_bytes // len(arrays) // len(runs) + OVERHEAD_BYTES
            self._unanswered += len(runs)
            self._unanswered_bytes += len(runs) * share_bytes
            self._components.run_arrays.submit(
                runs,
                self._publishers,
                self._producer_id,
                self,
                share_bytes,
                self._last_frame_ms,
            )
        self._make_room()

    def _take_parts(self, request: broker_pb2.SessionRequest) -> None:
        """All parts but runs in columns."""
        for consumer in request.open_consumers:
            self._guard(self._open_consumer, consumer, consumer_id=consumer.consumer_id)
        for opened in request.open_publishers:
            self._open(opened)
        for publisher_id in request.destroy_publishers:
            self._guard(
                self._components.publishers.destroy, publisher_id, publisher_id=publisher_id
            )
        for sync in request.syncs:
            self._start(self._sync(sync))
        for settlement in request.settlements:
            size = settlement.ByteSize() + OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.settlements.submit(
                settlement, self.client_id, self._consumers.deliveries, partial(self._settled, size)
            )
        for acks in request.acks:
            size = acks.ByteSize() + (len(acks.delivery_tags) + 1) * OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.settlements.acks.submit(
                acks, self.client_id, self._consumers.deliveries, partial(self._acked, size)
            )
        for credit in request.credits:
            give_credit = partial(self._consumers.give_credit, self._subscriber)
            self._guard(give_credit, credit, consumer_id=credit.consumer_id)
        if request.HasField("heartbeat"):
            self._heartbeat(request.heartbeat)
        for report in request.hand_outs:
            self._guard(self._consumers.report_hand_outs, report, consumer_id=report.consumer_id)
        for renewal in request.renewals:
            named = len(renewal.delivery_tags) + len(renewal.receipts)
            size = renewal.ByteSize() + (named + 1) * OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.renewals.submit(
                renewal, self.client_id, self._consumers.deliveries, partial(self._renewed, size)
            )
        for run in request.runs:
            size = run.batch.ByteSize() + OVERHEAD_BYTES
            self._unanswered += 1
            self._unanswered_bytes += size
            self._components.publish_path.submit(
                run, self._publishers, self._producer_id, _Published(self, size)
            )

    def _guard(self, do: Callable[[T], None], what: T, **whose: int) -> None:
        """Carry out a part that has no result; a failure is sent as a SessionError."""
        try:
            do(what)
        except TidemarkError as error:
            self._output.frame.errors.add(error=to_status(error), **whose)
            self._output.wakeup.set()

    def published(self, result: message_pb2.PublishResult, size: int) -> None:
        self._output.frame.published.append(result)
        self._output.wakeup.set()
        self._unanswered -= 1
        self._unanswered_bytes -= size
        if not self._read_on.is_set():
            self._make_room()

    def stored(
        self,
        runs: Sequence[Run],
        places: Sequence[int],
        publishers: Sequence[Publisher],
        share_bytes: int,
    ) -> None:
        self._output.add_receipts(runs, places, publishers)
        count = len(runs)
        self._unanswered -= count
        self._unanswered_bytes -= count * share_bytes
        if not self._read_on.is_set():
            self._make_room()

    def _settled(self, size: int, result: message_pb2.SettleResult) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= size
        if result.request_id or result.HasField("error"):
            self._output.frame.settled.append(result)
        self._output.wakeup.set()
        if not self._read_on.is_set():
            self._make_room()

    def _acked(self, size: int, result: broker_pb2.AcksResult) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= size
        self._output.frame.acked.append(result)
        self._output.wakeup.set()
        self._make_room()

    def _renewed(self, size: int, result: broker_pb2.RenewalResult) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= size
        self._output.frame.renewed.append(result)
        self._output.wakeup.set()
        self._make_room()

    def _make_room(self) -> None:
        """Read on while the client's requests are answered and it reads the results."""
        unread = len(self._tasks) + self._opening
        if self._output.wakeup.is_set():  # else all results are on their way
            unread += self._output.results
        if self._unanswered_bytes > UNANSWERED_BYTES_MAX or unread > UNREAD_RESULTS_MAX:
            self._read_on.clear()
        elif not self._read_on.is_set():
            self._read_on.set()

    def _open(self, opened: broker_pb2.OpenPublisher) -> None:
        """Open a publisher; its result has the error. Few need a task."""
        opens = False
        done = partial(self._opened, opened)
        with suppress(TidemarkError):  # raised again below
            opens = self._components.publish_path.open_soon(opened.lmq_name, self._publishers, done)
        if opens:
            self._unanswered += 1
            self._opening += 1
        else:
            self._start(self._open_publisher(opened))

    def _opened(self, opened: broker_pb2.OpenPublisher, publisher: Publisher | None) -> None:
        self._unanswered -= 1
        self._opening -= 1
        if publisher is None:
            self._start(self._open_publisher(opened))
            return
        result = self._output.frame.publishers.add(request_id=opened.request_id)
        result.publisher_id = publisher.publisher_id
        result.partitions.extend(self._components.publish_path.healthy(publisher.partitions))
        self._output.wakeup.set()

    async def _open_publisher(self, opened: broker_pb2.OpenPublisher) -> None:
        result = broker_pb2.OpenPublisherResult(request_id=opened.request_id)
        try:
            publisher = await self._components.publish_path.open(opened.lmq_name, self._publishers)
            result.publisher_id = publisher.publisher_id
            result.partitions.extend(self._components.publish_path.healthy(publisher.partitions))
        except TidemarkError as error:
            result.error.CopyFrom(to_status(error))
        self._output.frame.publishers.append(result)
        self._output.wakeup.set()

    # --- consuming -----------------------------------------------------------------------------

    def _open_consumer(self, opened: broker_pb2.OpenConsumer) -> None:
        if self._draining:
            raise ShuttingDown("the broker is stopping")
        self._consumers.open(opened)

    async def _sync(self, sync: subscription_pb2.SubscriptionSync) -> None:
        try:
            consumer = self._consumers.get(sync.consumer_id)
            async with self._syncing:  # in the order in which they came
                result = await self._components.subscriptions.sync(
                    self._subscriber, sync, consumer.group, consumer
                )
        except TidemarkError as error:
            # The caller of the sync gets the error for each of its entries.
            result = subscription_pb2.SubscriptionSyncResult(request_id=sync.request_id)
            for entry in sync.entries:
                result.results.add(lmq_name=entry.lmq_name, error=to_status(error))
            if not sync.entries:
                self._output.frame.errors.add(error=to_status(error), consumer_id=sync.consumer_id)
        self._output.frame.synced.append(result)
        self._output.wakeup.set()

    def _heartbeat(self, heartbeat: broker_pb2.HeartbeatFrame) -> None:
        """Repeat the notices of queues that the client reports and does not own (E5)."""
        for held in heartbeat.held:
            group = held.group or DEFAULT_GROUP
            notices = self._components.subscriptions.heartbeat(
                self._subscriber, group, held.entries
            )
            self._output.frame.unsubscribed.extend(notices)
        self._output.wakeup.set()

    def _notify(self, notice: subscription_pb2.UnsubscribeNotice) -> None:
        self._output.frame.unsubscribed.append(notice)
        self._output.wakeup.set()

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
        self._output.wakeup.set()


class _Published:
    """Passes the result of one run to its session."""

    __slots__ = ("_session", "_size")

    def __init__(self, session: Session, size: int) -> None:
        self._session = session
        self._size = size

    def __call__(self, result: message_pb2.PublishResult) -> None:
        self._session.published(result, self._size)
