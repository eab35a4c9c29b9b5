"""Settings of a topic: their defaults, their ranges, and how they travel."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import InvalidArgument, InvalidName
from tidemark.rpc.topic_codec import (
    settings_from_proto,
    settings_to_proto,
    topic_from_proto,
    topic_to_proto,
)
from tidemark.topics import (
    SETTING_NAMES,
    ConsumptionRecords,
    MaxWaitAction,
    RetryPlace,
    Subscription,
    Topic,
    TopicSettings,
    validate,
)

PARTITIONS = 4
RANGES = {
    "partitions": (1, PARTITIONS),
    "visibility_timeout_ms": (50, 12 * 60 * 60 * 1000),
    "max_attempts": (0, limits.MAX_ATTEMPTS_MAX),
    "retention_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "completed_retention_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "max_wait_time_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "idle_after_ms": (limits.IDLE_AFTER_MS_MIN, limits.IDLE_AFTER_MS_MAX),
    "default_ttl_ms": (0, limits.TTL_MS_MAX),
    "retry_delay_ms": (0, limits.NACK_DELAY_MS_MAX),
    "retry_delay_ms_max": (0, limits.NACK_DELAY_MS_MAX),
    "group_expiry_seconds": (0, limits.RETENTION_SECONDS_MAX),
}
TIMES = st.integers(0, 2**42)
SETTINGS = st.builds(
    TopicSettings,
    subscription=st.sampled_from(Subscription),
    partitions=st.integers(1, 2**31),
    visibility_timeout_ms=st.integers(1, 2**31),
    max_attempts=st.integers(0, 2**31),
    dead_letter_topic=st.sampled_from(["", "dead"]),
    retention_enabled=st.booleans(),
    retention_seconds=st.integers(0, 2**31),
    completed_retention_seconds=st.integers(0, 2**31),
    max_wait_time_seconds=st.integers(0, 2**31),
    max_wait_action=st.sampled_from(MaxWaitAction),
    idle_after_ms=st.integers(1, 2**31),
    queue_messages_max=st.integers(0, 2**31),
    queue_bytes_max=st.integers(0, 2**31),
    fairness_weights=st.dictionaries(st.text("ab", max_size=2), st.integers(1, 100)),
    default_ttl_ms=st.integers(0, 2**31),
    consumption_records=st.sampled_from(ConsumptionRecords),
    retry_delay_ms=st.integers(0, 2**31),
    retry_delay_ms_max=st.integers(0, 2**31),
    retry_multiplier=st.floats(1, 100),
    retry_jitter=st.floats(0, 1),
    retry_place=st.sampled_from(RetryPlace),
    group_expiry_seconds=st.integers(0, 2**31),
)


def refused_field(topic: Topic) -> str:
    with pytest.raises(InvalidArgument) as refused:
        validate(topic, PARTITIONS)
    return refused.value.metadata["field"]


def with_settings(**settings: Any) -> Topic:
    return Topic("orders", TopicSettings(**settings))


def test_the_defaults_are_the_documented_ones() -> None:
    """S7."""
    defaults = TopicSettings()

    assert defaults.subscription is Subscription.SHARED
    assert not defaults.exclusive
    assert defaults.partitions == 1
    assert defaults.visibility_timeout_ms == 30_000
    assert defaults.max_attempts == 0
    assert defaults.dead_letter_topic == ""
    assert not defaults.retention_enabled
    assert defaults.retention_seconds == 0
    assert defaults.completed_retention_seconds == 0
    assert defaults.max_wait_time_seconds == 0
    assert defaults.idle_after_ms == 600_000
    assert (defaults.queue_messages_max, defaults.queue_bytes_max) == (0, 0)
    assert defaults.fairness_weights == {}
    validate(Topic("orders"), PARTITIONS)


@pytest.mark.parametrize(("name", "low", "high"), [(name, *RANGES[name]) for name in RANGES])
def test_a_number_is_accepted_at_its_limits_and_refused_one_past_them(
    name: str, low: int, high: int
) -> None:
    """S3, S7: with the name of the setting."""
    validate(with_settings(**{name: low}), PARTITIONS)
    validate(with_settings(**{name: high}), PARTITIONS)

    assert refused_field(with_settings(**{name: low - 1})) == name
    assert refused_field(with_settings(**{name: high + 1})) == name


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a" * 129])
def test_a_topic_needs_a_legal_name(name: str) -> None:
    """S3."""
    with pytest.raises(InvalidName):
        validate(Topic(name), PARTITIONS)
    if name:
        with pytest.raises(InvalidName):
            validate(with_settings(dead_letter_topic=name), PARTITIONS)


def test_a_topic_is_not_its_own_dead_letter_topic() -> None:
    """L6."""
    validate(with_settings(dead_letter_topic="dead"), PARTITIONS)

    assert refused_field(with_settings(dead_letter_topic="orders")) == "dead_letter_topic"


def test_dead_lettering_what_waited_too_long_needs_a_dead_letter_topic() -> None:
    """R5."""
    settings = TopicSettings(max_wait_action=MaxWaitAction.DEAD_LETTER, dead_letter_topic="dead")
    validate(Topic("orders", settings), PARTITIONS)

    without = replace(settings, dead_letter_topic="")

    assert refused_field(Topic("orders", without)) == "max_wait_action"


def test_an_exclusive_topic_lives_in_one_partition() -> None:
    """E1."""
    exclusive = TopicSettings(subscription=Subscription.EXCLUSIVE)
    assert exclusive.exclusive
    validate(Topic("orders", exclusive), PARTITIONS)

    assert refused_field(Topic("orders", replace(exclusive, partitions=2))) == "partitions"


@pytest.mark.parametrize(("weight", "legal"), [(0, False), (1, True), (100, True), (101, False)])
def test_weights_have_a_range_so_that_no_key_starves(weight: int, legal: bool) -> None:
    """V7, S7."""
    weighted = with_settings(fairness_weights={"": 1, "big": weight})

    if legal:
        validate(weighted, PARTITIONS)
    else:
        assert refused_field(weighted) == "fairness_weights"


def test_the_number_of_weights_is_bounded() -> None:
    """S3."""
    most = {str(number): 1 for number in range(limits.FAIRNESS_WEIGHTS_MAX)}
    validate(with_settings(fairness_weights=most), PARTITIONS)

    assert refused_field(with_settings(fairness_weights={**most, "more": 1})) == "fairness_weights"


def test_a_weight_needs_a_legal_key() -> None:
    """S3."""
    with pytest.raises(InvalidName):
        validate(with_settings(fairness_weights={" ": 1}), PARTITIONS)


@given(SETTINGS, st.integers(0, 2**63), TIMES, TIMES)
def test_a_topic_survives_the_wire(
    settings: TopicSettings, version: int, created_ms: int, updated_ms: int
) -> None:
    """S7: every setting is shown by get."""
    topic = Topic("orders", settings, version, created_ms, updated_ms)

    wire = topic_to_proto(topic).SerializeToString()

    assert topic_from_proto(topic_pb2.Topic.FromString(wire)) == topic


def test_an_empty_proto_means_the_defaults() -> None:
    """S7."""
    assert settings_from_proto(topic_pb2.TopicSettings()) == TopicSettings()


def test_what_leaves_has_its_defaults_filled_in() -> None:
    """S7."""
    shown = settings_to_proto(TopicSettings())

    assert shown.subscription == topic_pb2.SUBSCRIPTION_KIND_SHARED
    assert shown.max_wait_action == topic_pb2.MAX_WAIT_ACTION_DELETE
    assert (shown.partitions, shown.visibility_timeout_ms) == (1, 30_000)
    assert shown.idle_after_ms == 600_000


def test_every_setting_has_its_field_on_the_wire() -> None:
    """S7: a setting that is added is not forgotten there."""
    assert set(SETTING_NAMES) == {each.name for each in topic_pb2.TopicSettings.DESCRIPTOR.fields}


@pytest.mark.parametrize("value", [0.99, 100.5, float("nan"), float("inf"), -1.0])
def test_a_retry_multiplier_has_a_range(value: float) -> None:
    """V9: 1 to 100; no delay shrinks, and none is unknown."""
    assert refused_field(with_settings(retry_multiplier=value)) == "retry_multiplier"


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_retry_jitter_is_a_share(value: float) -> None:
    """V9."""
    assert refused_field(with_settings(retry_jitter=value)) == "retry_jitter"


def test_the_longest_retry_delay_is_off_or_at_least_the_first() -> None:
    """V9."""
    validate(with_settings(retry_delay_ms=500, retry_delay_ms_max=0), PARTITIONS)
    validate(with_settings(retry_delay_ms=500, retry_delay_ms_max=500), PARTITIONS)

    too_short = with_settings(retry_delay_ms=500, retry_delay_ms_max=499)

    assert refused_field(too_short) == "retry_delay_ms_max"


def test_a_failed_delivery_goes_first_in_exclusive_topics_and_behind_in_shared_ones() -> None:
    """V9: unless the topic sets its place."""
    shared, exclusive = TopicSettings(), TopicSettings(subscription=Subscription.EXCLUSIVE)

    assert shared.filled_in().retry_place is RetryPlace.BEHIND
    assert exclusive.filled_in().retry_place is RetryPlace.FIRST
    for place in (RetryPlace.FIRST, RetryPlace.BEHIND):
        for settings in (shared, exclusive):
            assert replace(settings, retry_place=place).filled_in().retry_place is place


def test_groups_never_expire_while_a_pull_may_wait() -> None:
    """R14, S3: or not at all."""
    least_s = limits.GROUP_EXPIRY_SECONDS_MIN

    validate(with_settings(group_expiry_seconds=0), PARTITIONS)
    validate(with_settings(group_expiry_seconds=least_s), PARTITIONS)

    assert 1000 * least_s > limits.PULL_WAIT_MS_MAX
    assert refused_field(with_settings(group_expiry_seconds=least_s - 1)) == "group_expiry_seconds"


def test_an_unknown_retry_place_is_refused() -> None:
    """S3, V9."""
    with pytest.raises(InvalidArgument) as refused:
        settings_from_proto(topic_pb2.TopicSettings(retry_place=9))  # type: ignore[arg-type]

    assert refused.value.metadata["field"] == "retry_place"
