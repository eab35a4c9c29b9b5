"""Deliveries: messages that are reserved for this client, and what can be said about them.

A batch is a run, or a slice of one, as it arrived; a delivery is one message of it. Neither looks
at a message before it is asked to, and neither knows how its settlements travel.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from tidemark.client.spans import process_span
from tidemark.client.transport.codec import Action, Range
from tidemark.errors import AlreadySettled, ReservationExpired

_ACK: Final = Ack()
_NUMBERS: Final[Mapping[type[Action], int]] = {Ack: 1, Nack: 2, DeadLetter: 3, Release: 4}
"""How a message was settled; 0 while it was not. An extension settles nothing."""

_LAPSED: Final = 5
"""The application had it for too long: it went back as a failed attempt."""

_WHY_BYTES_MAX: Final = 1024


class Settler(Protocol):
    """Who carries settlements to the broker."""

    async def ack(self, batch: "DeliveryBatch", ranges: Sequence[Range]) -> None: ...

    async def ack_again(self, batch: "DeliveryBatch", ranges: Sequence[Range]) -> None: ...

    async def settle(
        self, batch: "DeliveryBatch", action: Action, ranges: Sequence[Range]
    ) -> message_pb2.SettleResult: ...


class DeliveryBatch:
    """Messages of one queue that arrived together. Iterate over it for single deliveries.

    >>> async for batch in deliveries.batches():
    ...     handle(batch.payloads)
    ...     await batch.ack()
    """

    __slots__ = (
        "_delivery",
        "_marks",
        "_settler",
        "allowed",
        "arrived_ms",
        "cautious",
        "count",
        "deadline_ms",
        "end",
        "first",
        "hand_outs",
        "handed_out",
        "handlers",
        "open",
        "ordinal",
        "position",
        "session_id",
        "visibility_ms",
    )

    def __init__(
        self, delivery: message_pb2.Delivery, settler: Settler, session_id: int, now_ms: int
    ) -> None:
        self.count = delivery.count
        """Number of messages that arrived."""
        self.first = 0
        """How many of them were handed out one by one before: the batch is the rest."""
        self.end = delivery.count
        """The messages from here on went back before they were handed out."""
        self.handed_out = 0
        """How many of them the application was given."""
        self.allowed = 0
        """How many of them it may be given without asking."""
        self.cautious = delivery.attempt_count > 0 or delivery.last_attempt
        """Whether it is handed out only to tasks that wait for it: see `hand_outs`."""
        self.hand_outs: HandOuts
        self.position: int
        """How many messages arrived before it, on its session and for its consumer."""
        self.ordinal: int
        """How many batches."""
        self.arrived_ms = now_ms
        self.open = delivery.count
        """How many of them are not settled yet."""
        self.visibility_ms = delivery.visibility_ms
        """How long the reservation lasts without being renewed."""
        self.deadline_ms = now_ms + self.visibility_ms
        """When the reservation runs out, by the client's monotonic clock."""
        self.handlers: dict[int, SpanContext] | None = None
        """The spans that handle messages, by their index, where those are traced."""
        self.session_id = session_id
        self._delivery = delivery
        self._settler = settler
        self._marks: bytearray | None = None

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator["Delivery"]:
        return (Delivery(self, index) for index in range(self.first, self.end))

    def __getitem__(self, index: int) -> "Delivery":
        return Delivery(self, range(self.first, self.end)[index])

    def __repr__(self) -> str:
        return f"<{len(self)} of {self.lmq_name} at {self.offset}, attempt {self.attempt}>"

    # --- what it is ----------------------------------------------------------------------------

    @property
    def payloads(self) -> list[bytes]:
        payloads = [message.payload for message in self._delivery.batch.messages]
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
        return self._delivery.batch.messages[index]

    def span(self) -> AbstractContextManager[Span]:
        """A span around the handling of the batch, linked to the span that published it."""
        return process_span(self, len(self))

    # --- settling ------------------------------------------------------------------------------

    async def ack(self, *, wait: bool = False) -> None:
        """Done. Returns once it is handed over, or waits for the answer, as `Delivery.ack` does."""
        check_bool("wait", wait)
        acked_before = self._acked() if wait else []
        ranges = self.mark(_ACK, self.first)
        if ranges is not None and not wait:
            await self._settler.ack(self, ranges)
        elif ranges is not None:
            await self._settler.settle(self, _ACK, ranges)
        if wait and acked_before:
            await self._settler.ack_again(self, acked_before)

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
        """More time: that many milliseconds from now. Returns the time left."""
        visibility_ms = check_visibility_ms(visibility_ms, optional=False)
        result = await self._settler.settle(self, Extend(visibility_ms=visibility_ms), ())
        return result.visibility_ms

    async def _settle(self, action: Action) -> None:
        ranges = self.mark(action, self.first)
        if ranges is not None:
            await self._settler.settle(self, action, ranges)

    async def ack_one(self, index: int, *, wait: bool) -> None:
        ranges = ((index, index + 1),)
        if not self._mark_one(_ACK, index):
            if wait:
                await self._settler.ack_again(self, ranges)
        elif wait:
            await self._settler.settle(self, _ACK, ranges)
        else:
            await self._settler.ack(self, ranges)

    async def settle_one(self, action: Action, index: int) -> None:
        if self._mark_one(action, index):
            await self._settler.settle(self, action, ((index, index + 1),))

    def mark(self, action: Action, start: int = 0) -> Sequence[Range] | None:
        """Note how what is left from `start` on is settled; returns it, or None if it is nothing.

        No ranges stand for the whole batch.
        """
        ranges = self.unsettled(start)
        number = _NUMBERS[type(action)]
        if self._marks is None:
            self._marks = bytearray(self.count)
        for first, last in ranges:
            self._marks[first:last] = bytes((number,)) * (last - first)
            self.open -= last - first
        if ranges == [(0, self.count)]:
            return ()
        return ranges or None

    def lapse(self, end: int) -> Sequence[Range]:
        """Messages before `end` are in the hands of the application for too long; returns them."""
        ranges = self.unsettled(0, end)
        if self._marks is None:
            self._marks = bytearray(self.count)
        for first, last in ranges:
            self._marks[first:last] = bytes((_LAPSED,)) * (last - first)
            self.open -= last - first
        return ranges

    def _mark_one(self, action: Action, index: int) -> bool:
        """Note how one message is settled; whether that is news.

        Settled before in the same way is no error (V6), in another way it is AlreadySettled.
        """
        number = _NUMBERS[type(action)]
        if self._marks is None:
            self._marks = bytearray(self.count)
        before = self._marks[index]
        if before:
            if before != number:
                where = f"the message at offset {self.offset_of(index)}"
                if before == _LAPSED:
                    raise ReservationExpired(f"{where} was held for longer than `max_lease_ms`")
                raise AlreadySettled(f"{where} was settled in another way, or has gone back")
            return False
        self._marks[index] = number
        self.open -= 1
        return True

    def unsettled(self, start: int = 0, end: int | None = None) -> list[Range]:
        """The messages from `start` on, or before `end`, that were not settled."""
        end = self.count if end is None else end
        if self._marks is None:
            return [(start, end)] if start < end else []
        return ranges_of(self._marks, 0, start, end)

    def _acked(self) -> list[Range]:
        if self._marks is None:
            return []
        return ranges_of(self._marks, _NUMBERS[Ack], self.first, self.end)


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
        await self._batch.ack_one(self._index, wait=check_bool("wait", wait))

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


def ranges_of(marks: bytearray, number: int, start: int, end: int) -> list[Range]:
    """Stretches of a number, as (first, last + 1)."""
    ranges: list[Range] = []
    while (first := marks.find(number, start, end)) >= 0:
        last = first
        while last < end and marks[last] == number:
            last += 1
        ranges.append((first, last))
        start = last
    return ranges


def merge(ranges: Sequence[Range]) -> list[Range]:
    """The same messages in as few ranges as there can be."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
