"""Topics, queues and groups as operators see them; looking at them wakes nothing (S7, I1)."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.rpc.broker.conftest import StartBroker
from tests.rpc.broker.local_broker import (
    LocalBroker,
    payloads_of,
    reason_of,
    run_of,
    take,
)
from tidemark import limits
from tidemark.api.broker.v1 import subscription_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Message
from tidemark.api.storage.v1 import action_pb2, storage_pb2
from tidemark.clock import ManualClock
from tidemark.errors import (
    GroupNotFound,
    InvalidArgument,
    InvalidName,
    QueueNotFound,
    RunNotScheduled,
    TopicExists,
    TopicNotEmpty,
    TopicNotFound,
    TopicVersionMismatch,
)
from tidemark.topics import SETTING_NAMES

QUEUE = "orders/x"
IDLE = topic_pb2.QUEUE_ACTIVITY_IDLE
MATERIALIZED = topic_pb2.QUEUE_ACTIVITY_MATERIALIZED

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
    "consumption_records_disabled": True,
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


# --- topics ---------------------------------------------------------------------------------------


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


async def delete(local: LocalBroker, name: str, *, force: bool = False) -> int:
    request = topic_pb2.DeleteTopicRequest(name=name, force=force)
    return (await local.topics.DeleteTopic(request)).queues


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


# --- queues ---------------------------------------------------------------------------------------


async def list_queues(
    local: LocalBroker, *, page_size: int = 0, lite_prefix: str = ""
) -> list[topic_pb2.Queue]:
    """All pages."""
    request = topic_pb2.ListQueuesRequest(
        topic="orders", page_size=page_size, lite_prefix=lite_prefix
    )
    queues: list[topic_pb2.Queue] = []
    while True:
        page = await local.topics.ListQueues(request)
        assert len(page.queues) <= (page_size or limits.PAGE_SIZE_DEFAULT)
        queues += page.queues
        if not page.next_page_token:
            return queues
        request.page_token = page.next_page_token


async def fall_asleep(local: LocalBroker) -> None:
    """Both services start anew: no queue is loaded."""
    await local.stop_broker()
    await local.stop_storage()
    await local.start_storage()
    await local.start_broker()


async def peek(local: LocalBroker, lmq_name: str = QUEUE, **fields: Any) -> list[Any]:
    request = topic_pb2.PeekQueueRequest(lmq_name=lmq_name, **fields)
    return list((await local.topics.PeekQueue(request)).messages)


async def groups(local: LocalBroker, lmq_name: str = QUEUE) -> list[topic_pb2.Group]:
    request = topic_pb2.ListGroupsRequest(lmq_name=lmq_name)
    return list((await local.topics.ListGroups(request)).groups)


async def test_looking_at_queues_wakes_none(local: LocalBroker) -> None:
    """I1, I9."""
    names = sorted(f"orders/{number:02}" for number in range(25))
    await local.publish(*(run_of(name, b"12345", b"1") for name in names))
    await local.pull(names[0], group="mail")
    await fall_asleep(local)

    listed = await list_queues(local, page_size=7)
    (group,) = await groups(local, names[0])
    peeked = await peek(local, names[1])
    one = await local.queue(names[2])
    again = await list_queues(local)

    assert sorted(queue.lmq_name for queue in listed) == names
    assert {queue.activity for queue in listed} == {IDLE}
    assert {queue.activity for queue in again} == {IDLE}
    assert {queue.messages for queue in listed} == {2}
    assert all(queue.bytes >= 6 for queue in listed)
    assert all(queue.HasField("oldest_publish_time") for queue in listed)
    assert all(queue.HasField("last_activity_time") for queue in listed)
    assert {queue.next_offset for queue in listed} == {2}
    assert group.name == "mail"
    assert [each.message.payload for each in peeked] == [b"12345", b"1"]
    assert (one.lmq_name, one.activity) == (names[2], IDLE)


async def test_a_queue_in_use_shows_what_is_held(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1", b"2", b"3"))
    await local.pull(QUEUE, max_messages=2)

    (listed,) = await list_queues(local)

    assert listed.activity == MATERIALIZED
    assert (listed.messages, listed.inflight) == (3, 2)


async def test_queues_are_listed_by_the_beginning_of_their_name(local: LocalBroker) -> None:
    await local.publish(*(run_of(f"orders/{name}", b"1") for name in ("eu-1", "eu-2", "us-1")))
    await local.publish(run_of("orders", b"1"))

    listed = await list_queues(local, lite_prefix="eu-")
    everything = await list_queues(local)

    assert sorted(queue.lmq_name for queue in listed) == ["orders/eu-1", "orders/eu-2"]
    assert len(everything) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": limits.PAGE_SIZE_MAX + 1},
        {"page_token": "nonsense"},
        {"page_token": "0"},
        {"page_token": "-1:x"},
        {"page_token": "\u0663:x"},
        {"page_token": ":" * 10_000},
    ],
    ids=lambda fields: str(fields)[:40],
)
async def test_a_listing_with_a_wrong_page_is_refused(
    local: LocalBroker, fields: dict[str, Any]
) -> None:
    """S3."""
    with pytest.raises(InvalidArgument):
        await local.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders", **fields))


async def test_a_deleted_queue_is_gone_and_created_again_it_is_another(
    local: LocalBroker,
) -> None:
    (first,) = await local.publish(run_of(QUEUE, b"1", b"2"))
    request = topic_pb2.DeleteQueueRequest(lmq_name=QUEUE)

    deleted = await local.topics.DeleteQueue(request)
    with pytest.raises(QueueNotFound):
        await local.queue(QUEUE)
    with pytest.raises(QueueNotFound):
        await local.topics.DeleteQueue(request)
    (second,) = await local.publish(run_of(QUEUE, b"3"))

    assert deleted.messages == 2
    assert second.receipt.queue_id != first.receipt.queue_id
    assert payloads_of(await local.pull(QUEUE)) == [b"3"]


async def test_a_purge_spares_what_is_held(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"held"), run_of(QUEUE, b"1"), run_of(QUEUE, b"2"))
    (held,) = await local.pull(QUEUE, max_messages=1)

    purged = await local.topics.PurgeQueue(topic_pb2.PurgeQueueRequest(lmq_name=QUEUE))

    assert purged.messages == 2
    assert await local.pull(QUEUE) == []
    assert (await local.settle(held.receipt, Ack())).messages == 1
    with pytest.raises(QueueNotFound):
        await local.topics.PurgeQueue(topic_pb2.PurgeQueueRequest(lmq_name="orders/none"))


async def test_peeking_reserves_nothing(local: LocalBroker) -> None:
    headers = {"kind": "order"}
    session = await local.session()
    await session.publish(
        QUEUE, [Message(payload=b"1", headers=headers), b"2", b"3"], fairness_key="gold"
    )

    every = await peek(local)
    later = await peek(local, offset=1, max_messages=1)

    assert [each.offset for each in every] == [0, 1, 2]
    assert dict(every[0].message.headers) == headers
    assert every[0].fairness_key == "gold"
    assert [each.message.payload for each in later] == [b"2"]
    assert (await local.queue(QUEUE)).inflight == 0
    with pytest.raises(InvalidArgument):
        await peek(local, max_messages=limits.PAGE_SIZE_MAX + 1)
    with pytest.raises(QueueNotFound):
        await peek(local, "orders/none")


async def test_peeking_for_a_group_leaves_out_what_it_has_settled(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1", b"2"))
    await local.pull(QUEUE, group="audit", max_messages=1)
    (delivery,) = await local.pull(QUEUE, group="mail", max_messages=1)
    await local.settle(delivery.receipt, Ack())

    left = await peek(local, group="mail")

    assert [each.message.payload for each in left] == [b"2"]
    assert len(await peek(local)) == 2


@pytest.mark.parametrize("name", ["", "orders/", "orders/a/b", "orders/\x1b[2J", "a b/c"])
async def test_calls_about_queues_refuse_names_that_are_not_legal(
    local: LocalBroker, name: str
) -> None:
    """S3."""
    for call in (
        local.queue(name),
        peek(local, name),
        groups(local, name),
        local.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=name)),
        local.topics.PurgeQueue(topic_pb2.PurgeQueueRequest(lmq_name=name)),
        local.topics.CancelScheduled(topic_pb2.CancelScheduledRequest(lmq_name=name)),
        local.topics.TryEvictInactiveQueue(topic_pb2.TryEvictInactiveQueueRequest(lmq_name=name)),
    ):
        with pytest.raises(InvalidName):
            await call


# --- groups ---------------------------------------------------------------------------------------


async def reset(local: LocalBroker, group: str, **position: Any) -> Sequence[topic_pb2.Group]:
    request = topic_pb2.ResetGroupRequest(
        lmq_name=QUEUE, group=group, start=subscription_pb2.StartPosition(**position)
    )
    return (await local.topics.ResetGroup(request)).groups


async def consume(local: LocalBroker, group: str, messages: int) -> None:
    (delivery,) = await local.pull(QUEUE, group=group, max_messages=messages)
    assert (await local.settle(delivery.receipt, Ack())).messages == messages


async def test_groups_have_a_progress_each(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1", b"2", b"3"))
    await consume(local, "mail", 2)
    await local.pull(QUEUE, group="audit", max_messages=1)

    audit, mail = await groups(local)

    assert (audit.name, audit.cursor, audit.unsettled, audit.inflight) == ("audit", 0, 3, 1)
    assert (mail.name, mail.cursor, mail.unsettled, mail.inflight) == ("mail", 2, 1, 0)


async def test_a_group_is_moved_and_its_consumer_goes_on_from_there(local: LocalBroker) -> None:
    session = await local.session()
    await session.publish(QUEUE, [b"1", b"2", b"3"])
    await local.pull(QUEUE, group="audit", max_messages=1)  # keeps the messages
    consumer = session.open_consumer("mail", credit=10)
    await consumer.subscribe(QUEUE)
    (delivery,) = await take(consumer, 3)
    await session.settle(delivery.delivery_tag, Ack())

    (moved,) = await reset(local, "mail", offset=1)

    assert (moved.name, moved.cursor) == ("mail", 1)
    assert payloads_of(await take(consumer, 2)) == [b"2", b"3"]


async def test_moving_a_group_revokes_what_it_holds(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1"))
    (held,) = await local.pull(QUEUE, group="mail")

    await reset(local, "mail", earliest=True)

    assert reason_of(await local.settle(held.receipt, Ack())) != ""
    assert payloads_of(await local.pull(QUEUE, group="mail")) == [b"1"]


async def test_a_reset_without_a_position_or_of_a_group_that_is_not_there_is_refused(
    local: LocalBroker,
) -> None:
    """S3."""
    await local.publish(run_of(QUEUE, b"1"))

    with pytest.raises(InvalidArgument):
        await reset(local, "mail")
    with pytest.raises(GroupNotFound):
        await reset(local, "mail", earliest=True)
    with pytest.raises(InvalidName):
        await reset(local, "\x00", earliest=True)
    assert await groups(local) == []


async def test_a_deleted_group_is_gone_and_begins_anew(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1", b"2"))
    await local.pull(QUEUE, group="audit", max_messages=1)
    await consume(local, "mail", 2)
    request = topic_pb2.DeleteGroupRequest(lmq_name=QUEUE, group="mail")

    await local.topics.DeleteGroup(request)
    names = [group.name for group in await groups(local)]
    with pytest.raises(GroupNotFound):
        await local.topics.DeleteGroup(request)

    assert names == ["audit"]
    assert payloads_of(await local.pull(QUEUE, group="mail")) == [b"1", b"2"]


# --- scheduled runs -------------------------------------------------------------------------------


async def cancel(local: LocalBroker, partition: int, schedule_id: int) -> int:
    request = topic_pb2.CancelScheduledRequest(
        lmq_name=QUEUE, partition=partition, schedule_id=schedule_id
    )
    return (await local.topics.CancelScheduled(request)).messages


async def promote(local: LocalBroker, partition: int) -> None:
    """What a sweep does with the runs that are due."""
    scan = storage_pb2.ScanPartitionRequest(
        partition=partition, kind=storage_pb2.SCAN_KIND_SCHEDULES_DUE
    )
    facts = (await local.storage.ScanPartition(scan)).facts
    request = action_pb2.DelegateActionsRequest(
        partition=partition, actions=[fact.action for fact in facts]
    )
    await local.owner.DelegateActions(request)


async def test_a_scheduled_run_can_be_cancelled_once(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock)
    (published,) = await local.publish(run_of(QUEUE, b"1", b"2", delay_ms=5000))
    receipt = published.receipt

    cancelled = await cancel(local, receipt.partition, receipt.schedule_id)
    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id)
    await clock.advance_ms(10_000)

    assert cancelled == 2
    assert await local.pull(QUEUE) == []
    assert (await local.queue(QUEUE)).messages == 0


async def test_a_run_that_was_promoted_or_is_unknown_cannot_be_cancelled(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock)
    (published,) = await local.publish(run_of(QUEUE, b"1", delay_ms=5000))
    receipt = published.receipt

    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id + 1)
    with pytest.raises(InvalidArgument):
        await cancel(local, 1 - receipt.partition, receipt.schedule_id)
    assert await local.pull(QUEUE) == []

    await clock.advance_ms(5000)
    await promote(local, receipt.partition)

    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id)
    assert payloads_of(await local.pull(QUEUE)) == [b"1"]
