"""A lease that fails has a reason and leaves nothing, for any caller (I2)."""

import asyncio
from typing import Any

import pytest

from broker_svc.idle.cleanup import EvictionOutcome
from broker_svc.publish.publishers import Publisher, PublisherCache
from tests.support.gated_storage import GatedLink, GatedStorage
from tests.support.idle_broker import (
    IDLE_MS,
    PARTITIONS,
    QUEUE,
    QUEUE_PARTITION,
    TOPIC,
    IdleBroker,
    cleaning,
    leases_of,
)
from tests.support.local_broker import run_of, until
from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2, topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.errors import TopicNotEmpty, TopicNotFound, Unavailable
from tidemark.names import partition_of
from tidemark.rpc import open_channel


async def test_a_lease_on_a_queue_whose_topic_was_deleted_says_so_and_leaves_none(
    broker: IdleBroker,
) -> None:
    """I2: the record that is left is forgotten after its window."""
    await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC))

    with pytest.raises(TopicNotFound):
        await broker.lease()

    assert leases_of(broker) == 0
    await broker.clock.advance_ms(IDLE_MS)
    assert set(await broker.components.cleanup.run_once()) == {EvictionOutcome.NOT_PRESENT}
    assert len(broker.components.tracking) == 0


async def test_a_topic_deleted_while_its_queue_is_loaded_fails_all_who_wait(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: those that share the load share its failure."""
    link.requests.close()
    asked = [asyncio.create_task(broker.lease("gone/a")) for _ in range(3)]
    await link.requests.until_held()
    assert leases_of(broker) == 3

    link.requests.let_go()

    for lease in asked:
        with pytest.raises(TopicNotFound):
            await lease
    assert leases_of(broker) == 0


async def test_a_lease_in_a_partition_that_has_not_heard_of_the_topic_brings_it_there(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2: the broker that created the topic died before it reached all partitions."""
    topic = topic_pb2.Topic(name="late")
    async with open_channel(gates.address) as channel:
        put = storage_pb2.PutTopicRequest(topic=topic, create=True)
        await StorageServiceStub(channel).PutTopic(put)

    assert partition_of("late/b", PARTITIONS) == 1
    assert await broker.pull("late/b") == []


async def test_a_publish_to_a_partition_that_has_not_heard_of_the_topic_has_a_publisher(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2, I8: the load that came with it had failed; the receipt names a publisher that lives."""
    async with open_channel(gates.address) as channel:
        put = storage_pb2.PutTopicRequest(topic=topic_pb2.Topic(name="late"), create=True)
        await StorageServiceStub(channel).PutTopic(put)
    await broker.topics.GetTopic(topic_pb2.GetTopicRequest(name="late"))  # the broker knows it

    receipt = await broker.publish(b"a", "late/b")

    assert leases_of(broker) == 1
    destroy = broker_pb2.DestroyPublisherRequest(publisher_id=receipt.publisher_id)
    await broker.calls.DestroyPublisher(destroy)
    assert leases_of(broker) == 0


async def test_a_publish_whose_queue_cannot_be_loaded_leaves_no_lease(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2: the broker still knows the topic, which was deleted elsewhere."""
    async with open_channel(gates.address) as channel:
        delete = storage_pb2.DeleteTopicRequest(name=TOPIC)
        await StorageServiceStub(channel).DeleteTopic(delete)

    with pytest.raises(TopicNotFound):
        await broker.publish(b"lost")

    assert leases_of(broker) == 0
    assert len(broker.components.publishers) == 0


async def test_a_topic_is_deleted_without_force_as_a_whole_or_not_at_all(
    broker: IdleBroker,
) -> None:
    """S3: its empty queues have groups and progress too."""
    assert partition_of("orders/b", PARTITIONS) == 1
    await broker.pull()
    await broker.publish(b"kept", "orders/b")

    with pytest.raises(TopicNotEmpty):
        await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC))

    found = await broker.topics.ListGroups(topic_pb2.ListGroupsRequest(lmq_name=QUEUE))
    assert [group.name for group in found.groups] == ["default"]


async def test_a_publish_that_comes_while_its_topic_is_deleted_without_force_is_kept(
    broker: IdleBroker, link: GatedLink
) -> None:
    """S2: the queue was empty when it was looked at."""
    await broker.pull()
    link.requests.close()
    publish = asyncio.create_task(broker.publish(b"kept"))
    await link.requests.until_held()
    call = broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC))
    deletion = asyncio.ensure_future(call)
    while broker.components.links[QUEUE_PARTITION].waiting < 2:
        await broker.clock.sleep_ms(0)

    link.requests.let_go()

    await publish
    with pytest.raises(TopicNotEmpty):
        await deletion
    (delivery,) = await broker.pull()
    assert delivery.batch.messages[0].payload == b"kept"


async def test_a_publish_without_a_link_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    await link.break_now()
    await broker.until_disconnected(QUEUE_PARTITION)

    with pytest.raises(Unavailable):
        await broker.publish(b"refused")

    assert leases_of(broker) == 0
    assert len(broker.components.publishers) == 0


async def test_a_publisher_opened_behind_a_first_publish_waits_until_the_queue_is_loaded(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: the publish has made the publisher; it is not known yet that its queue is loaded."""
    link.requests.close()
    cache = PublisherCache(broker.components.publishers, publishers_max=10)
    results: asyncio.Queue[message_pb2.PublishResult] = asyncio.Queue()
    broker.components.publish_path.submit(run_of(QUEUE, b"1"), cache, "", results.put_nowait)
    opened = asyncio.create_task(broker.components.publish_path.open(QUEUE, cache))
    await link.requests.until_held()
    assert not opened.done()

    await link.break_now()

    with pytest.raises(Unavailable):
        await opened
    assert (await results.get()).HasField("error")
    assert leases_of(broker) == 0
    assert len(cache) == 0


async def test_a_consumer_that_is_closed_while_it_subscribes_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I3: the session lives on, and would keep the queue awake for no consumer."""
    session: Any = broker.calls.Session()
    hello, consumer = broker_pb2.Hello(client_id="hasty"), broker_pb2.OpenConsumer(consumer_id=1)
    await session.write(broker_pb2.SessionRequest(hello=hello, open_consumers=[consumer]))
    await session.read()
    link.requests.close()
    sync = subscription_pb2.SubscriptionSync(
        consumer_id=1,
        mode=subscription_pb2.SYNC_MODE_PARTIAL_ADD,
        entries=[subscription_pb2.SubscriptionEntry(lmq_name=QUEUE)],
    )
    await session.write(broker_pb2.SessionRequest(syncs=[sync]))
    await link.requests.until_held()
    closing = broker_pb2.ConsumerCredit(consumer_id=1, close=True)
    await session.write(broker_pb2.SessionRequest(credits=[closing, closing]))
    await session.read()  # an error: the second found it closed

    link.requests.let_go()

    while not (await session.read()).synced:
        pass
    assert leases_of(broker) == 0
    assert len(broker.components.subscriptions) == 0


async def test_a_session_that_ends_while_its_publisher_is_opened_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I5: publishers live as long as their connection and no longer."""
    cleanup = await cleaning(broker, link)  # so that a publisher must wait
    session = broker.calls.Session()
    await session.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="hasty")))
    await session.read()
    await session.write(broker_pb2.SessionRequest(runs=[run_of(QUEUE, b"x")]))
    await session.write(broker_pb2.SessionRequest(destroy_publishers=[1]))
    await session.read()  # an error: both frames were taken
    session.cancel()
    while broker.service.sessions:
        await broker.clock.sleep_ms(0)

    link.answers.let_go()
    await cleanup
    await broker.components.leases.create(
        QUEUE, (QUEUE_PARTITION,), IDLE_MS
    )  # behind the publisher's

    async def given_back() -> bool:
        return leases_of(broker) == 1 and len(broker.components.publishers) == 0

    await until(given_back)


async def test_a_session_that_ends_while_the_queues_of_its_publishers_load_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I5: at once, however long storage takes."""
    await broker.components.topics.get(TOPIC)
    link.requests.close()
    session: Any = broker.calls.Session()
    opens = [broker_pb2.OpenPublisher(request_id=1, lmq_name=QUEUE)]
    hello = broker_pb2.Hello(client_id="hasty")
    await session.write(broker_pb2.SessionRequest(hello=hello, open_publishers=opens))
    await link.requests.until_held()
    before = leases_of(broker)

    session.cancel()
    while broker.service.sessions:
        await broker.clock.sleep_ms(0)

    assert (before, leases_of(broker)) == (1, 0)
    link.requests.let_go()
    (await broker.lease()).release()  # behind the publisher's
    assert len(broker.components.publishers) == 0


async def test_a_publisher_whose_queue_was_not_loaded_has_no_lease_until_it_is_opened_again(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: the link has broken while the queue was loaded."""
    await broker.components.topics.get(TOPIC)
    link.requests.close()
    cache = PublisherCache(broker.components.publishers, publishers_max=10)
    opened: asyncio.Queue[Publisher | None] = asyncio.Queue()
    path = broker.components.publish_path

    soon = path.open_soon(QUEUE, cache, opened.put_nowait)
    await link.break_now()
    failed = await opened.get()
    left = leases_of(broker)
    link.requests.let_go()
    await broker.reconnect()
    again = path.open_soon(QUEUE, cache, opened.put_nowait)
    publisher = await opened.get()

    assert (soon, failed, left, again) == (True, None, 0, True)
    assert publisher is not None
    assert publisher is await path.open(QUEUE, cache)
    assert not path.open_soon(QUEUE, cache, opened.put_nowait), "it is known: `open` returns it"
    assert leases_of(broker) == 1
