"""The planner: from what phase one read to what phase two asks for.

Pure. An action is passed on as storage described it, with the state that it expects (L8), so the
planner decides only whether, when and in which order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

A = TypeVar("A")

OVERDUE_MS = 1_000
"""The broker of a partition expires reservations itself, within milliseconds. What is this late,
it will not expire."""


class FactKind(Enum):
    """What phase one looks for. Closed; the words are on the wire."""

    EXPIRED_RESERVATIONS = "EXPIRED_RESERVATIONS"
    DELAYS_OVER = "DELAYS_OVER"
    SCHEDULES_DUE = "SCHEDULES_DUE"
    DEAD_DEADLINES = "DEAD_DEADLINES"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    OUTBOX = "OUTBOX"


BROKER_DRIVEN = frozenset({FactKind.EXPIRED_RESERVATIONS, FactKind.DELAYS_OVER})
"""What the owner of a partition sees to by itself, as long as it is connected (V1)."""

URGENT = frozenset({FactKind.EXPIRED_RESERVATIONS, FactKind.DELAYS_OVER, FactKind.SCHEDULES_DUE})
"""What somebody may be waiting for. The rest is clearing up, which must not hold it up."""


@dataclass(frozen=True, slots=True)
class Fact(Generic[A]):
    """One thing that is due, and the action that would deal with it."""

    kind: FactKind
    due_ms: int
    action: A


@dataclass(frozen=True, slots=True)
class Plan(Generic[A]):
    """What phase two does."""

    actions: Sequence[A]
    """For the owner of the partition."""

    transfers: Sequence[A]
    """Outbox entries for their destinations, in the order of their sequences."""


def plan(facts: Sequence[Fact[A]], now_ms: int, *, driven: bool) -> Plan[A]:
    """What to do about the facts, by partition time; `driven` while a broker is connected."""
    actions: list[A] = []
    transfers: list[A] = []
    for fact in facts:
        if fact.due_ms > _latest_ms(fact.kind, now_ms, driven):
            continue
        (transfers if fact.kind is FactKind.OUTBOX else actions).append(fact.action)
    return Plan(actions, transfers)


def _latest_ms(kind: FactKind, now_ms: int, driven: bool) -> int:
    """The latest due time that is acted upon: nothing early, nothing that the broker will do."""
    return now_ms - OVERDUE_MS if driven and kind in BROKER_DRIVEN else now_ms
