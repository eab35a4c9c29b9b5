"""Acks that failed: reported to the application, logged at a limited rate, kept for the next flush.

The caller of an ack does not wait for its result, so a failure cannot be raised there. Owns the
failures since the last flush of one subscription; it repeats nothing.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeAlias

from tidemark.api.broker.v1.message_pb2 import Extend
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.transport.codec import Action, Range
from tidemark.clock import Clock
from tidemark.errors import AlreadySettled, ReservationExpired, TidemarkError, UnknownDeliveryTag

SettleFailed: TypeAlias = Callable[[DeliveryBatch, TidemarkError], None]

LOG_EVERY_MS: Final = 10_000
"""Failed acks are logged at most this often for each subscription, with their number."""

_log = logging.getLogger(__name__)

P = ParamSpec("P")


class FailedAcks:
    """The failed acks of one subscription."""

    def __init__(self, clock: Clock, on_failed: SettleFailed | None) -> None:
        self._clock = clock
        self._on_failed = on_failed
        self._first: TidemarkError | None = None
        """The first failure since the last flush."""
        self._messages = 0
        """Messages whose acks have failed since then."""
        self._unlogged = 0
        self._unlogged_first: tuple[str, int, TidemarkError] | None = None
        """Queue, offset and reason of the first failure that is not logged yet."""
        self._logged_at_ms: int | None = None
        self._closed = False

    def add(self, batch: DeliveryBatch, ranges: Sequence[Range], error: TidemarkError) -> None:
        """An ack failed that no caller waits for; `ranges` are its messages, none mean all."""
        messages = sum(end - start for start, end in ranges) or batch.count
        self._first = self._first or error
        self._messages += messages
        if self._on_failed is not None:
            call_back(self._on_failed, batch, error)
            return
        self._unlogged += messages
        if self._unlogged_first is None:
            offset = batch.offset_of(ranges[0][0] if ranges else 0)
            self._unlogged_first = (batch.lmq_name, offset, error)
        self.log()

    def close(self) -> None:
        """Log the failures so far; later ones are logged one by one."""
        self._closed = True
        self.log()

    def log(self) -> None:
        """Log the failures so far, if it is time to."""
        if self._unlogged_first is None:
            return
        now_ms, since_ms = self._clock.monotonic_ms(), self._logged_at_ms
        if not self._closed and since_ms is not None and now_ms - since_ms < LOG_EVERY_MS:
            return
        queue, offset, error = self._unlogged_first
        alone = self._unlogged == 1
        _log.warning(
            "%s failed (%s%s at offset %d): %s",
            "an ack" if alone else f"{self._unlogged} acks",
            "" if alone else "the first: ",
            queue,
            offset,
            error,
            extra={"queue": queue, "reason": error.reason, "messages": self._unlogged},
        )
        self._unlogged, self._unlogged_first, self._logged_at_ms = 0, None, now_ms

    def raise_first(self) -> None:
        """Raise the first failure since the last call, with the number of messages; or return."""
        error, messages = self._first, self._messages
        if error is not None:
            self._first, self._messages = None, 0
            error.metadata = {**error.metadata, "failed": str(messages)}
            error.add_note(f"messages whose acks failed since the last flush: {messages}")
            raise error


def explained(
    batch: DeliveryBatch, action: Action, ranges: Sequence[Range], error: TidemarkError
) -> TidemarkError:
    """The error in terms of the application, which sees queues and offsets but no tags."""
    if isinstance(error, UnknownDeliveryTag) and isinstance(action, Extend) and not batch.open:
        return AlreadySettled("every message that arrived with it is settled")
    if not isinstance(error, (UnknownDeliveryTag, ReservationExpired)):
        return error
    offset = batch.offset_of(ranges[0][0] if ranges else 0)
    return ReservationExpired(
        f"the reservation of {batch.lmq_name} at offset {offset} has run out, "
        f"and the message is delivered again",
        queue=batch.lmq_name,
        offset=str(offset),
    )


def call_back(callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function of the user; its errors are logged and stop nothing here."""
    try:
        callback(*args, **kwargs)
    except Exception:
        _log.exception("a callback failed")
