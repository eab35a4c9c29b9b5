"""Several brokers that share the partitions by static settings: any of them may be called."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tidemark
from broker_svc.app import broker
from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time, payloads_of, reason_of, run_of, until
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1 import exchange_pb2, holder_pb2
from tidemark.api.storage.v1.holder_pb2_grpc import HolderServiceStub
from tidemark.clock import SystemClock
from tidemark.errors import InvalidArgument, NotOwner
from tidemark.rpc import open_channel
from tidemark.settings import BrokerSettings
from tidemark.settings.variables import SettingsError

EXCLUSIVE = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE
ADD = subscription_pb2.SYNC_MODE_PARTIAL_ADD


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    """Three brokers over two storage nodes, four partitions; `orders` spans all of them."""
    async with several_brokers(tmp_path) as several:
        await several.create_topic(partitions=4)
        yield several


async def test_unary_calls_work_at_a_broker_that_holds_none_of_the_queues(
    brokers: Brokers,
) -> None:
    """S8, E3: published, pulled, settled, and owned; results keep their order."""
    names = [brokers.names_in(number, 1)[0] for number in range(4)]
    await brokers.create_topic("own", subscription=EXCLUSIVE)
    owned = brokers.names_in(1, 1, "own")[0]

    results = await brokers.publish(*(run_of(name, name.encode()) for name in names))
    pulled = [(await brokers.pull(name, wait_ms=30_000))[0] for name in names]
    settled = [await brokers.settle(each.receipt, Ack()) for each in pulled]
    sync = subscription_pb2.SubscriptionSync(mode=ADD)
    sync.entries.add(lmq_name=owned)
    request = broker_pb2.SyncSubscriptionsRequest(client_id="ada", sync=sync)
    (taken,) = (await brokers.api.SyncSubscriptions(request)).result.results
    await brokers.publish(run_of(owned, b"mine"))
    (mine,) = await brokers.pull(owned, wait_ms=30_000)
    held = broker_pb2.HeldSubscriptions(group="default")
    held.entries.add(lmq_name=owned, epoch=taken.epoch + 1)
    beat = await brokers.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="ada", held=[held]))

    assert [reason_of(each) for each in results] == [""] * 4
    assert [each.receipt.partition for each in results] == [0, 1, 2, 3]
    assert [payloads_of([each])[0].decode() for each in pulled] == names
    assert [each.messages for each in settled] == [1] * 4
    assert (taken.epoch > 0, payloads_of([mine])) == (True, [b"mine"])
    assert list(beat.unsubscribed) == []


async def test_a_plain_queue_over_several_holders_is_pulled_from_all_of_them(
    brokers: Brokers,
) -> None:
    """S8: the answer that is not used is given back untried."""
    await brokers.publish(*(run_of("orders", b"%d" % each, partition=each) for each in range(4)))

    got: list[Delivery] = []
    while len(got) < 4:
        for delivery in await brokers.pull("orders", wait_ms=30_000, max_messages=1):
            got.append(delivery)
            await brokers.settle(delivery.receipt, Ack())

    assert sorted(payloads_of(got)) == [b"0", b"1", b"2", b"3"]
    assert [each.attempt_count for each in got] == [0] * 4
    waiting = asyncio.create_task(brokers.pull("orders", wait_ms=50_000))
    await brokers.publish(run_of("orders", b"late", partition=1))
    assert payloads_of(await in_time(waiting)) == [b"late"]


async def test_administrative_calls_and_topic_changes_work_at_any_broker(
    brokers: Brokers,
) -> None:
    """S7, S8: every broker obeys a change that another one was asked for."""
    names = [brokers.names_in(number, 1)[0] for number in range(4)]
    for number in range(3):  # every broker has used the topic
        await brokers.call(number)
        await brokers.publish(*(run_of(name, b"1") for name in names))
    change = topic_pb2.UpdateTopicRequest(
        name="orders", settings=topic_pb2.TopicSettings(queue_messages_max=3)
    )
    change.update_mask.paths.append("queue_messages_max")

    await brokers.topics.UpdateTopic(change)

    await brokers.call(1)
    refused = await brokers.publish(*(run_of(name, b"2") for name in names))
    purged = [
        (await brokers.topics.PurgeQueue(topic_pb2.PurgeQueueRequest(lmq_name=name))).messages
        for name in names
    ]
    evicted = await brokers.topics.TryEvictInactiveQueue(
        topic_pb2.TryEvictInactiveQueueRequest(lmq_name=names[0])
    )
    await brokers.call(2)
    deleted = await brokers.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name="orders"))
    await brokers.call(0)
    gone = await brokers.publish(*(run_of(name, b"3") for name in names))
    assert [reason_of(each) for each in refused] == ["QUEUE_FULL"] * 4
    assert purged == [3] * 4
    assert [each.partition for each in evicted.partitions] == [0]
    assert deleted.queues >= 4
    assert [reason_of(each) for each in gone] == ["TOPIC_NOT_FOUND"] * 4


async def test_the_python_client_uses_every_broker_through_any_of_them(brokers: Brokers) -> None:
    """S8, E10, C1: also for a plain queue whose partitions several brokers hold, and after one of
    them was restarted."""
    await brokers.create_topic("own", subscription=EXCLUSIVE)
    names = [brokers.names_in(number, 1, "own")[0] for number in range(4)]
    async with tidemark.connect(brokers.members[0][1]) as client:
        publishers = [await client.publisher(name) for name in names]
        async with client.subscribe(names) as owned, client.subscribe(["orders"]) as plain:
            for publisher in publishers:
                await in_time(publisher.publish(publisher.lmq_name.encode()))
            found = [await in_time(anext(owned)) for _ in names]
            for each in found:
                await in_time(each.ack(wait=True))
            await brokers.publish(
                *(run_of("orders", b"%d" % each, partition=each) for each in range(4))
            )
            drawn = [await in_time(anext(plain)) for _ in range(4)]
            for each in drawn:
                await in_time(each.ack(wait=True))

            await brokers.stop_member(1)
            await brokers.start_member(1)
            await in_time(publishers[1].publish(b"again"))
            again = await in_time(anext(owned))

            async def is_stored() -> bool:
                # The first broker may not have connected to the restarted one again.
                (result,) = await brokers.publish(run_of("orders", b"back", partition=1))
                assert reason_of(result) in ("", "UNAVAILABLE")
                return not reason_of(result)

            await until(is_stored)
            back = await in_time(anext(plain))
            await in_time(again.ack(wait=True))
            await in_time(back.ack(wait=True))

    assert {each.payload.decode() for each in found} == set(names)
    assert {each.payload for each in drawn} == {b"0", b"1", b"2", b"3"}
    assert (again.payload, back.payload) == (b"again", b"back")


async def test_a_broker_that_is_gone_concerns_its_own_partitions_only(brokers: Brokers) -> None:
    """C1, C5: static settings do not fail over; its partitions wait for it."""
    names = [brokers.names_in(number, 1)[0] for number in range(4)]
    await brokers.stop_member(1)

    results = await brokers.publish(*(run_of(name, b"1") for name in names))
    changed = await brokers.create_topic("fresh")
    await brokers.start_member(1)

    async def is_back() -> bool:
        fresh = brokers.names_in(1, 1, "fresh")[0]
        again = await brokers.publish(run_of(names[1], b"2"), run_of(fresh, b"2"))
        return [reason_of(each) for each in again] == ["", ""]

    await until(is_back)
    assert [reason_of(each) for each in results] == ["", "UNAVAILABLE", "", ""]
    assert changed.name == "fresh"


async def test_a_holder_takes_administrative_operations_of_its_own_partitions_only(
    brokers: Brokers,
) -> None:
    """S8: a call is forwarded one hop, never twice."""
    purge = exchange_pb2.Operation(purge=exchange_pb2.Purge(lmq_name="orders"))
    expire = exchange_pb2.Operation(expire_due=exchange_pb2.ExpireDue())
    async with open_channel(brokers.members[0][1]) as channel:
        holder = HolderServiceStub(channel)

        with pytest.raises(NotOwner) as refused:
            await holder.Operate(holder_pb2.OperateRequest(partition=1, operation=purge))
        with pytest.raises(InvalidArgument):
            await holder.Operate(holder_pb2.OperateRequest(partition=0, operation=expire))

    assert refused.value.metadata["owner"] == brokers.members[1][1]


async def test_two_brokers_with_one_id_end_with_one_holder(brokers: Brokers) -> None:
    """C5: the later one has the partitions; the first is fenced and does not take them back."""
    async with AsyncExitStack() as stack, open_channel(brokers.members[0][1]) as channel:
        settings = BrokerSettings(
            broker_id="broker-0",
            brokers=brokers.members,
            partitions=brokers.partitions,
            listen="127.0.0.1:0",
            storage_addresses=brokers.addresses,
        )
        await stack.enter_async_context(broker(settings, SystemClock()))
        topics = TopicServiceStub(channel)

        async def is_fenced() -> bool:
            answer = await topics.ListPartitions(topic_pb2.ListPartitionsRequest())
            return answer.partitions[0].link_state == topic_pb2.LINK_STATE_MOVED

        await until(is_fenced)


def test_a_broker_that_is_not_in_the_list_does_not_start() -> None:
    """C5."""
    with pytest.raises(SettingsError, match="TIDEMARK_BROKERS"):
        BrokerSettings(broker_id="another", brokers=(("broker-0", "a:1"),))
