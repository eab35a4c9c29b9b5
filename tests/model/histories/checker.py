"""The rules of exclusive queues, checked against a recorded history (E1, E8, E9, E10).

Pure: a history in, violations out. A rule accuses only where no delay of a network could excuse
what was seen: a fact counts against what was asked after it was known, never before.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.model.histories.history import (
    ASKS,
    By,
    Delivered,
    Disturbed,
    Event,
    Outcome,
    Owned,
    Published,
    Settled,
)


class Rule(StrEnum):
    """What must hold in every history."""

    ONE_OWNER_PER_EPOCH = "at most one owner per epoch"
    EPOCHS_GROW = "epochs only grow"
    NO_STALE_DELIVERY = "no client is served below the current epoch"
    NO_STALE_SETTLE = "no settle is accepted below the current epoch"
    SETTLED_STAYS_SETTLED = "what was acknowledged does not come again"
    NOTHING_SKIPPED = "no message is skipped unsettled"
    FIRST_MESSAGE_IN_TIME = "a new owner gets its first message within the bound"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that an event breaks, and how."""

    rule: Rule
    at: int
    how: str

    def __str__(self) -> str:
        return f"event {self.at} breaks {self.rule!r}: {self.how}"


def check(events: Sequence[Event], bound_ms: int) -> list[Violation]:
    """Every violation. The history ends with every queue drained by an owner that acknowledges."""
    epochs = _Epochs(events)
    return sorted(
        [
            *_one_owner_per_epoch(events),
            *_epochs_grow(events, epochs),
            *_no_stale_delivery(events, epochs),
            *_no_stale_settle(events, epochs),
            *_settled_stays_settled(events),
            *_nothing_skipped(events),
            *_first_message_in_time(events, bound_ms),
        ],
        key=lambda violation: violation.at,
    )


class _Epochs:
    """The highest epoch of each queue that was known before a position."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._known: dict[str, list[int]] = {}
        for at, event in enumerate(events):
            if isinstance(event, Owned | Delivered):
                known = self._known.setdefault(event.queue, [0] * (len(events) + 1))
                known[at + 1] = event.epoch
        for known in self._known.values():
            for at in range(1, len(known)):
                known[at] = max(known[at], known[at - 1])

    def before(self, queue: str, position: int) -> int:
        return self._known[queue][position] if queue in self._known else 0


def _one_owner_per_epoch(events: Sequence[Event]) -> Iterator[Violation]:
    owners: dict[tuple[str, int], str] = {}
    for at, event in enumerate(events):
        if isinstance(event, Owned | Delivered):
            owner = owners.setdefault((event.queue, event.epoch), event.client)
            if owner != event.client:
                how = f"{event.queue} under {event.epoch} is both {owner}'s and {event.client}'s"
                yield Violation(Rule.ONE_OWNER_PER_EPOCH, at, how)


def _epochs_grow(events: Sequence[Event], epochs: _Epochs) -> Iterator[Violation]:
    for at, event in enumerate(events):
        if isinstance(event, Owned):
            known = epochs.before(event.queue, event.began)
            if event.epoch < known:
                how = f"{event.client} owns {event.queue} under {event.epoch}, after {known}"
                yield Violation(Rule.EPOCHS_GROW, at, how)


def _no_stale_delivery(events: Sequence[Event], epochs: _Epochs) -> Iterator[Violation]:
    on_stream: dict[tuple[int, str], int] = {}
    for at, event in enumerate(events):
        if not isinstance(event, Delivered):
            continue
        stream = (event.stream, event.queue)
        known = on_stream.get(stream, 0)
        if event.began is not None:
            known = max(known, epochs.before(event.queue, event.began))
        if event.epoch < known:
            how = f"{event.client} got {event.message} under {event.epoch}, after {known}"
            yield Violation(Rule.NO_STALE_DELIVERY, at, how)
        on_stream[stream] = max(known, event.epoch)


def _no_stale_settle(events: Sequence[Event], epochs: _Epochs) -> Iterator[Violation]:
    for at, event in enumerate(events):
        if isinstance(event, Settled) and event.outcome is Outcome.ACCEPTED:
            known = epochs.before(event.queue, event.began)
            if event.epoch < known:
                how = f"{event.client} settled {event.message} under {event.epoch}, after {known}"
                yield Violation(Rule.NO_STALE_SETTLE, at, how)


def _settled_stays_settled(events: Sequence[Event]) -> Iterator[Violation]:
    """A later hand-out has a higher `delivery_count`, also if it is known earlier. On a connection
    that is made after the acknowledgement, to any broker, the message does not come at all."""
    acked: dict[tuple[str, int], int] = {}
    acked_at: dict[tuple[str, int], int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Settled) and event.acked and event.outcome is Outcome.ACCEPTED:
            message = (event.queue, event.message)
            acked[message] = min(event.delivery_count, acked.get(message, event.delivery_count))
            acked_at.setdefault(message, at)
    for at, event in enumerate(events):
        if isinstance(event, Delivered):
            message = (event.queue, event.message)
            acked_as = acked.get(message)
            if acked_as is None:
                continue
            if event.delivery_count > acked_as or event.since > acked_at[message]:
                how = f"{event.message} was acknowledged as delivery {acked_as} and came again"
                yield Violation(Rule.SETTLED_STAYS_SETTLED, at, how)


def _nothing_skipped(events: Sequence[Event]) -> Iterator[Violation]:
    settled = {
        (event.queue, event.message)
        for event in events
        if isinstance(event, Settled) and event.acked and event.outcome is not Outcome.REFUSED
    }
    newest: dict[tuple[int, str], int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Published) and (event.queue, event.message) not in settled:
            how = f"{event.message} was published and never acknowledged"
            yield Violation(Rule.NOTHING_SKIPPED, at, how)
        elif isinstance(event, Delivered) and event.delivery_count == 1:
            stream = (event.stream, event.queue)
            if event.offset < newest.get(stream, 0):
                how = f"{event.message} came for the first time after what was published later"
                yield Violation(Rule.NOTHING_SKIPPED, at, how)
            newest[stream] = max(event.offset, newest.get(stream, 0))


def _first_message_in_time(events: Sequence[Event], bound_ms: int) -> Iterator[Violation]:
    """An owner that waits, of a queue with messages, whom nothing disturbs, is served."""
    began_under: dict[tuple[str, int], int] = {}
    maybe_acked: dict[tuple[str, int], int] = {}
    arrived_ms: dict[tuple[str, int], list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        if isinstance(event, Owned | Delivered):
            began_under.setdefault((event.queue, event.epoch), at)
        if isinstance(event, Delivered):
            arrived_ms[event.queue, event.epoch].append(event.at_ms)
        if isinstance(event, Settled) and event.acked and event.outcome is not Outcome.REFUSED:
            message = (event.queue, event.message)
            maybe_acked[message] = min(event.epoch, maybe_acked.get(message, event.epoch))
    disturbances = [event for event in events if isinstance(event, Disturbed)]
    for at, event in enumerate(events):
        if not isinstance(event, Owned) or not event.waits:
            continue
        if event.by is not By.SUBSCRIBED or began_under[event.queue, event.epoch] < at:
            continue
        backlog = [
            each.message
            for each in events[: event.began]
            if isinstance(each, Published)
            and each.queue == event.queue
            and maybe_acked.get((each.queue, each.message), event.epoch) >= event.epoch
        ]
        if not backlog or any(_disturbs(each, event, bound_ms) for each in disturbances):
            continue
        first_ms = min(arrived_ms.get((event.queue, event.epoch), ()), default=None)
        if first_ms is None or first_ms > event.at_ms + bound_ms:
            took = "never" if first_ms is None else f"after {first_ms - event.at_ms} ms"
            how = f"{event.client} owns {event.queue} under {event.epoch}, and got one {took}"
            yield Violation(Rule.FIRST_MESSAGE_IN_TIME, at, how)


def _disturbs(disturbance: Disturbed, owned: Owned, bound_ms: int) -> bool:
    """Whether it happened near enough to delay the first message of the owner."""
    if abs(disturbance.at_ms - owned.at_ms) > bound_ms:
        return False
    if disturbance.what == ASKS:
        return disturbance.queue == owned.queue and disturbance.client != owned.client
    return disturbance.queue in ("", owned.queue) and disturbance.client in ("", owned.client)
