"""Why a message was dead-lettered, in the words of the header `tidemark-dead-reason`. Closed."""

from enum import StrEnum


class DeadLetterReason(StrEnum):
    """What ended the life of a message in its queue."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TIME_TO_LIVE = "time_to_live"
    REJECTED = "rejected"
    MAX_WAIT_TIME_EVICTION = "max_wait_time_eviction"
