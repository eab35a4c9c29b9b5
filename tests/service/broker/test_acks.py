"""Acks over sessions: many deliveries are done with one request and one result (V6, V8)."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from tests.service.broker.conftest import Gated
from tests.support.local_broker import QUEUE, LocalBroker, in_time, take
from tests.support.session import Session
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Nack
from tidemark.errors import InvalidArgument
from tidemark.rpc.callbacks import complete
from tidemark.rpc.statuses import from_status


async def ack_all(session: Session, tags: Sequence[int]) -> dict[int, str]:
    """Acknowledge deliveries; returns those that failed, with the reasons."""
    acked: asyncio.Future[broker_pb2.AcksResult] = asyncio.get_running_loop().create_future()
    session.send_acks(tags, partial(complete, acked))
    result = await in_time(acked)
    return {each.delivery_tag: from_status(each.error).reason for each in result.refused}


async def test_deliveries_of_all_partitions_are_acknowledged_at_once(local: LocalBroker) -> None:
    """V6: those that cannot be are named, each with its reason."""
    session = await local.session()
    queues = [*local.names_in(0, 3), *local.names_in(1, 3)]
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*queues)
    for queue in queues:
        await session.publish(queue, [b"1", b"2"])
    tags = [each.delivery_tag for each in await take(consumer, 2 * len(queues))]
    await session.settle(tags[0], Nack(), [(0, 1)])  # its rest is acknowledged
    await session.settle(tags[1], Ack())

    failed = await ack_all(session, [*tags, 777])

    assert failed == {tags[1]: "UNKNOWN_DELIVERY_TAG", 777: "UNKNOWN_DELIVERY_TAG"}
    views = [await local.queue(queue) for queue in queues]
    assert sum(each.messages > 0 for each in views) == 1  # the one with a message that went back
    assert await ack_all(session, tags[2:]) == dict.fromkeys(tags[2:], "UNKNOWN_DELIVERY_TAG")


async def test_a_frame_acknowledges_a_bounded_number_of_deliveries(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()

    with pytest.raises(InvalidArgument):
        await ack_all(session, range(limits.SETTLEMENTS_PER_FRAME_MAX + 1))


async def test_acks_that_were_lost_on_the_way_can_be_repeated(gated: Gated) -> None:
    """V6: the client still holds what was not acknowledged."""
    local, gates = gated
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)
    link, tag = gates.links[0], delivery.delivery_tag
    link.requests.close()
    acking = asyncio.create_task(ack_all(session, [tag]))
    await in_time(link.requests.until_held())
    await link.break_now()
    link.requests.let_go()
    assert await acking == {tag: "UNAVAILABLE"}

    while await ack_all(session, [tag]):
        assert session.ended is None

    assert (await local.queue(QUEUE)).messages == 0
