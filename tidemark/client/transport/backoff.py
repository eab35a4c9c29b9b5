"""Whether to retry a call, and how long to wait first. Pure: it computes waits and never sleeps.

Waits double with each retry up to a ceiling, and each is drawn at random from its upper half, so
that clients of a lost broker do not reconnect in step.
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

_TRANSIENT: Final = (CommitOutcomeUnknown, NotOwner, ResourceExhausted, TopicVersionMismatch)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later without intervention.

    A full queue or disk is not transient: the caller decides whether to wait for it.
    """
    unavailable = isinstance(error, TidemarkError) and error.code is StatusCode.UNAVAILABLE
    return unavailable or isinstance(error, _TRANSIENT)


class Backoff:
    """The waits between the retries of one operation."""

    __slots__ = ("_max_ms", "_min_ms", "_random", "_wait_ms")

    def __init__(self, random: Random, *, min_ms: int = 50, max_ms: int = 2_000) -> None:
        assert 0 < min_ms <= max_ms, "0 < min_ms <= max_ms"
        self._random = random
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._wait_ms = min_ms

    def next_ms(self, at_least_ms: int = 0) -> int:
        """The next wait; `at_least_ms` is the server's RetryInfo, capped at the ceiling."""
        wait_ms = max(self._wait_ms, min(at_least_ms, self._max_ms))
        self._wait_ms = min(2 * self._wait_ms, self._max_ms)
        return wait_ms - self._random.randrange(wait_ms // 2 + 1)

    def reset(self) -> None:
        """The operation succeeded: start from the shortest wait again."""
        self._wait_ms = self._min_ms
