"""Findings: removals or planned removals of a pass by topic and rule, and why none was due (R11).

Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from spark_batch.passes import retention_types
from tidemark.topics import Topic, TopicSettings

DISABLED: Final = "disabled"
ZERO: Final = "zero"
TOO_YOUNG: Final = "too young"

Counts = Mapping[tuple[str, str], int]
"""Messages, queues, groups or records by topic (old records: table) and retention type."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule for one topic, or for one table of records."""

    topic: str
    rule: str
    due: int
    why_not: str = ""


def explain(
    topics: Iterable[Topic], kinds: Iterable[str], counts: Counts, days: Mapping[str, int]
) -> list[Finding]:
    """A finding per topic and kind, and per table of old records; `days` are cluster-wide limits.

    "Too young" covers everything that may become due later, including messages that are unsettled
    or reserved.
    """
    names = [topic.name for topic in topics]
    findings = []
    for kind in kinds:
        if kind == retention_types.OLD_RECORDS:
            of_kind = sorted(name for name, found in counts if found == kind) or [""]
            why_not = {name: _by_days(days[kind]) for name in of_kind}
        elif kind == retention_types.INACTIVE_QUEUE:
            # Queues outlive their topic until they are removed.
            gone = sorted({name for name, found in counts if found == kind} - set(names))
            why_not = dict.fromkeys([*names, *gone], _by_days(days[kind]))
        else:
            why_not = {topic.name: _by_limit(topic.settings, kind) for topic in topics}
        for name, reason in why_not.items():
            due = counts.get((name, kind), 0)
            findings.append(Finding(name, kind, due, "" if due else reason))
    return findings


def describe_failures(failed: Mapping[int, str]) -> str:
    """The partitions that failed, in one line for operators; empty if none did."""
    return "; ".join(f"partition {number}: {failed[number]}" for number in sorted(failed))


def _by_days(days: int) -> str:
    return TOO_YOUNG if days else ZERO


def _by_limit(settings: TopicSettings, kind: str) -> str:
    if kind == retention_types.MAX_WAIT_TIME_EVICTION:
        return TOO_YOUNG if settings.max_wait_time_seconds else ZERO
    if kind == retention_types.ABANDONED_GROUP:
        return TOO_YOUNG if settings.group_expiry_seconds else ZERO
    if not settings.retention_enabled:
        return DISABLED
    expires = kind == retention_types.EXPIRED
    limit_s = settings.retention_seconds if expires else settings.completed_retention_seconds
    return TOO_YOUNG if limit_s else ZERO
