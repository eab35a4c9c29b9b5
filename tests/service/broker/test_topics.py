"""Topics as operators see them: every setting, changes by mask and version, deletion (S7)."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import QUEUE, LocalBroker, payloads_of, reason_of, run_of
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import (
    InvalidArgument,
    InvalidName,
    TopicExists,
    TopicNotEmpty,
    TopicNotFound,
    TopicVersionMismatch,
)
from tidemark.topics import SETTING_NAMES

ALL_SETTINGS: dict[str, Any] = {
    "subscription": topic_pb2.SUBSCRIPTION_KIND_SHARED,
    "partitions": 2,
    "visibility_timeout_ms": 12_345,
    "max_attempts": 7,
    "dead_letter_topic": "graveyard",
    "retention_enabled": True,
    "retention_seconds": 1000,
    "completed_retention_seconds": 500,
    "max_wait_time_seconds": 300,
    "max_wait_action": topic_pb2.MAX_WAIT_ACTION_DEAD_LETTER,
    "idle_after_ms": 2000,
    "queue_messages_max": 1_000_000,
    "queue_bytes_max": 10_000_000,
    "fairness_weights": {"gold": 10, "silver": 5},
    "default_ttl_ms": 86_400_000,
    "consumption_records": topic_pb2.CONSUMPTION_RECORDS_ON,
    "retry_delay_ms": 250,
    "retry_delay_ms_max": 60_000,
    "retry_multiplier": 1.5,
    "retry_jitter": 0.25,
    "retry_place": topic_pb2.RETRY_PLACE_FIRST,
    "group_expiry_seconds": 86_400,
}


async def get(local: LocalBroker, name: str) -> topic_pb2.Topic:
    return (await local.topics.GetTopic(topic_pb2.GetTopicRequest(name=name))).topic


async def update(
    local: LocalBroker,
    name: str,
    paths: Sequence[str],
    expected_version: int = 0,
    **settings: Any,
) -> topic_pb2.Topic:
    request = topic_pb2.UpdateTopicRequest(
        name=name,
        settings=topic_pb2.TopicSettings(**settings),
        expected_version=expected_version,
    )
    request.update_mask.paths.extend(paths)
    return (await local.topics.UpdateTopic(request)).topic


async def delete(local: LocalBroker, name: str, *, force: bool = False) -> int:
    request = topic_pb2.DeleteTopicRequest(name=name, force=force)
    return (await local.topics.DeleteTopic(request)).queues


async def test_every_setting_is_kept_and_shown(local: LocalBroker) -> None:
    """S7."""
    assert set(ALL_SETTINGS) == set(SETTING_NAMES)

    created = await local.create_topic("full", **ALL_SETTINGS)

    expected = topic_pb2.TopicSettings(**ALL_SETTINGS)
    assert created.settings == expected
    assert (await get(local, "full")).settings == expected
    await local.stop_broker()
    await local.stop_storage()
    await local.start_storage()
    await local.start_broker()
    assert await get(local, "full") == created


async def test_settings_that_are_not_named_have_their_defaults(local: LocalBroker) -> None:
    """S7."""
    topic = await get(local, "orders")

    assert topic.settings == topic_pb2.TopicSettings(
        subscription=topic_pb2.SUBSCRIPTION_KIND_SHARED,
        partitions=1,
        visibility_timeout_ms=30_000,
        max_wait_action=topic_pb2.MAX_WAIT_ACTION_DELETE,
        idle_after_ms=600_000,
        retry_multiplier=1,
        retry_place=topic_pb2.RETRY_PLACE_BEHIND,
    )
    assert topic.version > 0
    assert topic.create_time == topic.update_time


async def test_creating_a_topic_again_succeeds_only_with_equal_settings(
    local: LocalBroker,
) -> None:
    first = await local.create_topic("full", **ALL_SETTINGS)

    again = await local.create_topic("full", **ALL_SETTINGS)
    with pytest.raises(TopicExists):
        await local.create_topic("full", **{**ALL_SETTINGS, "max_attempts": 8})

    assert again == first


@pytest.mark.parametrize("setting", sorted(ALL_SETTINGS))
async def test_each_setting_is_changed_by_itself_and_set_back(
    local: LocalBroker, setting: str
) -> None:
    """S7: the mask names what changes; a zero under the mask is the default."""
    plain = {"dead_letter_topic": "graveyard"} if setting == "max_wait_action" else {}
    before = await local.create_topic("changing", **plain)

    changed = await update(local, "changing", [setting], **ALL_SETTINGS)

    expected = topic_pb2.TopicSettings()
    expected.CopyFrom(before.settings)
    expected.ClearField(setting)  # type: ignore[arg-type]
    expected.MergeFrom(topic_pb2.TopicSettings(**{setting: ALL_SETTINGS[setting]}))
    assert changed.settings == expected
    assert await get(local, "changing") == changed
    if setting != "subscription":
        assert changed.version > before.version
    if setting != "partitions":
        back = await update(local, "changing", [setting])
        if setting != "dead_letter_topic":
            assert back.settings == before.settings


async def test_an_update_from_an_old_version_is_refused(local: LocalBroker) -> None:
    first = await get(local, "orders")
    second = await update(local, "orders", ["max_attempts"], first.version, max_attempts=3)

    with pytest.raises(TopicVersionMismatch):
        await update(local, "orders", ["max_attempts"], first.version, max_attempts=4)

    assert second.version > first.version
    assert (await get(local, "orders")).settings.max_attempts == 3


@pytest.mark.parametrize(
    ("paths", "settings"),
    [
        ([], {}),
        (["no_such_setting"], {}),
        (["fairness_weights.gold"], {}),
        (["visibility_timeout_ms"], {"visibility_timeout_ms": 49}),
        (["visibility_timeout_ms"], {"visibility_timeout_ms": 43_200_001}),
        (["max_attempts"], {"max_attempts": 1_000_001}),
        (["idle_after_ms"], {"idle_after_ms": 99}),
        (["partitions"], {"partitions": 3}),
        (["subscription"], {"subscription": topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE}),
        (["dead_letter_topic"], {"dead_letter_topic": "orders"}),
        (["max_wait_action"], {"max_wait_action": topic_pb2.MAX_WAIT_ACTION_DEAD_LETTER}),
        (["fairness_weights"], {"fairness_weights": {"gold": 101}}),
        (["fairness_weights"], {"fairness_weights": {str(each): 1 for each in range(101)}}),
    ],
    ids=str,
)
async def test_an_update_that_cannot_hold_changes_nothing(
    local: LocalBroker, paths: list[str], settings: dict[str, Any]
) -> None:
    """S3."""
    before = await get(local, "orders")

    with pytest.raises(InvalidArgument):
        await update(local, "orders", paths, **settings)

    assert await get(local, "orders") == before


async def test_a_topic_stays_exclusive(local: LocalBroker) -> None:
    """E8: what its owners hold was given out under epochs that shared consumers know nothing of."""
    await local.create_topic("own", subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)

    with pytest.raises(InvalidArgument):
        await update(local, "own", ["subscription"])


async def test_a_queue_keeps_the_partitions_it_spans(local: LocalBroker) -> None:
    await local.create_topic("wide", partitions=2)

    with pytest.raises(InvalidArgument):
        await update(local, "wide", ["partitions"], partitions=1)


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", ".hidden", "x" * 129])
async def test_a_topic_has_a_legal_name(local: LocalBroker, name: str) -> None:
    """S3."""
    with pytest.raises(InvalidName):
        await local.create_topic(name)


async def test_a_topic_that_is_not_there_is_not_found(local: LocalBroker) -> None:
    for call in (
        get(local, "nowhere"),
        update(local, "nowhere", ["max_attempts"]),
        delete(local, "nowhere"),
        local.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="nowhere")),
    ):
        with pytest.raises(TopicNotFound):
            await call


async def test_a_change_is_obeyed_by_what_comes_after_it(local: LocalBroker) -> None:
    """S7."""
    await local.publish(run_of(QUEUE, b"1"), run_of(QUEUE, b"2"))
    (before,) = await local.pull(QUEUE, max_messages=1)

    await update(local, "orders", ["visibility_timeout_ms"], visibility_timeout_ms=12_345)
    (after,) = await local.pull(QUEUE, max_messages=1)

    assert (before.visibility_ms, after.visibility_ms) == (30_000, 12_345)


async def test_topics_are_listed_by_name_in_pages(local: LocalBroker) -> None:
    names = ["orders", *(f"topic-{number:02}" for number in range(10))]
    for name in names[1:]:
        await local.create_topic(name)

    listed: list[str] = []
    token = ""
    while True:
        page = await local.topics.ListTopics(
            topic_pb2.ListTopicsRequest(page_size=3, page_token=token)
        )
        assert len(page.topics) <= 3
        listed += [topic.name for topic in page.topics]
        token = page.next_page_token
        if not token:
            break

    assert listed == sorted(names)


async def test_a_topic_that_holds_messages_is_deleted_by_force_only(local: LocalBroker) -> None:
    await local.publish(*(run_of(f"orders/{number}", b"1") for number in range(10)))

    with pytest.raises(TopicNotEmpty):
        await delete(local, "orders")
    still_there = (await local.queue("orders/3")).messages
    deleted = await delete(local, "orders", force=True)

    assert still_there == 1
    assert deleted == 10
    with pytest.raises(TopicNotFound):
        await get(local, "orders")
    (refused,) = await local.publish(run_of("orders/3", b"1"))
    assert reason_of(refused) == "TOPIC_NOT_FOUND"


async def test_a_topic_created_again_is_empty_and_its_version_has_grown(
    local: LocalBroker,
) -> None:
    before = await get(local, "orders")
    await local.publish(run_of(QUEUE, b"old"))
    await delete(local, "orders", force=True)

    after = await local.create_topic("orders")
    (published,) = await local.publish(run_of(QUEUE, b"new"))

    assert after.version > before.version
    assert reason_of(published) == ""
    assert payloads_of(await local.pull(QUEUE)) == [b"new"]


# --- dead-letter topics ---------------------------------------------------------------------------


async def test_a_dead_letter_topic_that_does_not_exist_is_created_with_its_topic(
    local: LocalBroker,
) -> None:
    """L9: at creation and at an update; one that exists keeps its settings."""
    await local.create_topic("kept", max_attempts=9)
    await local.create_topic("jobs", dead_letter_topic="jobs.dead")
    for dead in ("later.dead", "kept"):
        change = topic_pb2.TopicSettings(dead_letter_topic=dead)
        update = topic_pb2.UpdateTopicRequest(name="jobs", settings=change)
        update.update_mask.paths.append("dead_letter_topic")
        await local.topics.UpdateTopic(update)

    assert (await get(local, "jobs.dead")).settings.dead_letter_topic == ""
    assert (await get(local, "later.dead")).version > 0
    assert (await get(local, "kept")).settings.max_attempts == 9


async def test_nothing_is_created_for_a_topic_that_is_refused(local: LocalBroker) -> None:
    """L9, S3."""
    with pytest.raises(TopicExists):
        await local.create_topic("orders", max_attempts=77, dead_letter_topic="stray")

    with pytest.raises(TopicNotFound):
        await get(local, "stray")


async def test_a_dead_letter_topic_that_does_not_exist_is_refused_if_the_broker_is_set_so(
    start: StartBroker,
) -> None:
    """L9: a wrong name is noticed at once; other changes of a topic go on without it."""
    local = await start(missing_dead_letter_topic="refuse")
    await local.create_topic("jobs.dead")
    await local.create_topic("jobs", dead_letter_topic="jobs.dead")
    await local.delete_topic("jobs.dead")

    with pytest.raises(InvalidArgument) as refused:
        await local.create_topic("other", dead_letter_topic="no.such")
    update = topic_pb2.UpdateTopicRequest(
        name="jobs", settings=topic_pb2.TopicSettings(max_attempts=3)
    )
    update.update_mask.paths.append("max_attempts")
    updated = await local.topics.UpdateTopic(update)

    assert refused.value.metadata["field"] == "dead_letter_topic"
    assert updated.topic.settings.max_attempts == 3
    with pytest.raises(TopicNotFound):
        await get(local, "other")
