"""Deliveries: messages that are reserved for this client, and how the application settles them.

A batch is a run, or a slice of one, as it arrived; a delivery is one message of it. Neither decodes
a message before the application reads it, and neither sends settlements.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from opentelemetry.trace import Span, SpanContext

from tidemark import limits
from tidemark.api.broker.v1 import message_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Extend, Nack, Release
from tidemark.client.arguments import (
    Duration,
    check_bool,
    check_delay_ms,
    check_str,
    check_visibility_ms,
)
from tidemark.client.consume.hand_outs import HandOuts
from tidemark.client.consume.marks import MARKS, Mark, ranges_of, set_all, set_one, set_open
from tidemark.client.consume.plain_delivery import PlainDelivery
from tidemark.client.spans import process_span
from tidemark.client.transport.codec import Action, Range
from tidemark.errors import AlreadySettled, ReservationExpired

_ACK: Final = Ack()
_WHY_BYTES_MAX: Final = 1024


class Settler(Protocol):
    """Sends settlements to the broker. Those that it raises for are marked as failed."""

    def check_usable(self) -> None:
        """Raise where nothing can be settled: it is closed, or belongs to another event loop."""

    async def ack(self, batch: "DeliveryBatch", ranges: Sequence[Range]) -> None: ...

    async def settle(
        self, batch: "DeliveryBatch", action: Action, ranges: Sequence[Range]
    ) -> message_pb2.SettleResult: ...

    async def settle_again(
        self, batch: "DeliveryBatch", action: Action, ranges: Sequence[Range]
    ) -> None:
        """Wait for settlements that were handed over before; repeat those that have failed."""


class DeliveryBatch:
    """Messages of one queue that arrived together. Iterate over it for single deliveries.

    >>> async for batch in deliveries.batches():
    ...     handle(batch.payloads)
    ...     await batch.ack()
    """

    __slots__ = (
        "_delivery",
        "_marks",
        "_parsed",
        "_settler",
        "allowed",
        "arrived_ms",
        "cautious",
        "count",
        "deadline_ms",
        "end",
        "extended_until_ms",
        "first",
        "hand_outs",
        "handed_out",
        "handlers",
        "ordinal",
        "position",
        "session_id",
        "visibility_ms",
    )

    def __init__(
        self,
        delivery: message_pb2.Delivery | PlainDelivery,
        settler: Settler,
        session_id: int,
        now_ms: int,
    ) -> None:
        self.count = count = (
            delivery.messages if isinstance(delivery, PlainDelivery) else delivery.count
        )
        """Number of messages that arrived."""
        self.first = 0
        """How many of them were handed out one by one before: the batch is the rest."""
        self.end = count
        """The messages from here on went back before they were handed out."""
        self.handed_out = 0
        """How many of them the application was given."""
        self.allowed = 0
        """How many of them it may be given without asking `hand_outs`."""
        self.cautious = delivery.attempt_count > 0 or delivery.last_attempt
        """Whether it is reported only when a task takes it: see `hand_outs`."""
        self.hand_outs: HandOuts
        self.position: int
        """How many messages its consumer received before it, on its session."""
        self.ordinal: int
        """How many batches."""
        self.arrived_ms = now_ms
        self.visibility_ms = delivery.visibility_ms
        """How long the reservation lasts without being renewed."""
        self.deadline_ms = now_ms + self.visibility_ms
        """When the reservation runs out, by the client's monotonic clock."""
        self.extended_until_ms = 0
        """How long the application itself has extended it."""
        self.handlers: dict[int, SpanContext] | None = None
        """The spans that handle messages, by their index, where those are traced."""
        self.session_id = session_id
        self._delivery = delivery
        self._parsed: message_pb2.MessageBatch | None = None
        self._settler = settler
        self._marks = bytearray(count)

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator["Delivery"]:
        return (Delivery(self, index) for index in range(self.first, self.end))

    def __getitem__(self, index: int) -> "Delivery":
        return Delivery(self, range(self.first, self.end)[index])

    def __repr__(self) -> str:
        return f"<{len(self)} of {self.lmq_name} at {self.offset}, attempt {self.attempt}>"

    # --- contents ------------------------------------------------------------------------------

    @property
    def payloads(self) -> list[bytes]:
        payloads = [message.payload for message in self._messages]
        return payloads if len(self) == self.count else payloads[self.first : self.end]

    @property
    def lmq_name(self) -> str:
        return self._delivery.lmq_name

    @property
    def group(self) -> str:
        return self._delivery.group

    @property
    def offset(self) -> int:
        """Of the first message; the others follow without gaps."""
        return self.offset_of(self.first)

    def offset_of(self, index: int) -> int:
        """Of the message that arrived at `index`."""
        return self._delivery.first_offset + index

    @property
    def attempt(self) -> int:
        """How often these messages failed before. 0 the first time."""
        return self._delivery.attempt_count

    @property
    def epoch(self) -> int:
        """Owner epoch of an exclusive queue, to fence side effects with; 0 on shared ones."""
        return self._delivery.epoch

    @property
    def fairness_key(self) -> str:
        return self._delivery.fairness_key

    @property
    def partition(self) -> int:
        return self._delivery.partition

    @property
    def publish_time_ms(self) -> int:
        """Unix time, by storage's clock."""
        return self._delivery.publish_time_ms

    @property
    def traceparent(self) -> str:
        return self._delivery.traceparent

    @property
    def receipt(self) -> bytes:
        return self._delivery.receipt

    @property
    def tag(self) -> int:
        """The broker's number for it on the session that brought it."""
        return self._delivery.delivery_tag

    def message(self, index: int) -> message_pb2.Message:
        return self._messages[index]

    @property
    def _messages(self) -> Sequence[message_pb2.Message]:
        if self._parsed is None:
            self._parsed = self._delivery.batch
        return self._parsed.messages

    def span(self) -> AbstractContextManager[Span]:
        """A span around the handling of the batch, linked to the span that published it."""
        return process_span(self, len(self))

    # --- settling ------------------------------------------------------------------------------

    def settle_by(self, settler: Settler) -> None:
        """From now on, another broker settles it."""
        self._settler = settler

    @property
    def open(self) -> int:
        """How many of its messages are not settled yet."""
        return self._marks.count(Mark.OPEN)

    async def ack(self, *, wait: bool = False) -> None:
        """Done. Returns once it is handed over, or waits for the answer, as `Delivery.ack` does."""
        await self._settle(_ACK, wait=check_bool("wait", wait))

    async def nack(self, delay_ms: Duration = 0) -> None:
        """Failed: ready again after the delay, with `attempt` + 1."""
        await self._settle(_nack(delay_ms))

    async def dead_letter(self, why: str) -> None:
        """Failed for good: to the dead-letter topic, or deleted where there is none."""
        await self._settle(_dead_letter(why))

    async def release(self) -> None:
        """Not tried: ready again at once, and it does not count as an attempt."""
        await self._settle(Release())

    async def extend(self, visibility_ms: Duration) -> int:
        """More time: this many milliseconds from now. Returns the time left."""
        visibility_ms = check_visibility_ms(visibility_ms, optional=False)
        self._settler.check_usable()
        result = await self._settler.settle(self, Extend(visibility_ms=visibility_ms), ())
        return result.visibility_ms

    async def _settle(self, action: Action, *, wait: bool = True) -> None:
        self._settler.check_usable()
        again = ranges_of(self._marks, Mark.FAILED, self.first, self.end)
        if wait and isinstance(action, Ack):
            again += ranges_of(self._marks, Mark.ACKED, self.first, self.end)
        ranges = self.mark(action, self.first)
        if ranges is not None and wait:
            await self._settler.settle(self, action, ranges)
        elif ranges is not None:
            await self._settler.ack(self, ranges)
        if again:
            set_all(self._marks, MARKS[type(action)], again)
            await self._settler.settle_again(self, action, again)

    async def settle_one(self, action: Action, index: int, *, wait: bool = True) -> None:
        self._settler.check_usable()
        before = self._mark_one(action, index)
        ranges = ((index, index + 1),)
        if before is None and not wait:
            await self._settler.ack(self, ranges)
        elif before is None:
            await self._settler.settle(self, action, ranges)
        elif before is Mark.FAILED or (wait and before is Mark.ACKED):
            await self._settler.settle_again(self, action, ranges)

    def mark(self, action: Action, start: int = 0) -> Sequence[Range] | None:
        """Note how open messages from `start` on are settled; returns them, or None for none.

        No ranges stand for the whole batch.
        """
        ranges = set_open(self._marks, MARKS[type(action)], start, self.count)
        if ranges == [(0, self.count)]:
            return ()
        return ranges or None

    def mark_rest(self, action: Action) -> Sequence[Range] | None:
        """The same of all that is left, including messages whose settlement failed."""
        set_all(self._marks, Mark.OPEN, ranges_of(self._marks, Mark.FAILED, 0, self.count))
        return self.mark(action)

    def mark_failed(self, action: Action, ranges: Sequence[Range]) -> None:
        """Note that a settlement failed: settling its messages again asks storage again."""
        if type(action) in MARKS:
            set_all(self._marks, Mark.FAILED, ranges or ((0, self.count),))

    def lapse(self, end: int) -> Sequence[Range]:
        """The application holds the messages before `end` for too long; returns those."""
        return set_open(self._marks, Mark.LAPSED, 0, end)

    def _mark_one(self, action: Action, index: int) -> Mark | None:
        """Note how one message is settled; returns its mark before, the same if repeated (V6).

        Raises AlreadySettled if it was settled in another way.
        """
        mark = MARKS[type(action)]
        before = set_one(self._marks, index, mark)
        if before is None or before is mark or before is Mark.FAILED:
            return before
        where = f"the message at offset {self.offset_of(index)}"
        if before is Mark.LAPSED:
            raise ReservationExpired(f"{where} was held for longer than `max_lease_ms`")
        raise AlreadySettled(f"{where} was settled in another way, or has gone back")


class Delivery:
    """One message, reserved for this client until it is settled or its time runs out."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: DeliveryBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    def __repr__(self) -> str:
        return f"<{self.lmq_name} at {self.offset}, attempt {self.attempt}>"

    @property
    def payload(self) -> bytes:
        return self._batch.message(self._index).payload

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._batch.message(self._index).headers)

    @property
    def lmq_name(self) -> str:
        return self._batch.lmq_name

    @property
    def group(self) -> str:
        return self._batch.group

    @property
    def offset(self) -> int:
        return self._batch.offset_of(self._index)

    @property
    def attempt(self) -> int:
        """How often this message failed before. 0 the first time."""
        return self._batch.attempt

    @property
    def epoch(self) -> int:
        """Owner epoch of an exclusive queue, to fence side effects with; 0 on shared ones."""
        return self._batch.epoch

    @property
    def fairness_key(self) -> str:
        return self._batch.fairness_key

    @property
    def publish_time_ms(self) -> int:
        """Unix time, by storage's clock."""
        return self._batch.publish_time_ms

    def span(self) -> AbstractContextManager[Span]:
        """A span around the handling of the message, linked to the span that published it.

        >>> with delivery.span():
        ...     handle(delivery.payload)
        """
        return process_span(self._batch, 1, self._index)

    async def ack(self, *, wait: bool = False) -> None:
        """Done: the message does not come back.

        Returns once the ack is handed over; it travels with others, and is repeated over a lost
        connection. If it fails in the end, because the reservation had run out or another client
        had taken the queue, `on_settle_failed` of the subscription is called, and the next
        `deliveries.flush()` raises. With `wait`, it returns once the ack is on disk, and raises
        why it is not.
        """
        await self._batch.settle_one(_ACK, self._index, wait=check_bool("wait", wait))

    async def nack(self, delay_ms: Duration = 0) -> None:
        """Failed: ready again after the delay, with `attempt` + 1. Raises why it could not be."""
        await self._settle(_nack(delay_ms))

    async def dead_letter(self, why: str) -> None:
        """Failed for good: to the dead-letter topic, or deleted where there is none."""
        await self._settle(_dead_letter(why))

    async def release(self) -> None:
        """Not tried: ready again at once, and it does not count as an attempt."""
        await self._settle(Release())

    async def extend(self, visibility_ms: Duration) -> int:
        """More time, for all messages that arrived with this one; returns the milliseconds left."""
        return await self._batch.extend(visibility_ms)

    async def _settle(self, action: Action) -> None:
        await self._batch.settle_one(action, self._index)


def _nack(delay_ms: Duration) -> Nack:
    # Checked here: once it is noted how a message was settled, there is no second try.
    return Nack(delay_ms=check_delay_ms(delay_ms, limits.NACK_DELAY_MS_MAX))


def _dead_letter(why: str) -> DeadLetter:
    return DeadLetter(
        reason=check_str("why", why).encode()[:_WHY_BYTES_MAX].decode(errors="ignore")
    )
