"""Bursts of what a client asks: cut into frames that the broker takes."""

import asyncio

import pytest

from tests.support.local_broker import LocalBroker, in_time
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.subscription_pb2 import SYNC_MODE_PARTIAL_REMOVE, SubscriptionSync

pytestmark = pytest.mark.slow

QUEUE = "orders/a"


async def test_any_number_of_publishers_is_opened_and_destroyed_at_once(
    local: LocalBroker,
) -> None:
    """A program with a queue for each user opens them all when it starts (S3)."""
    await local.create_topic()
    session = await local.session()

    opened = await in_time(
        asyncio.gather(*(session.open_publisher(QUEUE) for _ in range(limits.FRAME_PARTS_MAX + 1)))
    )
    for _ in opened:
        session.destroy_publisher(opened[0].publisher_id)

    assert (await in_time(session.open_publisher(QUEUE))).publisher_id


async def test_subscriptions_of_many_groups_are_confirmed_at_once(local: LocalBroker) -> None:
    """As after a reconnect: one sync for each group, all ready for the first frame (S3)."""
    await local.create_topic()
    session = await local.session()
    entries = limits.FRAME_ENTRIES_MAX // 2 - 1
    syncs = []
    for group in ("a", "b", "c"):
        consumer = session.open_consumer(group)
        sync = SubscriptionSync(
            group=group, mode=SYNC_MODE_PARTIAL_REMOVE, consumer_id=consumer.consumer_id
        )
        for _ in range(entries):
            sync.entries.add(lmq_name=QUEUE)
        syncs.append(sync)

    results = await in_time(asyncio.gather(*map(session.sync, syncs)))

    assert [len(each.results) for each in results] == [entries] * 3


async def test_heartbeats_that_could_not_be_sent_in_time_do_not_add_up(local: LocalBroker) -> None:
    """The newest report includes the earlier ones (S3)."""
    await local.create_topic()
    session = await local.session()
    held = broker_pb2.HeldSubscriptions(group="default")
    for number in range(limits.SUBSCRIPTIONS_PER_SESSION_MAX):
        held.entries.add(lmq_name=f"orders/{number}", epoch=1)

    session.heartbeat([held])
    session.heartbeat([held])

    assert (await in_time(session.open_publisher(QUEUE))).publisher_id
