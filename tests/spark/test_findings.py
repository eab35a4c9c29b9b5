"""Why nothing is due, per topic and rule (R11)."""

import pytest

from spark_batch.passes.findings import Finding, explain
from tidemark.topics import Topic, TopicSettings

DAYS = {"inactive_queue": 7, "old_records": 90}


@pytest.mark.parametrize(
    ("settings", "kind", "why_not"),
    [
        (TopicSettings(retention_seconds=5), "expired", "disabled"),
        (TopicSettings(retention_enabled=True), "expired", "zero"),
        (TopicSettings(retention_enabled=True, retention_seconds=5), "expired", "too young"),
        (TopicSettings(completed_retention_seconds=5), "completed", "disabled"),
        (TopicSettings(retention_enabled=True, retention_seconds=5), "completed", "zero"),
        (TopicSettings(), "max_wait_time_eviction", "zero"),
        (TopicSettings(max_wait_time_seconds=5), "max_wait_time_eviction", "too young"),
    ],
)
def test_a_rule_that_takes_nothing_says_why(
    settings: TopicSettings, kind: str, why_not: str
) -> None:
    findings = explain([Topic("t", settings)], [kind], {}, DAYS)

    assert findings == [Finding("t", kind, 0, why_not)]


def test_a_rule_that_takes_something_needs_no_reason() -> None:
    findings = explain(
        [Topic("t"), Topic("u")], ["inactive_queue"], {("t", "inactive_queue"): 3}, DAYS
    )

    assert findings == [
        Finding("t", "inactive_queue", 3),
        Finding("u", "inactive_queue", 0, "too young"),
    ]


def test_queues_of_deleted_topics_are_counted() -> None:
    """R3, R8."""
    counts = {("gone", "inactive_queue"): 2}

    assert explain([Topic("t")], ["inactive_queue"], counts, DAYS) == [
        Finding("t", "inactive_queue", 0, "too young"),
        Finding("gone", "inactive_queue", 2),
    ]


def test_records_are_found_by_table() -> None:
    counts = {("history", "old_records"): 2}

    assert explain([Topic("t")], ["old_records"], counts, DAYS) == [
        Finding("history", "old_records", 2)
    ]
    assert explain([], ["old_records"], {}, {"old_records": 0}) == [
        Finding("", "old_records", 0, "zero")
    ]
