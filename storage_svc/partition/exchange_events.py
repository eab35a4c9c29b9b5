"""Events of a partition for the brokers that are connected to it.

The writer records them after each commit; each exchange sends its own and clears them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import HandedOut
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.journal import QueueGroup

OnHandedOut = Callable[[Sequence[Reserved | HandedOut]], None]
"""Takes the results of standing reserves."""


@dataclass(slots=True, eq=False)
class ExchangeEvents:
    """The events that one exchange has not sent to its broker yet."""

    broker_epoch: int
    changed: Callable[[], None]
    """Called when there is something to send, or the broker is fenced."""
    handed_out: OnHandedOut
    ready: dict[QueueGroup, None] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)
    next_deadline_changed: bool = True
    sent_deadline_ms: int | None = None
    health_changed: bool = True

    def committed(self, commit: CommitContext) -> None:
        """A commit is durable: note ready queues, expired reservations and the next deadline."""
        journal, deadlines = commit.journal, commit.state.deadlines
        if journal.ready_queues:
            self.ready.update(journal.ready_queues)
        if journal.expired:
            self.expired += journal.expired
        # Whether the broker's timer would fire too late, or once more for nothing. A removed
        # earliest deadline is reported only once it would have fired: messages are settled all the
        # time, and most deadlines are removed.
        sent_ms = self.sent_deadline_ms
        if sent_ms is None or sent_ms <= commit.now_ms:
            moved = deadlines.earliest_ms() != sent_ms
        else:
            moved = deadlines.is_due(sent_ms - 1)
        if moved:
            self.next_deadline_changed = True
        if moved or self.ready or self.expired:
            self.changed()


class ConnectedExchanges:
    """The exchanges of one partition: its broker's, and any that are fenced and not yet ended."""

    def __init__(self) -> None:
        self._events: set[ExchangeEvents] = set()
        self._epochs: Sequence[int] = ()
        """Those of their brokers."""

    def connect(
        self, broker_epoch: int, changed: Callable[[], None], handed_out: OnHandedOut
    ) -> ExchangeEvents:
        events = ExchangeEvents(broker_epoch, changed, handed_out)
        self._events.add(events)
        self._note_epochs()
        return events

    def disconnect(self, events: ExchangeEvents) -> None:
        self._events.discard(events)
        self._note_epochs()

    def includes(self, broker_epoch: int) -> bool:
        """Whether the broker with that epoch is connected."""
        return broker_epoch in self._epochs

    def _note_epochs(self) -> None:
        self._epochs = [events.broker_epoch for events in self._events]

    def committed(self, commit: CommitContext) -> None:
        """A commit is durable, and its operations have their results."""
        broker_epoch = commit.counters.broker_epoch
        for events in self._events:
            if events.broker_epoch == broker_epoch:
                if commit.handed_out:
                    events.handed_out(commit.handed_out)
                events.committed(commit)
            else:
                events.changed()  # it is fenced, and ends

    def health_changed(self) -> None:
        for events in self._events:
            events.health_changed = True
            events.changed()
