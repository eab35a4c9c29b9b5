"""The planner: turns the facts that phase one read into the actions of phase two.

Pure. Storage describes each action together with the state it expects (L8), so the planner only
decides whether to act now and in which order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

A = TypeVar("A")

OVERDUE_MS = 1_000
"""A connected broker expires reservations within milliseconds. A reservation that is this late was
missed, and the sweep expires it."""


class FactKind(Enum):
    """The kinds of due work. Closed: the values are part of the wire format."""

    EXPIRED_RESERVATIONS = "EXPIRED_RESERVATIONS"
    DELAYS_OVER = "DELAYS_OVER"
    SCHEDULES_DUE = "SCHEDULES_DUE"
    DEAD_DEADLINES = "DEAD_DEADLINES"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    OUTBOX_DESTINATIONS = "OUTBOX_DESTINATIONS"


BROKER_DRIVEN = frozenset({FactKind.EXPIRED_RESERVATIONS, FactKind.DELAYS_OVER})
"""Kinds that a connected broker handles itself (V1)."""

URGENT = frozenset({FactKind.EXPIRED_RESERVATIONS, FactKind.DELAYS_OVER, FactKind.SCHEDULES_DUE})
"""Kinds that a consumer may be waiting for. The others are housekeeping and must not delay them."""


@dataclass(frozen=True, slots=True)
class Fact(Generic[A]):
    """One piece of due work and the action that handles it."""

    kind: FactKind
    due_ms: int
    action: A


def plan(facts: Sequence[Fact[A]], now_ms: int, *, has_broker: bool) -> list[A]:
    """The actions of phase two, by partition time, for the holder of the partition.

    `has_broker` if a broker is connected to the partition.
    """
    return [
        fact.action for fact in facts if fact.due_ms <= _latest_ms(fact.kind, now_ms, has_broker)
    ]


def _latest_ms(kind: FactKind, now_ms: int, has_broker: bool) -> int:
    """The latest due time to act on: nothing early, and nothing that the broker still handles."""
    return now_ms - OVERDUE_MS if has_broker and kind in BROKER_DRIVEN else now_ms
