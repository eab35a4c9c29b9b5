"""The rules of exclusive queues, checked against a recorded history (E1, E8, E9, E10).

Pure: a history in, violations out. A rule accuses only where no delay of a network could excuse
what was seen: a fact counts against what was asked after it was known, never before.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.model.histories.history import (
    ASKS,
    LOST,
    By,
    Delivered,
    Disturbed,
    Event,
    Outcome,
    Owned,
    Published,
    Settled,
)

LOST_WITHIN_MS: Final = 100
"""What was answered before data was lost is known so long after that was reported, at the latest;
nothing is answered meanwhile."""


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
    losses = _Losses(events)
    epochs = _Epochs(events, losses)
    return sorted(
        [
            *_one_owner_per_epoch(events),
            *_epochs_grow(events, epochs),
            *_no_stale_delivery(events, epochs, losses),
            *_no_stale_settle(events, epochs),
            *_settled_stays_settled(events, losses),
            *_nothing_skipped(events, losses),
            *_first_message_in_time(events, bound_ms, losses),
        ],
        key=lambda violation: violation.at,
    )


class _Losses:
    """When data was lost: what was answered before may be undone."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._reported = [
            (at, event.at_ms)
            for at, event in enumerate(events)
            if isinstance(event, Disturbed) and event.what == LOST
        ]

    def may_undo(self, at_ms: int, before: int | None = None) -> bool:
        """Whether what was known at that time may be lost, as reported before a position."""
        return any(
            at_ms <= lost_ms + LOST_WITHIN_MS
            for at, lost_ms in self._reported
            if before is None or at < before
        )


class _Epochs:
    """The highest epoch of each queue that was known before a position, and that was not lost."""

    def __init__(self, events: Sequence[Event], losses: _Losses) -> None:
        self._events = events
        self._losses = losses
        self._of_queue: dict[str, list[int]] = defaultdict(list)
        """Positions at which an epoch became known."""
        for at, event in enumerate(events):
            if isinstance(event, Owned | Delivered):
                self._of_queue[event.queue].append(at)

    def before(self, queue: str, position: int) -> int:
        highest = 0
        for at in self._of_queue[queue]:
            event = self._events[at]
            if at >= position:
                break
            assert isinstance(event, Owned | Delivered)
            if event.epoch > highest and not self._losses.may_undo(event.at_ms, position):
                highest = event.epoch
        return highest


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


def _no_stale_delivery(
    events: Sequence[Event], epochs: _Epochs, losses: _Losses
) -> Iterator[Violation]:
    on_stream: dict[tuple[int, str], tuple[int, int]] = {}
    for at, event in enumerate(events):
        if not isinstance(event, Delivered):
            continue
        stream = (event.stream, event.queue)
        known, since_ms = on_stream.get(stream, (0, 0))
        if losses.may_undo(since_ms, at):
            known = 0
        if event.began is not None:
            known = max(known, epochs.before(event.queue, event.began))
        if event.epoch < known:
            how = f"{event.client} got {event.message} under {event.epoch}, after {known}"
            yield Violation(Rule.NO_STALE_DELIVERY, at, how)
        if event.epoch >= known:
            on_stream[stream] = event.epoch, event.at_ms


def _no_stale_settle(events: Sequence[Event], epochs: _Epochs) -> Iterator[Violation]:
    for at, event in enumerate(events):
        if isinstance(event, Settled) and event.outcome is Outcome.ACCEPTED:
            known = epochs.before(event.queue, event.began)
            if event.epoch < known:
                how = f"{event.client} settled {event.message} under {event.epoch}, after {known}"
                yield Violation(Rule.NO_STALE_SETTLE, at, how)


def _settled_stays_settled(events: Sequence[Event], losses: _Losses) -> Iterator[Violation]:
    """A later hand-out has a higher `delivery_count`, also if it is known earlier. On a connection
    that is made after the acknowledgement, to any broker, the message does not come at all."""
    acks: dict[tuple[str, int], list[tuple[int, Settled]]] = defaultdict(list)
    for at, event in enumerate(events):
        if isinstance(event, Settled) and event.acked and event.outcome is Outcome.ACCEPTED:
            acks[event.queue, event.message].append((at, event))
    for at, event in enumerate(events):
        if not isinstance(event, Delivered):
            continue
        for acked_at, ack in acks[event.queue, event.message]:
            # Also the counts of deliveries go back then.
            if losses.may_undo(ack.at_ms, at) or losses.may_undo(event.at_ms, acked_at):
                continue
            if event.delivery_count > ack.delivery_count or event.since > acked_at:
                how = f"{event.message} was acknowledged as delivery {ack.delivery_count}"
                yield Violation(Rule.SETTLED_STAYS_SETTLED, at, f"{how} and came again")
                break


def _nothing_skipped(events: Sequence[Event], losses: _Losses) -> Iterator[Violation]:
    settled = {
        (event.queue, event.message)
        for event in events
        if isinstance(event, Settled) and event.acked and event.outcome is not Outcome.REFUSED
    }
    newest: dict[tuple[int, str], tuple[int, int]] = {}
    for at, event in enumerate(events):
        if isinstance(event, Published) and (event.queue, event.message) not in settled:
            if losses.may_undo(event.at_ms):
                continue
            how = f"{event.message} was published and never acknowledged"
            yield Violation(Rule.NOTHING_SKIPPED, at, how)
        elif isinstance(event, Delivered) and event.delivery_count == 1:
            stream = (event.stream, event.queue)
            known, since_ms = newest.get(stream, (0, 0))
            if losses.may_undo(since_ms, at):  # its offsets are given again
                known = 0
            if event.offset < known:
                how = f"{event.message} came for the first time after what was published later"
                yield Violation(Rule.NOTHING_SKIPPED, at, how)
            if event.offset >= known:
                newest[stream] = event.offset, event.at_ms


def _first_message_in_time(
    events: Sequence[Event], bound_ms: int, losses: _Losses
) -> Iterator[Violation]:
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
            and not losses.may_undo(each.at_ms)
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
