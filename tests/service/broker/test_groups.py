"""Groups as operators see them: their progress, moved, and deleted."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    groups,
    payloads_of,
    reason_of,
    run_of,
    take,
)
from tidemark.api.broker.v1 import subscription_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.errors import GroupNotFound, InvalidArgument, InvalidName


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


async def test_a_deleted_group_is_gone_and_starts_over(local: LocalBroker) -> None:
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
