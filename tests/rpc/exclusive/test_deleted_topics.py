"""Topics that go under the owners of their queues: ownership goes along, and nothing stays stuck."""

from tests.rpc.broker.local_broker import payloads_of, run_of
from tests.rpc.exclusive.clients import RESYNC_REQUIRED, subscribe
from tests.rpc.exclusive.conftest import QUEUE, ExclusiveBroker
from tidemark.api.broker.v1 import topic_pb2


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
