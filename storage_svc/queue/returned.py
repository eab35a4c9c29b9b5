"""Messages that were given back: when they may be handed out again, and where they go. Pure."""

from enum import IntEnum
from typing import NamedTuple

from storage_svc.queue.retry import RetryPolicy, Turn
from storage_svc.queue.run import Slice


class ReturnPlace(IntEnum):
    """Where messages that came back go, or wait for their delay to end. The numbers are stored."""

    IN_PLACE = 0
    BURIED = 1
    BEHIND = 2
    HOLDING = 3  # in place; messages after them wait while they are delayed


class Returned(NamedTuple):
    """Messages that were given back, and when they may be handed out again."""

    slice: Slice
    not_before_ms: int = 0  # 0: ready now
    place: ReturnPlace = ReturnPlace.IN_PLACE
    turn: Turn = Turn()  # of those that go behind; its offset is known once they are ready


def ready(slice_: Slice, turn: Turn | None) -> Returned:
    """Messages that are in their lane: in place, or in its retry line if they have a turn."""
    if turn is None:
        return Returned(slice_)
    return Returned(slice_, place=ReturnPlace.BEHIND, turn=turn)


def as_retry(
    slice_: Slice, turn: Turn, policy: RetryPolicy, now_ms: int, chance: float
) -> Returned:
    """Messages whose delivery failed, with the delay and the place of the topic (V9)."""
    delay_ms = policy.delay_after_ms(slice_.attempts, chance)
    not_before_ms = now_ms + delay_ms if delay_ms else 0
    if policy.first:
        return Returned(slice_, not_before_ms, ReturnPlace.HOLDING)
    return Returned(slice_, not_before_ms, ReturnPlace.BEHIND, turn)
