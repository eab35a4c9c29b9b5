"""Queues as operators see them; looking at them wakes none (I1)."""

from typing import Any

import pytest

from tests.support.local_broker import QUEUE, LocalBroker, groups, payloads_of, run_of
from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Message
from tidemark.errors import InvalidArgument, InvalidName, QueueNotFound

IDLE = topic_pb2.QUEUE_ACTIVITY_IDLE
MATERIALIZED = topic_pb2.QUEUE_ACTIVITY_MATERIALIZED


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
    """Both services restart: no queue is loaded."""
    await local.stop_broker()
    await local.stop_storage()
    await local.start_storage()
    await local.start_broker()


async def peek(local: LocalBroker, lmq_name: str = QUEUE, **fields: Any) -> list[Any]:
    request = topic_pb2.PeekQueueRequest(lmq_name=lmq_name, **fields)
    return list((await local.topics.PeekQueue(request)).messages)


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
        {"page_token": "2:"},
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
