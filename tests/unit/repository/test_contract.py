"""The contract agrees with the code: reasons that the protos promise exist, and the other way."""

import re

from tests.support.repository import ROOT
from tidemark import errors
from tidemark.api.broker.v1 import message_pb2, topic_pb2
from tidemark.api.storage.v1 import retention_pb2

PROTOS = sorted((ROOT / "proto").rglob("*.proto"))
# Words in capitals that a comment may use and that are not reasons.
NOT_REASONS = re.compile(
    r"^(SCAN_KIND|SYNC_MODE|SUBSCRIPTION_STATE|DEAD_REASON|ACTION_OUTCOME|AWAITING_SWEEP|SWEEP_FAILED"
    r"|COMMIT_FAILED|LIFECYCLE_SILENT|OPEN_FAILED|CLOCK_JUMPED|DEAD_LETTER|NOT_PRESENT|NOT_MATERIALIZED"
    r"|HAS_INFLIGHT|RACE_LOST|DATA_LOST|TAKEN_OVER|_)"
)


def reasons_promised() -> set[str]:
    words = set()
    for proto in PROTOS:
        for line in proto.read_text().splitlines():
            if "//" in line:
                words |= set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", line.partition("//")[2]))
    return {word for word in words if not NOT_REASONS.match(word)}


def test_every_reason_that_the_protos_name_is_an_error_class() -> None:
    """S1, S3: an rpc's comment lists the reasons it fails with, and no reason is made up."""
    assert reasons_promised() - set(errors.BY_REASON) == set()


def test_eviction_outcomes_are_the_closed_set_of_the_requirements() -> None:
    """I4: skipped outcomes and storage's answers, nothing else."""
    names = {
        name.removeprefix("EVICTION_OUTCOME_")
        for name in topic_pb2.EvictionOutcome.DESCRIPTOR.values_by_name
    }

    assert names == {
        "UNSPECIFIED",
        "NOT_TRACKED",
        "ACTIVE",
        "NOT_IDLE_ENOUGH",
        "PENDING_SETTLEMENTS",
        "HAS_DELIVERIES",
        "EVICTED",
        "NOT_PRESENT",
        "NOT_MATERIALIZED",
        "HAS_INFLIGHT",
        "RACE_LOST",
    }


def test_retention_types_are_the_closed_set_of_the_requirements() -> None:
    """R6: the kinds of rows in the history."""
    names = {
        name.removeprefix("RETENTION_TYPE_").lower()
        for name in retention_pb2.RetentionType.DESCRIPTOR.values_by_name
    }

    assert names == {
        "unspecified",
        "expired",
        "completed",
        "max_wait_time_eviction",
        "inactive_queue",
        "old_records",
        "time_to_live",
        "attempts_exhausted",
        "abandoned_group",
        "purge",
    }


def test_a_topic_has_every_setting_of_the_requirements() -> None:
    """S7: settings that can be set at creation or update."""
    fields = set(topic_pb2.TopicSettings.DESCRIPTOR.fields_by_name)

    assert fields >= {
        "subscription",
        "partitions",
        "visibility_timeout_ms",
        "max_attempts",
        "dead_letter_topic",
        "retention_enabled",
        "retention_seconds",
        "completed_retention_seconds",
        "max_wait_time_seconds",
        "idle_after_ms",
        "fairness_weights",
        "queue_messages_max",
        "queue_bytes_max",
    }


def test_every_way_to_settle_is_in_the_contract() -> None:
    """V6: ack, nack, dead-letter, extend and release."""
    actions = message_pb2.Settlement.DESCRIPTOR.oneofs_by_name["action"].fields

    assert [action.name for action in actions] == [
        "ack",
        "nack",
        "dead_letter",
        "extend",
        "release",
    ]
