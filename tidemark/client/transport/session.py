"""One session with a broker: publish, consume and settle over a single stream.

Owns the stream: sends frames, and passes results and deliveries to the calls and consumers that
wait for them. Requests that are made while a frame is being written go into the next one, without a
timer. It never reconnects and never repeats: when the stream ends, every pending call fails with
the reason.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, Self

import grpc

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import PublishRun, Release, SettleResult
from tidemark.client.transport.codec import (
    Action,
    Range,
    Stored,
    Target,
    check,
    deliveries_in_order,
    fill_settlement,
    settlement_of,
    tags_of,
)
from tidemark.client.transport.frames import Outgoing, PlainRun
from tidemark.client.transport.notifier import Notifier
from tidemark.client.transport.pending_calls import PendingCalls
from tidemark.errors import Internal, TidemarkError, Unavailable
from tidemark.rpc.callbacks import Done, pass_on
from tidemark.rpc.channel import open_channel
from tidemark.turns import NEXT_TURN

_log = logging.getLogger(__name__)


class SentRuns(Protocol):
    """Receives the result of each run that went in columns, by one of these."""

    def stored(self, request_id: int, stored: Stored) -> None: ...
    def answered(
        self, request_id: int, result: message_pb2.PublishResult | TidemarkError
    ) -> None: ...


class Taker(Protocol):
    """Receives the deliveries of one consumer."""

    def take(self, delivery: message_pb2.Delivery) -> None: ...
    def take_array(self, deliveries: message_pb2.DeliveryArray) -> None: ...
    def deliveries_ended(self, tags: set[int]) -> None: ...
    def hand_outs_noted(self, report: broker_pb2.HandOuts) -> None: ...
    def end(self, error: TidemarkError) -> None: ...


class Session:
    """A connection of one client. Close it with `close`, or use it as a context manager."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[broker_pb2.SessionRequest, broker_pb2.SessionResponse]",
        frames: AsyncIterator[broker_pb2.SessionResponse],
        first: broker_pb2.SessionResponse,
    ) -> None:
        self.welcome = first.welcome
        self.errors: list[broker_pb2.SessionError] = []
        """Failures of requests that have no result in the protocol."""
        self.failed_settlements: list[SettleResult] = []
        """Failed settlements that no call waits for."""
        self.unsubscribed: list[subscription_pb2.UnsubscribeNotice] = []
        self.go_aways: list[broker_pb2.GoAway] = []
        self.notified = Notifier()
        """Notified when one of the four lists above has grown, and when the session ends."""
        self.prepare: Callable[[], bool] | None = None
        """Called before each frame is built: the last moment to submit something for it. Returns
        whether more is left than fits."""
        self._channel = channel
        self._call = call
        self._frames = frames
        self._ended: TidemarkError | None = None
        self._closing = False
        self._last_id = 0
        self._publishes = PendingCalls[message_pb2.PublishResult]()
        self._sent_runs: dict[int, SentRuns] = {}
        """Runs that went in columns, by their request ids."""
        self._settles = PendingCalls[SettleResult]()
        self._acks = PendingCalls[broker_pb2.AcksResult]()
        self._syncs = PendingCalls[subscription_pb2.SubscriptionSyncResult]()
        self._opens = PendingCalls[broker_pb2.OpenPublisherResult]()
        self._renewals = PendingCalls[broker_pb2.RenewalResult]()
        self._consumers: dict[int, Taker] = {}
        self._last_consumer_id = 0
        self._outgoing = Outgoing()
        self._wakeup = asyncio.Event()
        self._reader = asyncio.create_task(self._read(first))
        self._writer = asyncio.create_task(self._write())

    @classmethod
    async def open(
        cls,
        address: str,
        client_id: str,
        *,
        producer_id: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> Self:
        """Open a session with the broker at `host:port`; raises if the broker refuses it."""
        channel = open_channel(address, credentials=credentials)
        try:
            call = BrokerServiceStub(channel).Session()
            hello = broker_pb2.Hello(client_id=client_id, producer_id=producer_id)
            await call.write(broker_pb2.SessionRequest(hello=hello))
            frames = aiter(call)
            first = await anext(frames, None)
            if first is None or not first.HasField("welcome"):
                raise Unavailable("the broker ended the session without a welcome")
        except BaseException:
            await channel.close()
            raise
        return cls(channel, call, frames, first)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def ended(self) -> TidemarkError | None:
        """Why the session has ended; None while it is open."""
        return self._ended

    async def close(self) -> None:
        """Send waiting requests, wait for the results, and end the session.

        When cancelled, it ends at once.
        """
        self._closing = True
        self._wakeup.set()
        try:
            if self._ended is None:
                await asyncio.gather(self._writer, self._reader, return_exceptions=True)
        finally:
            await self.abort()

    async def abort(self) -> None:
        """End the session at once, as a killed client would; returns once its tasks have ended."""
        self.end()
        try:
            await asyncio.gather(self._reader, self._writer, return_exceptions=True)
        finally:
            await self._channel.close()  # without a grace period: it waits for nothing

    def end(self) -> None:
        """End the session at once. It does not await, so it cannot be cancelled halfway."""
        self._end(Unavailable("the session was closed"))
        self._reader.cancel()
        self._writer.cancel()
        self._call.cancel()

    # --- publishing ----------------------------------------------------------------------------

    def send_run(self, run: PublishRun, done: Done[message_pb2.PublishResult]) -> None:
        """Send a run unchanged, after all sent before it; `done` gets its result."""
        run.request_id = self._next_id()
        self._outgoing.runs.append(run)
        self._publishes.call_back(run.request_id, done)

    def send_plain_runs(self, runs: Sequence[PlainRun], sent: SentRuns) -> int:
        """Send runs that have nothing but messages and a sequence: they travel in columns.

        Returns the request id of the first; the others follow without gaps.
        """
        self._check_open()
        first_id = self._last_id + 1
        self._last_id += len(runs)
        self._outgoing.plain_runs.add(first_id, runs)
        for request_id in range(first_id, self._last_id + 1):
            self._sent_runs[request_id] = sent
        return first_id

    async def open_publisher(self, lmq_name: str) -> broker_pb2.OpenPublisherResult:
        """Have the broker materialize a queue before the first run."""
        request_id = self._next_id()
        self._outgoing.parts.open_publishers.add(request_id=request_id, lmq_name=lmq_name)
        result = await self._opens.expect(request_id)
        check(result)
        return result

    # --- consuming -----------------------------------------------------------------------------

    def open_taker(
        self,
        taker: Taker,
        group: str,
        *,
        credit: int = 0,
        visibility_ms: int = 0,
        reports_hand_outs: bool = False,
        takes_arrays: bool = False,
    ) -> int:
        """A consumer without queues; returns its id. A failure to open it is in `errors`."""
        self._check_open()
        self._last_consumer_id += 1
        consumer_id = self._last_consumer_id
        self._consumers[consumer_id] = taker
        self._outgoing.parts.open_consumers.add(
            consumer_id=consumer_id,
            group=group,
            credit=credit,
            visibility_ms=visibility_ms,
            reports_hand_outs=reports_hand_outs,
            takes_arrays=takes_arrays,
        )
        return consumer_id

    def give_credit(self, consumer_id: int, messages: int) -> None:
        self._check_open()
        self._outgoing.parts.credits.add(consumer_id=consumer_id, messages=messages)

    def stop_consumer(self, consumer_id: int) -> None:
        """Let nothing more be sent to a consumer; its queues stay its own."""
        self._check_open()
        self._outgoing.parts.credits.add(consumer_id=consumer_id, stop=True)

    def report_hand_outs(self, report: broker_pb2.HandOuts) -> None:
        """Report permitted hand-outs; the confirmation goes to the taker of the consumer."""
        self._check_open()
        self._outgoing.parts.hand_outs.append(report)

    def submit_renewal(
        self, renewal: broker_pb2.Renewal
    ) -> "asyncio.Future[broker_pb2.RenewalResult]":
        """Ask for more time; the result comes later."""
        renewal.request_id = self._next_id()
        self._outgoing.parts.renewals.append(renewal)
        return self._renewals.expect(renewal.request_id)

    def close_consumer(self, consumer_id: int) -> None:
        """Close a consumer; deliveries that still arrive for it are released."""
        self._check_open()
        self._outgoing.parts.credits.add(consumer_id=consumer_id, close=True)
        consumer = self._consumers.pop(consumer_id, None)
        if consumer is not None:
            consumer.end(Unavailable("the consumer was closed"))

    async def sync(
        self, sync: subscription_pb2.SubscriptionSync
    ) -> subscription_pb2.SubscriptionSyncResult:
        """Change or confirm subscriptions; each entry has its own result."""
        sync.request_id = self._next_id()
        self._outgoing.parts.syncs.append(sync)
        return await self._syncs.expect(sync.request_id)

    # --- settling ------------------------------------------------------------------------------

    def send_settlement(
        self, target: Target, action: Action, ranges: Iterable[Range], done: Done[SettleResult]
    ) -> None:
        """Send a settlement, built in place; `done` gets its result."""
        request_id = self._next_id()
        settlements = self._outgoing.parts.settlements
        try:
            fill_settlement(settlements.add(request_id=request_id), target, action, ranges)
        except BaseException:
            del settlements[-1]
            raise
        self._settles.call_back(request_id, done)

    def send_acks(self, delivery_tags: Sequence[int], done: Done[broker_pb2.AcksResult]) -> None:
        """Acknowledge whole deliveries of this session."""
        request_id = self._next_id()
        self._outgoing.parts.acks.add(request_id=request_id, delivery_tags=delivery_tags)
        self._acks.call_back(request_id, done)

    def settle_nowait(self, target: Target, action: Action, ranges: Iterable[Range] = ()) -> None:
        """Settle; only a failure is reported, in `failed_settlements`."""
        self._check_open()
        self._outgoing.parts.settlements.append(settlement_of(target, action, ranges))

    def heartbeat(self, held: Iterable[broker_pb2.HeldSubscriptions] = ()) -> None:
        """Report to the broker that the client is alive, and the queues it believes it owns."""
        self._check_open()
        heartbeat = broker_pb2.HeartbeatFrame(held=held)  # replaces one that was not sent yet
        self._outgoing.parts.heartbeat.CopyFrom(heartbeat)
        self._outgoing.parts.heartbeat.SetInParent()

    # --- the stream ----------------------------------------------------------------------------

    def wake(self) -> None:
        """A part has something to send."""
        self._wakeup.set()

    def _check_open(self) -> None:
        """Every request passes here: raise if it could never be sent."""
        if self._ended is not None:
            raise self._ended
        if self._closing:
            raise Unavailable("the session is being closed")
        self._wakeup.set()

    def _next_id(self) -> int:
        self._check_open()
        self._last_id += 1
        return self._last_id

    async def _write(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                frame = self._next_frame()
                if frame.ListFields():
                    await self._call.write(frame)
                elif self._closing:
                    await self._call.done_writing()
                    return
        except TidemarkError:
            pass  # the reader gets the reason
        except Exception as error:  # a bug must not leave callers waiting
            _log.exception("a frame could not be built")
            self._end(Internal(f"a frame could not be built: {error!r}"))
            self._call.cancel()

    def _next_frame(self) -> broker_pb2.SessionRequest:
        """Everything that has accumulated, as far as it fits a frame."""
        more = self.prepare is not None and not self._closing and self.prepare()
        frame = self._outgoing.next_frame()
        if not self._outgoing.has_rest and not more and not self._closing:
            self._wakeup.clear()
        return frame

    async def _read(self, first: broker_pb2.SessionResponse) -> None:
        error: TidemarkError = Unavailable("the broker has ended the session")
        try:
            self._take(first)
            async for frame in self._frames:
                self._take(frame)
                await NEXT_TURN  # callers continue before another frame is asked for
        except TidemarkError as reason:
            error = reason
        except Exception as mistake:  # nor may a bug here
            _log.exception("a frame could not be processed")
            error = Internal(f"a frame could not be processed: {mistake!r}")
        finally:
            self._end(error)

    def _take(self, frame: broker_pb2.SessionResponse) -> None:
        arrays = frame.published_arrays[:]
        for array in arrays:
            number = iter(array.receipts[:])
            receipts = zip(number, number, number, number, strict=True)
            for request_id, queue_id, first_offset, publisher_id in receipts:
                sent = self._sent_runs.pop(request_id, None)
                if sent is not None:
                    sent.stored(request_id, (queue_id, first_offset, publisher_id))
        if len(frame.ListFields()) > bool(arrays):  # else it is a frame of receipts
            self._take_parts(frame)

    def _take_parts(self, frame: broker_pb2.SessionResponse) -> None:
        """All parts but receipts in columns."""
        for published in frame.published:
            sent = self._sent_runs.pop(published.request_id, None)
            if sent is not None:
                pass_on(partial(sent.answered, published.request_id), published)
            else:
                self._publishes.answer(published.request_id, published)
        for settled in frame.settled:
            if not self._settles.answer(settled.request_id, settled):
                self.failed_settlements.append(settled)
        for acked in frame.acked:
            self._acks.answer(acked.request_id, acked)
        for synced in frame.synced:
            self._syncs.answer(synced.request_id, synced)
        for opened in frame.publishers:
            self._opens.answer(opened.request_id, opened)
        for renewed in frame.renewed:
            self._renewals.answer(renewed.request_id, renewed)
        for report in frame.hand_outs:  # before the deliveries that they may concern
            taker = self._consumers.get(report.consumer_id)
            if taker is not None:
                taker.hand_outs_noted(report)
        for part in deliveries_in_order(frame):
            consumer = self._consumers.get(part.consumer_id)
            if consumer is None:
                self._release(tags_of(part))
            elif isinstance(part, message_pb2.Delivery):
                consumer.take(part)
            else:
                consumer.take_array(part)
        if frame.ended:
            self._take_ended(frame.ended)
        self.errors.extend(frame.errors)
        self.unsubscribed.extend(frame.unsubscribed)
        self.go_aways.extend(frame.go_aways)
        if frame.errors or frame.settled or frame.unsubscribed or frame.go_aways:
            self.notified.notify_all()

    def _release(self, tags: Iterable[int]) -> None:
        """Release deliveries for a consumer that is closed."""
        if not self._closing and self._ended is None:
            for tag in tags:
                self.settle_nowait(tag, Release())

    def _take_ended(self, ended: Iterable[broker_pb2.EndedDelivery]) -> None:
        tags: dict[int, set[int]] = {}
        for each in ended:
            tags.setdefault(each.consumer_id, set()).add(each.delivery_tag)
        for consumer_id, of_consumer in tags.items():
            if (taker := self._consumers.get(consumer_id)) is not None:
                taker.deliveries_ended(of_consumer)

    def _end(self, error: TidemarkError) -> None:
        """Nothing more will arrive: fail every pending call."""
        if self._ended is not None:
            return
        self._ended = error
        for pending in (
            self._publishes,
            self._settles,
            self._acks,
            self._syncs,
            self._opens,
            self._renewals,
        ):
            pending.fail(error)
        sent_runs, self._sent_runs = self._sent_runs, {}
        for request_id, sent in sent_runs.items():
            pass_on(partial(sent.answered, request_id), error)
        for consumer in self._consumers.values():
            consumer.end(error)
        self.notified.notify_all()
