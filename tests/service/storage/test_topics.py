"""Topics: every setting at its limits, versions that only grow, changes that hold at once (S7)."""

from contextlib import suppress
from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    operation,
    reserve,
    settle,
)
from tests.support.local_broker import in_time
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.broker.v1.topic_pb2 import (
    CONSUMPTION_RECORDS_OFF,
    MAX_WAIT_ACTION_DEAD_LETTER,
    MAX_WAIT_ACTION_DELETE,
    RETRY_PLACE_BEHIND,
    SUBSCRIPTION_KIND_EXCLUSIVE,
    SUBSCRIPTION_KIND_SHARED,
    Topic,
    TopicSettings,
)
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.exchange_pb2 import SETTLE_ACTION_NACK, ApplyTopic
from tidemark.api.storage.v1.storage_pb2 import (
    DeleteTopicRequest,
    GetTopicRequest,
    ListTopicsRequest,
)
from tidemark.clock import ManualClock

DEFAULTS = TopicSettings(
    subscription=SUBSCRIPTION_KIND_SHARED,
    partitions=1,
    visibility_timeout_ms=30_000,
    max_wait_action=MAX_WAIT_ACTION_DELETE,
    idle_after_ms=600_000,
    retry_multiplier=1,
)
EVERY_SETTING = TopicSettings(
    subscription=SUBSCRIPTION_KIND_EXCLUSIVE,
    partitions=1,
    visibility_timeout_ms=limits.VISIBILITY_TIMEOUT_MS_MAX,
    max_attempts=limits.MAX_ATTEMPTS_MAX,
    dead_letter_topic="dead",
    retention_enabled=True,
    retention_seconds=limits.RETENTION_SECONDS_MAX,
    completed_retention_seconds=limits.RETENTION_SECONDS_MAX,
    max_wait_time_seconds=limits.RETENTION_SECONDS_MAX,
    max_wait_action=MAX_WAIT_ACTION_DEAD_LETTER,
    idle_after_ms=limits.IDLE_AFTER_MS_MAX,
    queue_messages_max=1,
    queue_bytes_max=2,
    fairness_weights={f"key-{n}": limits.FAIRNESS_WEIGHT_MAX for n in range(100)},
    default_ttl_ms=limits.TTL_MS_MAX,
    consumption_records=CONSUMPTION_RECORDS_OFF,
    retry_delay_ms=1,
    retry_delay_ms_max=limits.NACK_DELAY_MS_MAX,
    retry_multiplier=limits.RETRY_MULTIPLIER_MAX,
    retry_jitter=1,
    retry_place=RETRY_PLACE_BEHIND,
    group_expiry_seconds=limits.RETENTION_SECONDS_MAX,
)


def all_fields_set(settings: TopicSettings) -> bool:
    return len(settings.ListFields()) == len(settings.DESCRIPTOR.fields)


async def get_topic(storage: RunningStorage, name: str, partition: int = 0) -> Topic:
    request = GetTopicRequest(name=name, partition=partition)
    topic: Topic = (await storage.storage.GetTopic(request)).topic
    return topic


async def put(storage: RunningStorage, settings: TopicSettings, name: str = "set") -> Topic:
    request = storage_pb2.PutTopicRequest(topic=Topic(name=name, settings=settings), create=True)
    topic: Topic = (await storage.storage.PutTopic(request)).topic
    return topic


async def test_every_setting_of_a_topic_comes_back_also_after_a_restart(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """S7: at their limits."""
    storage = await start_storage()
    assert all_fields_set(EVERY_SETTING)

    stored = await put(storage, EVERY_SETTING)
    await storage.restart()

    assert stored.settings == EVERY_SETTING
    assert await get_topic(storage, "set") == stored
    assert stored.version == 1
    assert stored.create_time.ToMilliseconds() == clock.wall_ms()


async def test_settings_that_are_not_given_have_their_defaults(storage: RunningStorage) -> None:
    """S7."""
    assert (await get_topic(storage, "jobs")).settings == DEFAULTS


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 2},
        {"visibility_timeout_ms": limits.VISIBILITY_TIMEOUT_MS_MIN - 1},
        {"visibility_timeout_ms": limits.VISIBILITY_TIMEOUT_MS_MAX + 1},
        {"max_attempts": limits.MAX_ATTEMPTS_MAX + 1},
        {"dead_letter_topic": "not/a/topic"},
        {"dead_letter_topic": "set"},
        {"retention_seconds": limits.RETENTION_SECONDS_MAX + 1},
        {"completed_retention_seconds": limits.RETENTION_SECONDS_MAX + 1},
        {"max_wait_time_seconds": limits.RETENTION_SECONDS_MAX + 1},
        {"group_expiry_seconds": limits.RETENTION_SECONDS_MAX + 1},
        {"group_expiry_seconds": limits.GROUP_EXPIRY_SECONDS_MIN - 1},
        {"max_wait_action": MAX_WAIT_ACTION_DEAD_LETTER},
        {"idle_after_ms": limits.IDLE_AFTER_MS_MIN - 1},
        {"idle_after_ms": limits.IDLE_AFTER_MS_MAX + 1},
        {"fairness_weights": {f"key-{n}": 1 for n in range(101)}},
        {"fairness_weights": {"key": 0}},
        {"fairness_weights": {"key": 101}},
        {"default_ttl_ms": limits.TTL_MS_MAX + 1},
    ],
    ids=lambda settings: "-".join(settings),
)
async def test_settings_out_of_range_are_refused(
    storage: RunningStorage, settings: dict[str, Any]
) -> None:
    """S3, S7."""
    with pytest.raises(errors.ClientError) as refused:
        await put(storage, TopicSettings(**settings))

    assert refused.value.reason in ("INVALID_ARGUMENT", "INVALID_NAME")
    with pytest.raises(errors.TopicNotFound):
        await get_topic(storage, "set")


async def test_a_topic_with_a_time_that_is_none_is_refused(storage: RunningStorage) -> None:
    """S3."""
    topic = Topic(name="jobs")
    topic.update_time.nanos = -1

    with pytest.raises(errors.InvalidArgument) as refused:
        await storage.storage.PutTopic(storage_pb2.PutTopicRequest(topic=topic, create=True))

    assert refused.value.metadata == {"field": "update_time"}


async def test_a_topic_is_created_once_and_equal_settings_are_a_success(
    storage: RunningStorage,
) -> None:
    first = await get_topic(storage, "jobs")

    again = await storage.create_topic("jobs")

    assert again == first
    with pytest.raises(errors.TopicExists):
        await storage.create_topic("jobs", max_attempts=1)
    with pytest.raises(errors.InvalidName):
        await storage.create_topic("no spaces")


async def test_a_change_is_made_from_the_version_that_was_read(storage: RunningStorage) -> None:
    first = await get_topic(storage, "jobs")
    second = await storage.update_topic("jobs", first.version, max_attempts=1)

    with pytest.raises(errors.TopicVersionMismatch):
        await storage.update_topic("jobs", first.version, max_attempts=2)
    third = await storage.update_topic("jobs", max_attempts=3)

    assert first.version < second.version < third.version
    assert third.settings.max_attempts == 3
    with pytest.raises(errors.TopicNotFound):
        await storage.update_topic("no-such-topic")


async def test_versions_grow_over_deletion(storage: RunningStorage) -> None:
    request = DeleteTopicRequest(name="jobs")

    deleted = await storage.storage.DeleteTopic(request)
    await storage.restart()
    created = await storage.create_topic("jobs")

    assert created.version > deleted.version
    await storage.storage.DeleteTopic(request)
    with pytest.raises(errors.TopicNotFound):
        await storage.storage.DeleteTopic(request)


async def test_topics_are_listed_in_pages_by_name(storage: RunningStorage) -> None:
    for name in ("c", "a", "b"):
        await storage.create_topic(name)

    first = await storage.storage.ListTopics(ListTopicsRequest(page_size=3))
    request = ListTopicsRequest(page_size=3, page_token=first.next_page_token)
    second = await storage.storage.ListTopics(request)

    names = [[topic.name for topic in page.topics] for page in (first, second)]
    assert names == [["a", "b", "c"], ["jobs"]]
    assert second.next_page_token == ""


async def test_changed_settings_hold_for_loaded_queues_at_once(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S7."""
    await exchange.ask(append("jobs", b"x"))

    await storage.update_topic("jobs", max_attempts=1, visibility_timeout_ms=5000)

    (got,) = (await exchange.ask(reserve("jobs"))).slices
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
    assert got.visibility_ms == 5000
    assert not (await exchange.ask(reserve("jobs"))).slices


@pytest.mark.parametrize(
    "topic",
    [
        Topic(name="no spaces", version=99),
        Topic(name="x", version=99, settings=TopicSettings(fairness_weights={"k": 0})),
        Topic(name="x", version=99, settings=TopicSettings(visibility_timeout_ms=1)),
    ],
    ids=["name", "weight", "visibility"],
)
async def test_a_topic_out_of_range_is_not_applied(exchange: ExchangeClient, topic: Topic) -> None:
    """S3."""
    with pytest.raises(errors.ClientError):
        await exchange.ask(operation(apply_topic=ApplyTopic(topic=topic)))


async def test_a_timestamp_that_is_none_is_refused(exchange: ExchangeClient) -> None:
    """S3: the exchange answers, or ends; it never falls silent."""
    topic = Topic(name="x", version=99)
    topic.create_time.nanos = -1
    await exchange.send(operation(apply_topic=ApplyTopic(topic=topic)))

    (later,) = await exchange.send(append("jobs", b"x"))

    with suppress(errors.TidemarkError):
        await in_time(later)


async def test_a_newer_version_of_a_topic_is_applied_and_an_older_one_ignored(
    start_storage: StartStorage,
) -> None:
    """The fan-out may repeat itself and arrive in any order."""
    storage = await start_storage(partitions=2)
    first = await storage.create_topic("jobs")
    second = await storage.update_topic("jobs", max_attempts=5)

    async with storage.exchange(partition=1) as exchange:
        versions = [
            await apply_topic(exchange, second),
            await apply_topic(exchange, first),
            await apply_topic(exchange, second, deleted=True),
        ]
        await exchange.ask(append("jobs", b"x", topic_version=second.version))
        second.version += 1
        deleted = await apply_topic(exchange, second, deleted=True)
        (refused,) = await exchange.ask_all(append("jobs", b"x"))

    assert versions == [second.version - 1] * 3
    assert deleted == second.version
    assert isinstance(refused, errors.TopicNotFound)
