"""Hand-outs: messages that the application may be given, reported to the broker before.

Pure. An attempt is charged for reported messages, so nothing is handed out before the broker has
confirmed the report (K1). Reports are totals in the order of arrival and travel with whatever is
sent anyway. A task that waits is reported ahead, so that a message is handed to it without a round
trip; a handler that is quick is reported further ahead, as far as it gets in a moment. That window
is only for messages at their first attempt: those that failed before, and those with one attempt
left, are reported when a task takes them, so that a neighbour of a message that ends its consumer
is not dead-lettered with it. Hand-outs that were reported ahead and are not used are taken back.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tidemark.client.consume.delivery import DeliveryBatch

AHEAD_MS_MIN: Final = 20
AHEAD_MS_MAX: Final = 200
"""How far a quick handler is reported ahead: as far as it gets within two confirmations, so that it
does not wait for them. More would charge more messages by mistake."""

AHEAD_MESSAGES_MAX: Final = 100_000
_NS_PER_MS: Final = 1_000_000


class Totals(NamedTuple):
    """Messages, deliveries with all of their messages, messages at their first attempt."""

    messages: int = 0
    deliveries: int = 0
    first_attempts: int = 0


class Report(NamedTuple):
    """One report to the broker, under a number."""

    number: int
    totals: Totals
    urgent: bool
    """Whether a task waits for the confirmation."""


class HandOuts:
    """The hand-outs of one consumer of one session."""

    __slots__ = (
        "_arrived_deliveries",
        "_arrived_messages",
        "_asked",
        "_blocked",
        "_confirmed",
        "_current",
        "_ignored",
        "_latency_ns",
        "_needed_deliveries",
        "_needed_messages",
        "_number",
        "_quiet_at",
        "_started_at",
        "_started_ns",
        "_taken_back",
        "_urgent",
        "_urgent_ns",
        "_window",
    )

    def __init__(self) -> None:
        self._arrived_messages = self._arrived_deliveries = 0
        self._current: DeliveryBatch | None = None
        """The batch that is being handed out."""
        self._asked = self._confirmed = Totals()
        self._number = self._ignored = 0
        """The last report, and the last that is void because totals were taken back."""
        self._needed_messages = self._needed_deliveries = 0
        """The totals that a blocked task needs."""
        self._blocked = False
        """Whether a task waits for a confirmation."""
        self._urgent = False
        """Whether the broker was notified that one does."""
        self._urgent_ns = self._latency_ns = 0
        """When it was notified, and how long the last such confirmation took."""
        self._taken_back = False
        """Whether smaller totals are still to be reported."""
        self._window = 0
        self._started_ns: int | None = None
        self._started_at = 0
        """When, and with which message, tasks began to take without waiting."""
        self._quiet_at = -1
        """How many messages were handed out at the last check."""

    @property
    def messages(self) -> int:
        """How many messages were handed out, or passed over."""
        current = self._current
        return 0 if current is None else current.position + current.handed_out

    # --- handing out ---------------------------------------------------------------------------

    def arrived(self, *batches: "DeliveryBatch") -> int:
        """Give batches their places in the order of arrival; returns how many messages they are."""
        before = messages = self._arrived_messages
        for ordinal, batch in enumerate(batches, self._arrived_deliveries):
            batch.hand_outs = self
            batch.position = messages
            batch.ordinal = ordinal
            messages += batch.count
        self._arrived_messages = messages
        self._arrived_deliveries += len(batches)
        return messages - before

    def allow(self, batch: "DeliveryBatch") -> bool:
        """Note how far a batch may be handed out; if not at all, ask for its next message."""
        self._current = batch
        confirmed = self._confirmed
        if batch.ordinal < confirmed.deliveries:
            batch.allowed = batch.count
        else:
            total = confirmed.messages
            if not batch.cautious:
                total = max(total, confirmed.first_attempts)
            batch.allowed = min(max(total - batch.position, 0), batch.count)
        if batch.handed_out < batch.allowed:
            return True
        self._needed_messages = batch.position + batch.handed_out + 1
        self._blocked = True
        return False

    def allow_rest(self, batch: "DeliveryBatch") -> bool:
        """Whether all that is left of a batch may be handed out; if not, ask for that."""
        if self.allow(batch) and batch.allowed >= batch.end:
            return True
        self._needed_deliveries = batch.ordinal + 1
        self._blocked = True
        return False

    # --- reporting -----------------------------------------------------------------------------

    def resumed(self, now_ns: int) -> None:
        """A task that waited is served."""
        if self._started_ns is None:
            self._started_ns, self._started_at = now_ns, self.messages

    def paused(self, now_ns: int) -> None:
        """A task begins to wait: how quick are handlers while none does?"""
        if self._started_ns is None:
            return
        handed_out = self.messages - self._started_at
        if handed_out:
            elapsed_ns = max(now_ns - self._started_ns, 1)
            low_ns, high_ns = AHEAD_MS_MIN * _NS_PER_MS, AHEAD_MS_MAX * _NS_PER_MS
            ahead_ns = min(max(2 * self._latency_ns, low_ns), high_ns)
            self._window = min(handed_out * ahead_ns // elapsed_ns, AHEAD_MESSAGES_MAX)
            self._started_ns = None

    def report(self, waiting_for_one: int, waiting_for_batch: int, now_ns: int) -> Report | None:
        """The report that is due now; None if the broker has it already."""
        asked, handed_out = self._asked, self.messages
        first_attempts = asked.first_attempts
        if self._window and first_attempts - handed_out <= self._window // 2:
            first_attempts = handed_out + self._window
        messages, deliveries = asked.messages, asked.deliveries
        waiting = waiting_for_one or waiting_for_batch
        if self._blocked or (waiting and not self._window_covers_next()):
            needed = self._needed(waiting_for_one, waiting_for_batch)
            messages = max(messages, needed.messages)
            deliveries = max(deliveries, needed.deliveries)
        totals = Totals(messages, deliveries, first_attempts)
        hurry = self._blocked and not self._urgent
        if totals == asked and not hurry and not self._taken_back:
            return None
        self._asked, self._taken_back = totals, False
        if hurry:
            self._urgent_ns = now_ns
        self._urgent = self._blocked
        self._number += 1
        return Report(self._number, totals, self._urgent)

    def confirmed(self, number: int, totals: Totals, now_ns: int) -> None:
        """The broker has noted a report."""
        if number > self._ignored:
            if self._urgent:
                self._latency_ns = now_ns - self._urgent_ns
            self._confirmed = totals
            self._blocked = self._urgent = False

    def run_once(self, waiting_for_one: int, waiting_for_batch: int) -> bool:
        """Take back reports that no task needs, if none was served for a while; whether it did."""
        handed_out, quiet_at = self.messages, self._quiet_at
        self._quiet_at = handed_out
        needed = self._needed(waiting_for_one, waiting_for_batch)
        smaller = Totals(*map(min, self._asked, needed))
        if handed_out != quiet_at or smaller == self._asked:
            return False
        self._window = 0
        self._asked = smaller
        self._confirmed = Totals(*map(min, self._confirmed, smaller))
        if self._current is not None:
            self._current.allowed = 0  # asked again by the next task
        self._ignored = self._number
        self._taken_back = True
        self._urgent = False  # a task that is blocked needs another report
        return True

    def _window_covers_next(self) -> bool:
        """Whether tasks can expect the next delivery to be reported already.

        If it is more than that, or has failed before, they wait for a confirmation. Messages that
        failed come together, so the first of them ends this.
        """
        current = self._current
        return (
            self._window > 0
            and current is not None
            and not current.cautious
            and self._asked.first_attempts - self.messages > self._window // 2
        )

    def _needed(self, waiting_for_one: int, waiting_for_batch: int) -> Totals:
        """The totals that cover past hand-outs, and the next hand-out of each task."""
        current, handed_out = self._current, self.messages
        messages = handed_out + waiting_for_one
        deliveries = waiting_for_batch
        if current is not None:
            deliveries += current.ordinal + (current.handed_out >= current.end)
        if self._blocked:
            messages = max(messages, self._needed_messages)
            deliveries = max(deliveries, self._needed_deliveries)
        return Totals(messages, deliveries, handed_out)
