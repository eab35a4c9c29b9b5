"""Reservations: messages handed to a consumer until a deadline, and how each of them ended.

Pure. A reservation covers a slice of one run. Each of its messages is either still open or ended in
exactly one way; a settled reservation is kept for a while, so that a repeated settlement gets the
same answer and a different one is refused (V6).
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise

from storage_svc.queue.run import Slice
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    InvalidArgument,
    ReservationExpired,
    TidemarkError,
)

Span = tuple[int, int]
"""First offset and end."""


class Ending(IntEnum):
    """How messages of a reservation ended. The numbers are stored."""

    ACK = 1
    NACK = 2
    DEAD_LETTER = 3
    RELEASE = 4
    DISCONNECT = 5
    EXPIRED = 6
    REVOKED = 7


class Reservation:
    """Messages of one run that one consumer holds."""

    __slots__ = (
        "apart",
        "broker_incarnation",
        "deadline_ms",
        "done",
        "given_messages",
        "group",
        "open",
        "owner_epoch",
        "reservation_id",
        "slice",
    )

    def __init__(
        self,
        reservation_id: int,
        group: str,
        slice_: Slice,
        deadline_ms: int,
        *,
        owner_epoch: int = 0,
        broker_incarnation: int = 0,
        given_messages: int | None = None,
        open_spans: Sequence[Span] | None = None,
        done: Sequence[tuple[int, int, Ending]] = (),
    ) -> None:
        self.reservation_id = reservation_id
        self.group = group
        self.slice = slice_
        self.deadline_ms = deadline_ms
        self.owner_epoch = owner_epoch
        self.broker_incarnation = broker_incarnation
        self.given_messages = slice_.messages if given_messages is None else given_messages
        """How many, from the first, the application was given; all, where that is not reported."""
        self.open: list[Span] = (
            [(slice_.start, slice_.end)] if open_spans is None else list(open_spans)
        )
        self.done: list[tuple[int, int, Ending]] = list(done)
        self.apart = False
        """Whether it has a separate row, instead of a part of its queue's."""

    @property
    def live(self) -> bool:
        """Whether the consumer still holds any of its messages."""
        return bool(self.open)

    @property
    def expired(self) -> bool:
        """Whether it ended at its deadline."""
        return not self.open and self.done[-1][2] is Ending.EXPIRED

    def check_live(self) -> None:
        """Raise the reason if it has ended."""
        if not self.open:
            raise self._refusal(self.done[-1][2])

    @property
    def open_messages(self) -> int:
        return sum(end - start for start, end in self.open)

    def note_given(self, messages: int, *, at_least: bool = False) -> None:
        """So many, from the first, count as given to the application, or so many at least."""
        if not at_least or messages > self.given_messages:
            self.given_messages = min(messages, self.slice.messages)

    def spans(self, index_ranges: Sequence[Span]) -> list[Span]:
        """The offsets of indexes, which count from the first message."""
        if not index_ranges:
            return []
        first, end = self.slice.start, self.slice.end
        spans = [(first + start, first + stop) for start, stop in index_ranges]
        if any(start >= stop or stop > end for start, stop in spans):
            raise InvalidArgument(
                f"ranges lie within 0 to {self.slice.messages}, each with an end above its start",
                field="ranges",
            )
        if any(one[1] > other[0] for one, other in pairwise(spans)):
            raise InvalidArgument("ranges ascend and do not overlap", field="ranges")
        return spans

    def finish(self, spans: Sequence[Span], ending: Ending) -> list[Span]:
        """End the messages of `spans` (all that are open, for none given); returns the changes.

        Messages that ended in the same way before are no change and no error. Raises, and changes
        nothing, if any ended in another way.
        """
        if not spans and not self.open:
            # The settlement that ended all open messages was the last one.
            if self.done[-1][2] is ending:
                return []
            raise self._refusal(self.done[-1][2])
        if not spans and not self.done:  # the usual case: all of it, at once
            changed, self.open = self.open, []
            self.done = [(self.slice.start, self.slice.end, ending)]
            return changed
        wanted = list(spans) or list(self.open)
        for start, end, how in self.done:
            if how is not ending and any(start < stop and begin < end for begin, stop in wanted):
                raise self._refusal(how)
        changed, left = _cut(self.open, wanted)
        self.open = left
        for start, end in changed:
            self._add_done(start, end, ending)
        if not left and all(how is ending for _, _, how in self.done):
            self.done = [(self.slice.start, self.slice.end, ending)]
        return changed

    def charged(self, span: Span, ending: Ending) -> list[tuple[Span, int]]:
        """Messages that go back, in parts, each with the attempts that it is charged.

        DISCONNECT and EXPIRED count only for messages that the application was given (K1).
        """
        if ending in (Ending.RELEASE, Ending.REVOKED):
            return [(span, 0)]
        if ending is Ending.NACK:
            return [(span, 1)]
        start, end = span
        given = min(max(start, self.slice.start + self.given_messages), end)
        parts = (((start, given), 1), ((given, end), 0))
        return [(part, counted) for part, counted in parts if part[0] < part[1]]

    def _add_done(self, start: int, end: int, ending: Ending) -> None:
        """Consecutive messages that ended the same way stay one record."""
        if self.done and self.done[-1][1:] == (start, ending):
            start = self.done.pop()[0]
        self.done.append((start, end, ending))

    def _refusal(self, how: Ending) -> TidemarkError:
        if how is Ending.EXPIRED:
            return ReservationExpired("the reservation has expired and its messages went back")
        if how is Ending.REVOKED:
            return Fenced("the reservation was revoked when another client took the queue")
        return AlreadySettled(
            f"the messages were settled before: {how.name}",
            how=how.name,
            open_messages=str(self.open_messages),
        )


def _cut(spans: Iterable[Span], wanted: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """The parts of `spans` that lie in `wanted`, and those that do not. Both ascend."""
    inside: list[Span] = []
    outside: list[Span] = []
    for start, end in spans:
        for begin, stop in wanted:
            if stop <= start or begin >= end:
                continue
            if begin > start:
                outside.append((start, begin))
                start = begin
            inside.append((start, min(stop, end)))
            start = min(stop, end)
        if start < end:
            outside.append((start, end))
    return inside, outside
