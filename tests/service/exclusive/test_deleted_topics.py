"""Topics that go under the owners of their queues: ownership goes along, nothing stays stuck."""

import pytest

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    REMOVE,
    REMOVE_ALL,
    RESYNC_REQUIRED,
    resync,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry


async def delete_topic(broker: ExclusiveBroker, name: str) -> None:
    await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=name, force=True))


async def test_a_session_whose_topic_was_deleted_is_told(broker: ExclusiveBroker) -> None:
    """E10: as if its queue alone had been deleted."""
    ada = await broker.session_client("ada")
    await subscribe(ada, QUEUE)

    await delete_topic(broker, "own")

    (notice,) = await ada.until_told()
    assert (notice.lmq_name, notice.state) == (QUEUE, RESYNC_REQUIRED)


async def test_a_topic_that_is_created_again_as_a_shared_one_serves_its_old_owner(
    broker: ExclusiveBroker,
) -> None:
    """The epoch of the old topic means nothing in the new one."""
    ada = await broker.session_client("ada")
    await subscribe(ada, QUEUE)
    await delete_topic(broker, "own")
    await broker.create_topic("own")

    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("deleted", ["own", "shared"])
async def test_a_resync_without_a_queue_whose_topic_is_gone_confirms_the_others(
    broker: ExclusiveBroker, client: NewClient, deleted: str
) -> None:
    """E7."""
    await broker.create_topic("kept", subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
    ada = await client("ada")
    await subscribe(ada, f"{deleted}/a")
    epoch = await subscribe(ada, "kept/a")
    await delete_topic(broker, deleted)

    assert await resync(ada, {"kept/a": epoch}) == [(ACTIVE, epoch)]


@pytest.mark.parametrize("mode", [REMOVE, REMOVE_ALL])
@pytest.mark.parametrize("topic", ["own", "shared"])
async def test_what_is_removed_after_its_topic_leaves_its_place_in_the_quotas(
    start: Start, topic: str, mode: int
) -> None:
    """Removing is never refused for good."""
    broker = await start(subscriptions_per_broker_max=1)
    await broker.create_topic("kept")
    ada = broker.unary_client("ada")
    await subscribe(ada, f"{topic}/a")
    await delete_topic(broker, topic)

    await ada.sync(mode, *([SubscriptionEntry(lmq_name=f"{topic}/a")] if mode == REMOVE else []))

    await subscribe(ada, "kept/a")
