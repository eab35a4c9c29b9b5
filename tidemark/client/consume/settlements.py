"""Settlements of deliveries, gathered and repeated until each has a definite result.

Acks of one batch travel as ranges of one settlement, without a future for each. A settlement goes
by tag on the session that brought the delivery, and by receipt on any other. It never decides the
outcome of a message.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from opentelemetry.trace import Span

from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, message_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Extend, Nack
from tidemark.client.arguments import not_encoded
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.consume.failed_acks import FailedAcks, explained
from tidemark.client.consume.marks import merge
from tidemark.client.home_loop import HomeLoop
from tidemark.client.spans import begin_settle
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.codec import ACTION_NAMES, Action, Range
from tidemark.client.transport.connection import Connection, Identity
from tidemark.client.transport.session import Session
from tidemark.errors import (
    ClientClosed,
    CommitOutcomeUnknown,
    NotOwner,
    ReservationExpired,
    TidemarkError,
)
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import messaging

_ACK: Final = Ack()
_FAILED: Final = Nack()
_WHOLE: Final = ()
"""The ranges of a whole batch."""

_ANSWER_MS_MAX: Final = 60_000
"""How long after its reservation has run out a settlement that was sent is repeated: only
storage knows whether it was applied, and a broker that was lost does not answer."""


class _Settling:
    """One settlement until its definite answer."""

    __slots__ = ("action", "answer", "batch", "by_receipt", "counted", "ranges", "sent", "span")

    def __init__(
        self,
        batch: DeliveryBatch,
        action: Action,
        ranges: Sequence[Range],
        answer: "asyncio.Future[message_pb2.SettleResult] | None" = None,
        *,
        by_receipt: bool = False,
    ) -> None:
        self.batch = batch
        self.by_receipt = by_receipt
        """Whether it may be settled already, so that its tag may be gone."""
        self.span: Span | None = None
        self.action = action
        self.ranges = ranges
        self.answer = answer
        self.counted = isinstance(action, Extend)
        """Whether its messages no longer count as held here."""
        self.sent = False
        """Whether a broker may have carried it out, without an answer."""

    def is_over(self, now_ms: int) -> bool:
        """Whether it has failed: its time ran out before it was sent, or no broker has answered for
        long. Only storage knows whether a settlement that was sent was in time."""
        patience_ms = _ANSWER_MS_MAX if self.sent else 0
        return self.batch.deadline_ms + patience_ms <= now_ms


class Settlements:
    """All settlements of one feed."""

    def __init__(
        self,
        connection: Connection,
        identity: Identity,
        settled: Callable[[DeliveryBatch, int], None],
        settled_whole: Callable[[Iterable[DeliveryBatch]], None],
        extended: Callable[[DeliveryBatch, int], None],
        moved: "Callable[[int, str], Settlements | None]",
        failed_acks: FailedAcks,
    ) -> None:
        self._home_loop = HomeLoop()
        self._connection = connection
        self._clock = identity.clock
        self._backoff = Backoff(identity.random, min_ms=20, may_move=True)
        self._settled = settled
        self._settled_whole = settled_whole
        self._extended = extended
        self._moved = moved
        """Called for a partition that another broker serves; returns who settles there."""
        self._failed_acks = failed_acks
        self._acks: dict[DeliveryBatch, list[Range] | tuple[()]] = {}
        self._to_send: list[_Settling] = []
        self._later: list[_Settling] = []
        self._resuming: asyncio.Task[None] | None = None
        self._under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False

    # --- requests of deliveries ----------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise once it is closed, and in another event loop than its own."""
        self._home_loop.check()
        if self._closed:
            raise ClientClosed("the subscription is closed: its messages went back")

    async def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> None:
        """Gather acks until the next frame; no ranges are the whole batch."""
        acks = self._acks.get(batch)
        if acks is not None:
            if isinstance(acks, list):  # else the whole batch is acked already
                acks.extend(ranges)
            return
        if not self._acks:  # else the connection was woken for the first of them
            self._quiet.clear()
            self._connection.wake()
        self._acks[batch] = list(ranges) if ranges else _WHOLE

    async def settle(
        self, batch: DeliveryBatch, action: Action, ranges: Sequence[Range]
    ) -> message_pb2.SettleResult:
        """Settle, and wait for the answer; raises why it failed."""
        result = await self._settle(batch, action, ranges)
        if isinstance(action, Extend):
            now_ms = self._clock.monotonic_ms()
            batch.deadline_ms = batch.extended_until_ms = now_ms + result.visibility_ms
            self._extended(batch, now_ms)
        return result

    async def settle_again(
        self, batch: DeliveryBatch, action: Action, ranges: Sequence[Range]
    ) -> None:
        """Wait for settlements that were handed over before, or have failed; raises why they fail.

        They are repeated, which changes nothing if they have succeeded (V6).
        """
        handed_over = self._acks.pop(batch, None)
        if handed_over is not None:
            self._put(_Settling(batch, _ACK, handed_over))  # before the repetition
        await self._settle(batch, action, ranges, by_receipt=True)

    async def _settle(
        self,
        batch: DeliveryBatch,
        action: Action,
        ranges: Sequence[Range],
        *,
        by_receipt: bool = False,
    ) -> message_pb2.SettleResult:
        answer: asyncio.Future[message_pb2.SettleResult] = (
            asyncio.get_running_loop().create_future()
        )
        self._put(_Settling(batch, action, ranges, answer, by_receipt=by_receipt))
        try:
            return await answer
        except BaseException:  # also cancelled: its outcome is not known here
            batch.mark_failed(action, ranges)
            raise

    def give_back(self, batch: DeliveryBatch, action: Action, start: int) -> None:
        """Give back the messages from `start` on that are not settled; a failure is ignored."""
        ranges = batch.mark(action, start)
        if ranges is not None:
            self._put(_Settling(batch, action, ranges))

    def lapse(self, batch: DeliveryBatch, end: int) -> None:
        """Give back the messages before `end` as failed: their lease is over."""
        ranges = batch.lapse(end)
        if ranges:
            self._put(_Settling(batch, _FAILED, ranges))

    def pass_on(self, partition: int | None, other: "Settlements") -> None:
        """Have another feed send the settlements of a partition; None: of all partitions."""
        self._to_send += [_Settling(batch, _ACK, ranges) for batch, ranges in self._acks.items()]
        waiting, self._acks = [*self._to_send, *self._later], {}
        passed = [each for each in waiting if partition in (None, each.batch.partition)]
        self._to_send = [each for each in self._to_send if each not in passed]
        self._later = [each for each in self._later if each not in passed]
        for each in passed:
            other._put(each)
        self._check_quiet()

    @property
    def quiet(self) -> bool:
        """Whether every settlement has its answer."""
        return self._quiet.is_set()

    async def flush(self) -> None:
        """Return once every settlement has its answer, whatever it is."""
        await self._quiet.wait()

    def close(self) -> None:
        """Nothing is settled any more."""
        self._closed = True
        unsent = [*self._to_send, *self._later]
        unsent += [_Settling(batch, _ACK, ranges) for batch, ranges in self._acks.items()]
        self._to_send, self._later, self._acks = [], [], {}
        for each in unsent:
            self._fail(each, _closed_before())
        self._quiet.set()
        if self._resuming is not None:
            self._resuming.cancel()

    # --- on the wire ---------------------------------------------------------------------------

    def prepare(self, session: Session) -> bool:
        """Submit gathered settlements; returns whether there are more than fit a frame."""
        to_send, self._to_send = self._to_send, []
        acks, self._acks = self._acks, {}
        whole: list[DeliveryBatch] = []
        session_id = session.welcome.session_id
        for batch, ranges in acks.items():
            fits = len(whole) < limits.SETTLEMENTS_PER_FRAME_MAX
            if fits and batch.session_id == session_id and _is_plain(batch, ranges):
                whole.append(batch)
            else:
                to_send.append(_Settling(batch, _ACK, ranges))
        if whole:
            self._send_acks(session, whole)
        for each in to_send[: limits.SETTLEMENTS_PER_FRAME_MAX]:
            try:
                self._send(session, each)
            except TidemarkError:
                raise  # the session has ended
            except Exception as error:  # it cannot be encoded: it fails alone
                self._fail(each, not_encoded(error))
                self._check_quiet()
        self._to_send = to_send[limits.SETTLEMENTS_PER_FRAME_MAX :] + self._to_send
        return bool(self._to_send)

    def expire(self, now_ms: int) -> None:
        """Fail the settlements whose reservation has expired before they were sent."""
        waiting = [*self._to_send, *self._later]
        waiting += [_Settling(batch, _ACK, ranges) for batch, ranges in self._acks.items()]
        for each in waiting:
            if each.is_over(now_ms):
                self._fail(each, _no_answer() if each.sent else _too_late())
        self._to_send = [each for each in self._to_send if not each.is_over(now_ms)]
        self._later = [each for each in self._later if not each.is_over(now_ms)]
        self._acks = {k: v for k, v in self._acks.items() if k.deadline_ms > now_ms}
        self._check_quiet()

    def _put(self, settling: _Settling) -> None:
        self._to_send.append(settling)
        self._quiet.clear()
        self._connection.wake()

    def _send(self, session: Session, settling: _Settling) -> None:
        batch = settling.batch
        ranges = settling.ranges
        if len(ranges) > 1:
            ranges = merge(ranges)
            if len(ranges) > limits.SETTLEMENT_RANGES_MAX:
                rest = ranges[limits.SETTLEMENT_RANGES_MAX :]
                by_receipt = settling.by_receipt
                later = _Settling(
                    batch, settling.action, rest, settling.answer, by_receipt=by_receipt
                )
                later.sent = settling.sent
                self._to_send.append(later)
                settling.answer, ranges = None, ranges[: limits.SETTLEMENT_RANGES_MAX]
            settling.ranges = ranges
        if len(ranges) == 1 and ranges[0] == (0, batch.count):
            ranges = ()
        by_tag = batch.session_id == session.welcome.session_id and not settling.by_receipt
        session.send_settlement(
            batch.tag if by_tag else batch.receipt,
            settling.action,
            ranges,
            partial(self._answered, settling),
        )
        settling.sent = True
        self._under_way += 1
        messages = sum(end - start for start, end in ranges) or batch.count
        if settling.span is None and (batch.handlers or batch.traceparent):
            settling.span = begin_settle(
                batch, ACTION_NAMES[type(settling.action)], messages, ranges
            )
        if not settling.counted and not settling.by_receipt:
            settling.counted = True
            self._settled(batch, messages)

    def _send_acks(self, session: Session, batches: list[DeliveryBatch]) -> None:
        """Acknowledge whole batches that nothing else is known of, with one result for all."""
        session.send_acks([each.tag for each in batches], partial(self._acked, batches))
        self._under_way += 1
        self._settled_whole(batches)

    def _acked(
        self, batches: list[DeliveryBatch], result: broker_pb2.AcksResult | TidemarkError
    ) -> None:
        self._under_way -= 1
        if isinstance(result, TidemarkError):
            for batch in batches:
                self._lost(_counted_ack(batch))
            return
        if not result.refused:
            self._backoff.reset()
        else:
            refused = {each.delivery_tag: each.error for each in result.refused}
            for batch in batches:
                if batch.tag in refused:
                    self._refused(_counted_ack(batch), from_status(refused[batch.tag]))
        self._check_quiet()

    def _lost(self, settling: _Settling) -> None:
        """The session has ended without a result."""
        if self._closed:
            self._fail(settling, _closed_before())
        else:
            self._to_send.append(settling)  # on the next session, by receipt

    def _answered(
        self, settling: _Settling, result: message_pb2.SettleResult | TidemarkError
    ) -> None:
        self._under_way -= 1
        if isinstance(result, TidemarkError):
            self._lost(settling)
            return
        if not result.HasField("error"):
            self._backoff.reset()
            messaging.end(settling.span)
            if settling.answer is not None and not settling.answer.done():
                settling.answer.set_result(result)
        else:
            self._refused(settling, from_status(result.error))
        self._check_quiet()

    def _refused(self, settling: _Settling, error: TidemarkError) -> None:
        other = None
        if isinstance(error, NotOwner) and not self._closed:
            settling.by_receipt = True  # the tag is gone, also if the partition comes back
            other = self._moved(settling.batch.partition, error.metadata.get("owner", ""))
        if other is not None:
            other._put(settling)  # there by receipt
        elif is_transient(error) and not self._closed:
            self._try_later(settling, error)
        else:
            self._fail(settling, error)

    def _try_later(self, settling: _Settling, error: TidemarkError) -> None:
        self._later.append(settling)
        if self._resuming is None:
            wait_ms = self._backoff.next_ms(error.retry_after_ms or 0)
            self._resuming = asyncio.create_task(self._resume(wait_ms))

    async def _resume(self, wait_ms: int) -> None:
        await self._clock.sleep_ms(wait_ms)
        self._resuming = None
        later, self._later = self._later, []
        self._to_send += later
        self._connection.wake()

    def _fail(self, settling: _Settling, error: TidemarkError) -> None:
        error = explained(settling.batch, settling.action, settling.ranges, error)
        messaging.end(settling.span, error.reason)
        if settling.answer is not None:
            if not settling.answer.done():
                settling.answer.set_exception(error)
        elif isinstance(settling.action, Ack):
            self._failed_acks.add(settling.batch, settling.ranges, error)

    def _check_quiet(self) -> None:
        if not (self._under_way or self._to_send or self._later or self._acks):
            self._quiet.set()


def _is_plain(batch: DeliveryBatch, ranges: Sequence[Range]) -> bool:
    """Whether acks are for all of a batch that is not traced."""
    if len(ranges) > 1:
        ranges = merge(ranges)
    whole = not ranges or ranges[0] == (0, batch.count)
    return whole and not (batch.handlers or batch.traceparent)


def _counted_ack(batch: DeliveryBatch) -> _Settling:
    """The ack of a batch that was sent, and whose messages no longer count as held here."""
    settling = _Settling(batch, _ACK, ())
    settling.counted = settling.sent = True
    return settling


def _too_late() -> ReservationExpired:
    return ReservationExpired("its time ran out before it could be settled")


def _no_answer() -> CommitOutcomeUnknown:
    return CommitOutcomeUnknown("no broker has answered whether it was settled")


def _closed_before() -> ClientClosed:
    return ClientClosed("the subscription was closed before the settlement was answered")
