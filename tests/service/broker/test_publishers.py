"""Publishers of a session: opened, destroyed, dropped, and what they keep loaded (I5, I8)."""

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import LocalBroker, in_time, run_of, until
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.clock import ManualClock
from tidemark.errors import InvalidName, PublisherNotFound, TidemarkError
from tidemark.rpc import from_status


async def evicted(local: LocalBroker, lmq_name: str) -> str:
    request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=lmq_name)
    outcome = (await local.topics.TryEvictInactiveQueue(request)).outcome
    return topic_pb2.EvictionOutcome.Name(outcome).removeprefix("EVICTION_OUTCOME_")


async def test_an_opened_publisher_has_its_queue_loaded(local: LocalBroker) -> None:
    """I2."""
    session = await local.session()

    opened = await session.open_publisher("orders/x")

    queue = await local.queue("orders/x")
    assert queue.activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED
    assert list(opened.partitions) == [queue.partition]
    receipt = await session.publish("orders/x", [b"1"], publisher_id=opened.publisher_id)
    assert receipt.publisher_id == opened.publisher_id


async def test_a_publisher_of_a_topic_that_is_not_there_is_refused(local: LocalBroker) -> None:
    session = await local.session()

    with pytest.raises(InvalidName):
        await session.open_publisher("orders/")
    with pytest.raises(TidemarkError, match="TOPIC_NOT_FOUND"):
        await session.open_publisher("nowhere")


async def test_a_destroyed_publisher_keeps_its_queue_no_longer(
    start: StartBroker, clock: ManualClock
) -> None:
    """I8."""
    local = await start(clock, topic={"idle_after_ms": 1000})
    session = await local.session()
    by_call = await session.open_publisher("orders/call")
    by_frame = await session.open_publisher("orders/frame")
    await clock.advance_ms(1500)
    assert await evicted(local, "orders/call") == "ACTIVE"

    await local.api.DestroyPublisher(
        broker_pb2.DestroyPublisherRequest(publisher_id=by_call.publisher_id)
    )
    session.destroy_publisher(by_frame.publisher_id)
    await session.publish("orders/barrier", [b""])

    assert await evicted(local, "orders/call") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/frame") == "NOT_IDLE_ENOUGH"
    with pytest.raises(PublisherNotFound):
        await local.api.DestroyPublisher(
            broker_pb2.DestroyPublisherRequest(publisher_id=by_call.publisher_id)
        )


async def test_destroying_an_unknown_publisher_is_told_as_an_error(local: LocalBroker) -> None:
    """I8."""
    session = await local.session()

    session.destroy_publisher(12345)
    await in_time(session.notified.wait_for(lambda: bool(session.errors)))

    (error,) = session.errors
    assert error.publisher_id == 12345
    assert isinstance(from_status(error.error), PublisherNotFound)


async def test_a_run_through_a_publisher_that_is_not_there_is_refused(local: LocalBroker) -> None:
    """I8."""
    session = await local.session()

    with pytest.raises(PublisherNotFound):
        await session.publish("orders/x", [b"1"], publisher_id=12345)


async def test_the_least_recently_used_publisher_leaves_first(
    start: StartBroker, clock: ManualClock
) -> None:
    """I5."""
    local = await start(clock, publishers_per_connection_max=2, topic={"idle_after_ms": 1000})
    session = await local.session()
    await session.publish("orders/a", [b""])
    await session.publish("orders/b", [b""])
    await session.publish("orders/a", [b""])

    await session.publish("orders/c", [b""])

    assert await evicted(local, "orders/a") == "ACTIVE"
    assert await evicted(local, "orders/b") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/c") == "ACTIVE"


async def test_idle_publishers_of_a_connection_are_dropped_where_that_is_set(
    start: StartBroker, clock: ManualClock
) -> None:
    """I5."""
    local = await start(
        clock, publisher_cache_idle_timeout_ms=5000, topic={"idle_after_ms": 100_000}
    )
    session = await local.session()
    await session.publish("orders/idle", [b""])
    await session.publish("orders/busy", [b""])
    await clock.advance_ms(4000)
    await session.publish("orders/busy", [b""])

    await clock.advance_ms(2000)

    assert await evicted(local, "orders/idle") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/busy") == "ACTIVE"


async def test_a_disconnect_drops_the_leases_of_publishers(
    start: StartBroker, clock: ManualClock
) -> None:
    """I3, I5."""
    local = await start(clock, topic={"idle_after_ms": 1000})
    session = await local.session()
    await session.publish("orders/x", [b""])
    assert await evicted(local, "orders/x") == "ACTIVE"

    await session.abort()

    async def released() -> bool:
        return await evicted(local, "orders/x") == "NOT_IDLE_ENOUGH"

    await until(released)


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_disconnect_in_the_middle_of_a_first_publish_leaves_no_lease(
    start: StartBroker, clock: ManualClock, turns: int
) -> None:
    """I3: the broker does not know the topic yet, so that the run waits while the client leaves."""
    local = await start(clock, partitions=1, topic={"idle_after_ms": 1000})
    await local.stop_broker()
    await local.start_broker()
    session = await local.session()

    _ = session.submit(run_of("orders/x", b"1"))
    for _ in range(turns):
        await clock.sleep_ms(0)
    await session.abort()

    async def settled() -> bool:
        return await evicted(local, "orders/x") in {
            "NOT_IDLE_ENOUGH",
            "NOT_PRESENT",
            "NOT_MATERIALIZED",
        }

    await local.publish(run_of("orders/barrier", b""))
    await until(settled)
