"""Topics and queues: settings, listing, looking, loading and unloading; nothing wakes a queue."""

from contextlib import suppress
from typing import Any

import pytest

from storage_svc.engines.engine import FORMAT_VERSION
from tests.rpc.conftest import StartStorage
from tests.rpc.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    operation,
    reserve,
    settle,
)
from tidemark import errors, limits
from tidemark.api.broker.v1.topic_pb2 import (
    EVICTION_OUTCOME_EVICTED,
    EVICTION_OUTCOME_HAS_INFLIGHT,
    EVICTION_OUTCOME_NOT_MATERIALIZED,
    EVICTION_OUTCOME_NOT_PRESENT,
    EVICTION_OUTCOME_RACE_LOST,
    MAX_WAIT_ACTION_DEAD_LETTER,
    MAX_WAIT_ACTION_DELETE,
    QUEUE_ACTIVITY_IDLE,
    QUEUE_ACTIVITY_MATERIALIZED,
    SUBSCRIPTION_KIND_EXCLUSIVE,
    SUBSCRIPTION_KIND_SHARED,
    Topic,
    TopicSettings,
)
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_NACK,
    ApplyTopic,
    Materialize,
    Operation,
    Unmaterialize,
)
from tidemark.api.storage.v1.storage_pb2 import (
    DeleteTopicRequest,
    DescribeStorageRequest,
    GetTopicRequest,
    ListQueuesRequest,
    ListTopicsRequest,
    PeekQueueRequest,
)
from tidemark.clock import ManualClock, SystemClock


def materialize(lmq_name: str, create: bool = False) -> Operation:
    return operation(materialize=Materialize(lmq_name=lmq_name, create=create))


def unmaterialize(lmq_name: str, stamp: int = 0) -> Operation:
    asked = Unmaterialize(lmq_name=lmq_name, expected_activity_stamp=stamp)
    return operation(unmaterialize=asked)


async def loaded(storage: RunningStorage) -> int:
    count: int = (await storage.info()).materialized_queues
    return count


# --- topics (S7) ----------------------------------------------------------------------------------

DEFAULTS = TopicSettings(
    subscription=SUBSCRIPTION_KIND_SHARED,
    partitions=1,
    visibility_timeout_ms=30_000,
    max_wait_action=MAX_WAIT_ACTION_DELETE,
    idle_after_ms=600_000,
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
    consumption_records_disabled=True,
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
        await SystemClock().wait_for(later, 2000)


async def test_another_partition_or_none_is_refused_by_every_call(storage: RunningStorage) -> None:
    stub = storage.storage
    asked = [
        stub.GetTopic(GetTopicRequest(partition=1, name="jobs")),
        stub.ListTopics(ListTopicsRequest(partition=1)),
        stub.ListQueues(ListQueuesRequest(partition=1)),
        stub.GetQueue(storage_pb2.GetQueueRequest(partition=1, lmq_name="jobs")),
        stub.PeekQueue(PeekQueueRequest(partition=1, lmq_name="jobs", max_messages=1)),
    ]

    for call in asked:
        with pytest.raises(errors.PartitionNotFound):
            await call


async def test_storage_describes_what_it_holds(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"), reserve("jobs/a"))

    described = await storage.storage.DescribeStorage(DescribeStorageRequest())

    (held,) = described.held
    assert (described.cluster_id, described.partitions) == ("cluster-a", 1)
    assert (described.format_version, described.engine) == (FORMAT_VERSION, "rocksdb")
    assert (held.queues, held.materialized_queues, held.reservations) == (2, 2, 1)
    assert (held.broker_id, held.broker_epoch, held.commits > 0) == ("broker-a", 1, True)


# --- looking without waking -----------------------------------------------------------------------


async def list_names(storage: RunningStorage, **asked: Any) -> list[str]:
    names: list[str] = []
    token = ""
    while True:
        page = await storage.storage.ListQueues(ListQueuesRequest(page_token=token, **asked))
        names += [queue.lmq_name for queue in page.queues]
        token = page.next_page_token
        if not token:
            return names


async def test_queues_are_listed_in_pages_by_name_and_none_is_woken(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("job")
    names = ["job", "jobs", *(f"jobs/{n}" for n in range(5)), "jobs/user-1", "jobs/user-2"]
    await exchange.ask_all(*(append(name, b"x") for name in names))
    await storage.restart()

    everything = await list_names(storage, page_size=2)
    of_topic = await list_names(storage, topic="jobs")
    of_users = await list_names(storage, topic="jobs", lite_prefix="user-", page_size=1)

    assert everything == names
    assert of_topic == names[1:]
    assert of_users == names[-2:]
    assert await loaded(storage) == 0


@pytest.mark.parametrize(
    "fields", [{"page_token": "no hex"}, {"page_size": limits.PAGE_SIZE_MAX + 1}]
)
async def test_a_page_of_queues_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any]
) -> None:
    """S3."""
    await list_names(storage, page_size=limits.PAGE_SIZE_MAX)

    with pytest.raises(errors.InvalidArgument):
        await storage.storage.ListQueues(ListQueuesRequest(**fields))


async def test_a_token_of_another_listing_shows_no_queue_that_was_not_asked_for(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("other")
    await exchange.ask_all(*(append(f"jobs/{n}", b"x") for n in range(3)), append("other", b"x"))
    page = await storage.storage.ListQueues(ListQueuesRequest(topic="jobs", page_size=1))

    token = page.next_page_token
    try:
        asked = ListQueuesRequest(topic="other", page_token=token)
        page = await storage.storage.ListQueues(asked)
    except errors.InvalidArgument:
        return
    assert {queue.lmq_name for queue in page.queues} <= {"other"}


async def test_a_queue_is_described_from_memory_or_from_disk_alike(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: with its durable last activity."""
    await exchange.ask(append("jobs/a", b"1", b"2", b"3"))
    await clock.advance_ms(100)
    await exchange.ask(append("jobs/a", b"later", delay_ms=1000))
    (got,) = (await exchange.ask(reserve("jobs/a", 2))).slices
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, (0, 1)))

    warm = await storage.queue("jobs/a")
    await storage.restart()
    cold = await storage.queue("jobs/a")

    assert warm.queue.activity == QUEUE_ACTIVITY_MATERIALIZED
    assert cold.queue.activity == QUEUE_ACTIVITY_IDLE
    for seen in (warm, cold):
        queue, (group,) = seen.queue, seen.groups
        assert (queue.messages, queue.next_offset) == (4, 3)
        assert queue.last_activity_time.ToMilliseconds() == clock.wall_ms()
        assert queue.oldest_publish_time.ToMilliseconds() == clock.wall_ms() - 100
        assert (group.name, group.cursor, group.unsettled, group.inflight) == ("default", 1, 2, 1)
    assert (warm.queue.inflight, cold.queue.inflight) == (1, 0)
    assert await loaded(storage) == 0


async def test_looking_for_what_is_not_there_says_so(storage: RunningStorage) -> None:
    with pytest.raises(errors.QueueNotFound):
        await storage.queue("jobs/none")
    with pytest.raises(errors.QueueNotFound):
        await storage.storage.PeekQueue(PeekQueueRequest(lmq_name="jobs/none", max_messages=1))
    with pytest.raises(errors.InvalidName):
        await storage.queue("no/such/name")


async def peek(storage: RunningStorage, **asked: Any) -> list[bytes]:
    request = PeekQueueRequest(lmq_name="jobs/a", **asked)
    answer = await storage.storage.PeekQueue(request)
    return [each.message.payload for each in answer.messages]


async def test_messages_can_be_looked_at_without_reserving_or_waking(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.ask_all(
        append("jobs/a", b"0", b"1", fairness_key="k"), append("jobs/a", b"2", b"3")
    )
    slices = (await exchange.ask(reserve("jobs/a", 3))).slices
    await exchange.ask(settle(slices[0].receipt, SETTLE_ACTION_ACK, (0, 1)))
    done = slices[0].first_offset
    await storage.restart()

    everything = await peek(storage, max_messages=1000)
    middle = await peek(storage, offset=1, max_messages=2)
    unsettled = await peek(storage, max_messages=10, group="default")

    assert everything == [b"0", b"1", b"2", b"3"]
    assert middle == [b"1", b"2"]
    assert unsettled == [b"%d" % at for at in range(4) if at != done]
    assert await loaded(storage) == 0
    with pytest.raises(errors.InvalidArgument):
        await peek(storage, max_messages=limits.PAGE_SIZE_MAX + 1)


async def test_large_messages_can_be_looked_at(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    for _ in range(5):
        await exchange.ask(append("jobs/a", *[bytes(1_000_000)] * 4))

    assert len(await peek(storage, max_messages=1000)) > 0


async def test_large_messages_of_many_queues_can_be_reserved_in_one_frame(
    exchange: ExchangeClient,
) -> None:
    for number in range(5):
        await exchange.ask(append(f"jobs/{number}", *[bytes(1_000_000)] * 4))

    results = await exchange.ask_all(*(reserve(f"jobs/{number}") for number in range(5)))

    assert [sum(each.count for each in result.slices) for result in results] == [4] * 5


# --- loading and unloading (I2, I4, I9) -----------------------------------------------------------


async def test_a_queue_is_loaded_once_and_created_only_if_asked_to(
    exchange: ExchangeClient,
) -> None:
    """I2."""
    missing, created, again, no_topic = await exchange.ask_all(
        materialize("jobs/a"),
        materialize("jobs/a", create=True),
        materialize("jobs/a"),
        materialize("no-such-topic", create=True),
    )

    assert isinstance(missing, errors.QueueNotFound)
    assert isinstance(no_topic, errors.TopicNotFound)
    assert (created.created, created.was_cold) == (True, True)
    assert (again.created, again.was_cold, again.queue_id) == (False, False, created.queue_id)
    assert again.activity_stamp > created.activity_stamp


async def test_unloading_tells_what_came_of_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """I4: EVICTED, NOT_PRESENT, NOT_MATERIALIZED, HAS_INFLIGHT and RACE_LOST."""
    stamp = (await exchange.ask(materialize("jobs/a", create=True))).activity_stamp

    async def outcome(asked: Operation) -> int:
        result: int = (await exchange.ask(asked)).outcome
        return result

    assert await outcome(unmaterialize("jobs/none")) == EVICTION_OUTCOME_NOT_PRESENT
    await exchange.ask(append("jobs/a", b"x"))
    assert await outcome(unmaterialize("jobs/a", stamp)) == EVICTION_OUTCOME_RACE_LOST
    (got,) = (await exchange.ask(reserve("jobs/a"))).slices
    assert await outcome(unmaterialize("jobs/a")) == EVICTION_OUTCOME_HAS_INFLIGHT
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
    stamp = (await exchange.ask(materialize("jobs/a"))).activity_stamp
    assert await outcome(unmaterialize("jobs/a", stamp)) == EVICTION_OUTCOME_EVICTED
    assert await outcome(unmaterialize("jobs/a")) == EVICTION_OUTCOME_NOT_MATERIALIZED
    assert await loaded(storage) == 0
    (again,) = (await exchange.ask(reserve("jobs/a"))).slices
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_what_is_used_in_the_same_frame_is_not_unloaded(exchange: ExchangeClient) -> None:
    """I2, I4: there is no interleaving in which both happen."""
    _, unloaded = await exchange.ask_all(append("jobs/a", b"x"), unmaterialize("jobs/a"))

    assert unloaded.outcome == EVICTION_OUTCOME_RACE_LOST
    assert len((await exchange.ask(reserve("jobs/a"))).slices) == 1


async def test_a_queue_that_nobody_tracks_is_unloaded_after_twice_its_idle_window(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: what a broker tracks, or a reservation holds, stays."""
    await storage.create_topic("idle", idle_after_ms=5000)
    await exchange.ask_all(append("idle/untracked", b"x"), append("idle/held", b"x"))
    await exchange.ask_all(reserve("idle/held"), materialize("idle/tracked", create=True))

    await clock.advance_ms(9_000)
    before = await loaded(storage)
    await clock.advance_ms(3_000)
    after = await loaded(storage)

    assert (before, after) == (3, 2)
    assert len((await exchange.ask(reserve("idle/untracked"))).slices) == 1


async def test_another_broker_tracks_nothing_until_it_says_so(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: left by a broken link."""
    await storage.create_topic("idle", idle_after_ms=1000)
    await exchange.ask(materialize("idle/a", create=True))

    await storage.claim(broker_id="broker-b")
    await clock.advance_ms(5_000)

    assert await loaded(storage) == 0


async def test_each_queue_is_unloaded_by_its_own_idle_window(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9."""
    await storage.create_topic("idle", idle_after_ms=1000)
    await exchange.ask(append("jobs/long", b"x"))
    await clock.advance_ms(10)
    await exchange.ask(append("idle/short", b"x"))

    await clock.advance_ms(5_000)

    assert await loaded(storage) == 1
