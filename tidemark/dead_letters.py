"""The values of the header `tidemark-dead-reason`. Closed."""

from enum import StrEnum


class DeadLetterReason(StrEnum):
    """Why a message was dead-lettered."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TIME_TO_LIVE = "time_to_live"
    REJECTED = "rejected"
    MAX_WAIT_TIME_EVICTION = "max_wait_time_eviction"
