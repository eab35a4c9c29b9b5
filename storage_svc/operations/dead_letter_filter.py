"""The origin of a dead letter, from its headers, and the filter that chooses by it (L9).

Pure. The same filter serves listing, redriving and deleting. Any publisher may write the headers,
so nothing in them is taken for granted.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tidemark.api.broker.v1 import topic_pb2
from tidemark.dead_letters import DeadLetterReason
from tidemark.errors import InvalidArgument
from tidemark.field_checks import unix_ms

HEADER_PREFIX = "tidemark-dead-"
HEADER_REASON = "tidemark-dead-reason"
HEADER_DETAIL = "tidemark-dead-detail"
HEADER_TOPIC = "tidemark-dead-topic"
HEADER_QUEUE = "tidemark-dead-queue"
HEADER_OFFSET = "tidemark-dead-offset"
HEADER_GROUP = "tidemark-dead-group"
HEADER_ATTEMPTS = "tidemark-dead-attempts"
HEADER_TIME = "tidemark-dead-time-ms"

_OFFSET_MAX = 2**63 - 1
_ATTEMPTS_MAX = 2**32 - 1
_TIME_MS_MAX = 253_402_300_799_999  # the end of the year 9999, and of protobuf timestamps


class Story(NamedTuple):
    """Where dead letters come from, and why. All messages of a run died together."""

    reason: str
    source_lmq_name: str
    source_offset: int
    group: str
    attempts: int
    time_ms: int
    detail: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Story":
        """The story in the headers of the first message of a run."""
        return cls(
            headers.get(HEADER_REASON, ""),
            headers.get(HEADER_QUEUE, ""),
            _number(headers.get(HEADER_OFFSET, ""), _OFFSET_MAX),
            headers.get(HEADER_GROUP, ""),
            _number(headers.get(HEADER_ATTEMPTS, ""), _ATTEMPTS_MAX),
            _number(headers.get(HEADER_TIME, ""), _TIME_MS_MAX),
            headers.get(HEADER_DETAIL, ""),
        )


class DeadLetterFilter(NamedTuple):
    """Which dead letters; everything by default."""

    reason: str = ""
    source_lmq_name: str = ""
    after_ms: int = 0
    before_ms: int = 0

    @classmethod
    def from_proto(cls, proto: topic_pb2.DeadLetterFilter) -> "DeadLetterFilter":
        if proto.reason and proto.reason not in set(DeadLetterReason):
            raise InvalidArgument(
                f"reason is one of {', '.join(DeadLetterReason)}, not {proto.reason!r}",
                field="reason",
            )
        return cls(
            proto.reason,
            proto.source_lmq_name,
            _unix_ms(proto, "after_time"),
            _unix_ms(proto, "before_time"),
        )

    def matches(self, story: Story) -> bool:
        return (
            self.reason in ("", story.reason)
            and self.source_lmq_name in ("", story.source_lmq_name)
            and self.after_ms <= story.time_ms
            and (not self.before_ms or story.time_ms < self.before_ms)
        )


def _number(text: str, most: int) -> int:
    """0 for text that is none, or that is too large."""
    number = int(text) if len(text) < 21 and text.isascii() and text.isdigit() else 0
    return number if number <= most else 0


def _unix_ms(proto: topic_pb2.DeadLetterFilter, field: str) -> int:
    """A time of the filter; 0 if it is not set."""
    return max(0, unix_ms(field, getattr(proto, field)))
