"""Links from a broker to its partitions: they break, another broker has them."""

import asyncio
from contextlib import suppress

import pytest

from broker_svc.app import broker
from broker_svc.links.link_state import Assigned
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from tests.service.broker.conftest import Gated, StartGated, break_and_hold
from tests.support.local_broker import (
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    until,
)
from tests.support.session import Session
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.storage.v1.action_pb2 import ACTION_OUTCOME_DONE, DelegateActionsRequest
from tidemark.api.storage.v1.action_pb2_grpc import DelegationServiceStub
from tidemark.api.storage.v1.exchange_pb2 import ExpireDue, Operation
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_EXPIRED_RESERVATIONS,
    ClaimPartitionRequest,
    ScanPartitionRequest,
)
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import (
    Fenced,
    NotOwner,
    QueueNotFound,
    ReservationExpired,
    TidemarkError,
    Unavailable,
)
from tidemark.rpc import open_channel
from tidemark.settings import BrokerSettings


async def restart_storage(local: LocalBroker, session: Session) -> None:
    """Storage is another process, and every link is up again."""
    await local.stop_storage()
    await local.start_storage()

    async def is_up() -> bool:
        results = [
            await session.submit(run_of(local.names_in(partition, 1, "other")[0], b"1"))
            for partition in range(local.partitions)
        ]
        return not any(map(reason_of, results))

    await until(is_up)


async def test_what_clients_hold_stays_theirs_when_storage_restarts(local: LocalBroker) -> None:
    """V4."""
    await local.create_topic("other")
    session = await local.session()
    queues = [*local.names_in(0, 2), *local.names_in(1, 2)]
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*queues)
    for queue in queues:
        await session.publish(queue, [b"1"])
    held = await take(consumer, 4)

    await restart_storage(local, session)

    inflight = [(await local.queue(queue)).inflight for queue in queues]
    settled = [await session.settle(each.delivery_tag, Ack()) for each in held]
    assert inflight == [1] * 4
    assert [each.messages for each in settled] == [1] * 4


async def test_consumers_go_on_by_themselves_when_storage_restarts(local: LocalBroker) -> None:
    """I2."""
    await local.create_topic("other")
    session = await local.session()
    queues = [*local.names_in(0, 2), *local.names_in(1, 2)]
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*queues)

    await restart_storage(local, session)
    for queue in queues:
        await session.publish(queue, [b"after"])

    assert sorted(each.lmq_name for each in await take(consumer, 4)) == sorted(queues)


async def test_every_caller_is_answered_while_storage_is_away(local: LocalBroker) -> None:
    """I2: with a reason and a time to retry, and nothing hangs."""
    session = await local.session()
    await session.publish("orders/x", [b"1"])
    await local.stop_storage()

    async def is_refused() -> bool:
        return reason_of(await session.submit(run_of("orders/x", b"2"))) == "UNAVAILABLE"

    await until(is_refused)
    for call in (
        session.publish("orders/cold", [b"1"]),
        session.open_publisher("orders/other"),
        session.open_consumer(credit=1).subscribe("orders/x"),
        local.pull("orders/x", wait_ms=30_000),
        local.queue("orders/x"),
    ):
        with pytest.raises(TidemarkError) as refused:
            await in_time(call)
        assert refused.value.retry_after_ms is not None
    assert session.ended is None


async def test_a_delivery_that_expired_while_the_link_was_down_is_held_no_longer(
    start_gated: StartGated, clock: ManualClock
) -> None:
    """V6, I4: its tag would keep the queue from going idle for as long as the client stays."""
    local, gates = await start_gated(1, clock=clock, topic={"visibility_timeout_ms": 1000})
    link = gates.links[0]
    session = await local.session()
    consumer = session.open_consumer(credit=2)
    await consumer.subscribe("orders/x")
    await session.publish("orders/x", [b"1"])
    (held,) = await take(consumer, 1)

    await break_and_hold(link, clock)
    await clock.advance_ms(1000)
    await sweep_expired(local)
    await break_and_hold(link, clock)
    link.requests.let_go()

    async def is_dropped() -> bool:
        try:
            await session.settle(held.delivery_tag, Ack())
        except ReservationExpired:
            return True
        except Unavailable:  # the link is not up yet
            return False
        raise AssertionError("what has expired cannot be settled")

    await until(is_dropped)
    (again,) = await take(consumer, 1)
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_what_a_client_held_that_left_while_the_link_was_down_goes_back(
    start_gated: StartGated, clock: ManualClock
) -> None:
    """V6, V8: at once, and its attempt is counted; no consumer waits for the visibility timeout."""
    local, gates = await start_gated(1, clock=clock)
    leaving, staying = await local.session("leaving"), await local.session("staying")
    consumer = leaving.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    await leaving.publish("orders/x", [b"1"])
    await take(consumer, 1)
    waiting = staying.open_consumer(credit=1)
    await waiting.subscribe("orders/x")

    await break_and_hold(gates.links[0], clock)  # what the client holds has been reported
    await leaving.abort()
    for _ in range(20):  # round trips, in which the broker learns that it is gone
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="staying"))
    gates.links[0].requests.let_go()

    (again,) = await take(waiting, 1)
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def sweep_expired(local: LocalBroker) -> None:
    """Do what lifecycle does for a partition without a broker."""
    scan = ScanPartitionRequest(partition=0, kind=SCAN_KIND_EXPIRED_RESERVATIONS)
    facts = (await local.storage.ScanPartition(scan)).facts
    actions = [fact.action for fact in facts]
    request = DelegateActionsRequest(partition=0, actions=actions)
    async with open_channel(local.storage_server.address) as channel:
        owner = DelegationServiceStub(channel)

        async def is_done() -> bool:
            try:
                results = (await owner.DelegateActions(request)).results
            except NotOwner:  # storage has not noticed yet that the exchange is gone
                return False
            return [each.outcome for each in results] == [ACTION_OUTCOME_DONE]

        await until(is_done)


async def test_a_client_that_leaves_in_the_middle_of_a_takeover_blocks_no_other(
    gated: Gated,
) -> None:
    """E10: whether it got the queue or not, the next one does."""
    local, gates = gated
    await local.create_topic("owned", subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
    leaving, staying = await local.session("leaving"), await local.session("staying")
    await leaving.open_publisher("owned/x")  # the queue is loaded: all that is asked is to own it
    gates.links[0].requests.close()

    taking = asyncio.create_task(leaving.open_consumer(credit=1).subscribe("owned/x"))
    await in_time(gates.links[0].requests.until_held())
    await leaving.abort()
    await asyncio.gather(taking, return_exceptions=True)
    for _ in range(20):  # round trips, in which the broker learns that it is gone
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="staying"))
    gates.links[0].requests.let_go()

    consumer = staying.open_consumer(credit=1)
    await in_time(consumer.subscribe("owned/x"))
    await staying.publish("owned/x", [b"1"])
    assert payloads_of(await take(consumer, 1)) == [b"1"]


async def test_what_sessions_hold_is_back_before_a_broker_that_stops_lets_go_of_its_links(
    gated: Gated,
) -> None:
    """S5, V6, V8: no consumer waits for the visibility timeout, and no attempt is counted."""
    local, gates = gated
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    await session.publish("orders/x", [b"1"])
    await take(consumer, 1)

    gates.links[0].requests.close()
    stopping = asyncio.create_task(local.stop_broker())
    await in_time(gates.links[0].requests.until_held())
    await in_time(session.until_ended())
    assert not stopping.done()
    gates.links[0].requests.let_go()
    await in_time(stopping)

    await local.start_broker()
    (delivery,) = await in_time(local.pull("orders/x"))
    assert (delivery.attempt_count, delivery.delivery_count) == (0, 2)


async def test_a_pull_whose_link_breaks_does_not_say_that_there_is_none(gated: Gated) -> None:
    """I2: it is answered, and with the truth."""
    local, gates = gated
    await local.publish(run_of("orders/x", b"1"))
    gates.links[0].requests.close()
    pull = asyncio.create_task(local.pull("orders/x"))
    await in_time(gates.links[0].requests.until_held())

    await gates.links[0].break_now()

    with pytest.raises(Unavailable):
        await in_time(pull)
    gates.links[0].requests.let_go()


async def test_a_queue_that_was_deleted_is_not_created_again_for_consumers_that_have_left(
    gated: Gated,
) -> None:
    """Storage reports it as gone when no consumer asks for it any more."""
    local, gates = gated
    link = gates.links[0]
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    await local.publish(run_of("orders/beside", b"1"))

    link.answers.close()
    request = topic_pb2.DeleteQueueRequest(lmq_name="orders/x")
    deleting = asyncio.ensure_future(local.topics.DeleteQueue(request))
    await in_time(link.answers.until_held())
    link.requests.close()
    link.answers.let_go()
    await in_time(deleting)
    await in_time(link.requests.until_held())  # its consumer asks for it again
    await in_time(consumer.unsubscribe("orders/x"))
    link.requests.let_go()

    for _ in range(2):  # whatever came of it is stored before
        await in_time(local.publish(run_of("orders/beside", b"2")))
    with pytest.raises(QueueNotFound):
        await local.queue("orders/x")


async def test_clients_are_told_which_partitions_another_broker_has_taken(
    local: LocalBroker,
) -> None:
    """S8: also those that come later; what they hold is still theirs, by receipt, over there."""
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    await session.publish("orders/x", [b"1"])
    (held,) = await take(consumer, 1)
    settings = BrokerSettings(
        partitions=local.partitions,
        listen="127.0.0.1:0",
        storage_addresses=(local.storage_server.address,),
        broker_id="another",
    )

    async with broker(settings, SystemClock()) as other:
        await in_time(session.notified.wait_for(lambda: len(session.go_aways) == local.partitions))
        late = await local.session("late")
        with pytest.raises(NotOwner) as refused:
            await session.settle(held.delivery_tag, Ack())
        there = await Session.open(other.address, "ada")
        settled = await there.settle(held.receipt, Ack())
        await there.abort()

    for told in (session, late):
        assert {(each.partition, each.address) for each in told.go_aways} == {
            (0, other.address),
            (1, other.address),
        }
    assert session.ended is None
    assert refused.value.metadata["owner"] == other.address
    assert settled.messages == 1


async def test_a_broker_is_not_fenced_by_a_claim_of_its_own_that_comes_late(
    local: LocalBroker,
) -> None:
    """S2: one that was sent before the link broke, and was taken for lost."""
    await local.stop_broker()
    settings = BrokerSettings(partitions=local.partitions)
    node = StorageNode("storage", local.storage)
    nodes = StorageNodes([node], settings, SystemClock())
    link = PartitionLink(0, settings, 7, nodes, SystemClock(), lambda: None)
    link.follow(Assigned(1, settings.broker_id))
    running = [asyncio.create_task(each.run()) for each in (node.link, link)]
    try:
        await in_time(link.connected.wait())
        late = ClaimPartitionRequest(
            partition=0,
            cluster_id=settings.cluster_id,
            broker_id=settings.broker_id,
            incarnation=7,
            assignment_version=1,
        )
        await local.storage.ClaimPartition(late)

        async def serves() -> bool:
            with suppress(Fenced, Unavailable):
                await link.call(Operation(expire_due=ExpireDue()))
                return True
            return False

        await until(serves)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
