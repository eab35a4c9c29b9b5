"""Whether to retry a call, and how long to wait first. Pure: it computes waits and never sleeps.

Waits double with each retry up to a ceiling, and each is drawn at random from its upper half, so
that clients of a lost broker do not reconnect in step. Where a partition may be moving to another
broker, the first waits are short: it is back soon, or gone for long.
"""

from random import Random
from typing import Final

from grpc import StatusCode

from tidemark.errors import (
    CommitOutcomeUnknown,
    NotOwner,
    ResourceExhausted,
    TidemarkError,
    TopicVersionMismatch,
)

MOVE_WAIT_MS_MAX: Final = 250
"""The longest wait while a partition may be moving to another broker."""
_MOVE_TRIES: Final = 40
"""Retries after which it is not moving: they take some 8 s, twice as long as a failover."""

_TRANSIENT: Final = (CommitOutcomeUnknown, NotOwner, ResourceExhausted, TopicVersionMismatch)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later without intervention.

    A full queue or disk is not transient: the caller decides whether to wait for it.
    """
    unavailable = isinstance(error, TidemarkError) and error.code is StatusCode.UNAVAILABLE
    return unavailable or isinstance(error, _TRANSIENT)


class Backoff:
    """The waits between the retries of one operation."""

    __slots__ = ("_max_ms", "_min_ms", "_random", "_short_tries", "_tries", "_wait_ms")

    def __init__(
        self, random: Random, *, min_ms: int = 50, max_ms: int = 2_000, may_move: bool = False
    ) -> None:
        """`may_move`: the operation fails while a partition moves from one broker to another."""
        assert 0 < min_ms <= max_ms, "0 < min_ms <= max_ms"
        self._short_tries = _MOVE_TRIES if may_move else 0
        self._tries = 0
        self._random = random
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._wait_ms = min_ms

    def next_ms(self, at_least_ms: int = 0) -> int:
        """The next wait; `at_least_ms` is the server's RetryInfo, capped at the ceiling."""
        self._tries += 1
        max_ms = self._max_ms
        if self._tries <= self._short_tries:
            max_ms = min(max_ms, MOVE_WAIT_MS_MAX)
        wait_ms = max(self._wait_ms, min(at_least_ms, max_ms))
        self._wait_ms = min(2 * self._wait_ms, max_ms)
        return wait_ms - self._random.randrange(wait_ms // 2 + 1)

    def reset(self) -> None:
        """The operation succeeded: start from the shortest wait again."""
        self._wait_ms = self._min_ms
        self._tries = 0
