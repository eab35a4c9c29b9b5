"""When a broker is ready, and how it shows the links that it has."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from broker_svc.app import broker
from tests.service.broker.conftest import Gated, StartBroker
from tests.support.faulty_engine import Fault
from tests.support.local_broker import LocalBroker, reason_of, run_of, until, with_faulty_disks
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import SystemClock
from tidemark.rpc.health import READINESS
from tidemark.settings import BrokerSettings

UP, DOWN = topic_pb2.LINK_STATE_UP, topic_pb2.LINK_STATE_DOWN
FAULTY, MOVED = topic_pb2.LINK_STATE_FAULTY, topic_pb2.LINK_STATE_MOVED


async def partitions(local: LocalBroker) -> Sequence[topic_pb2.PartitionInfo]:
    return (await local.topics.ListPartitions(topic_pb2.ListPartitionsRequest())).partitions


async def until_links(local: LocalBroker, *states: topic_pb2.LinkState.ValueType) -> None:
    async def are_so() -> bool:
        return [each.link_state for each in await partitions(local)] == list(states)

    await until(are_so)


async def until_ready(channel: grpc.aio.Channel, ready: bool) -> None:
    health: Any = HealthStub(channel)  # its published types lack Check

    async def is_so() -> bool:
        answer = await health.Check(HealthCheckRequest(service=READINESS))
        return bool(answer.status == HealthCheckResponse.SERVING) is ready

    await until(is_so)


async def test_a_broker_is_ready_while_a_partition_is_known_to_be_faulty(
    start: StartBroker,
) -> None:
    """S5, L4: it was never ready, and the other partitions were out of reach."""
    local = await start(partitions=2)
    (disk,) = await with_faulty_disks(local)
    (sound,), (broken,) = local.names_in(0, 1), local.names_in(1, 1)
    await local.publish(run_of(sound, b"1"), run_of(broken, b"1"))
    disk.next_openings += [OSError("no such device")] * 10_000
    disk.next_commit = Fault.BEFORE_WRITING
    await local.publish(run_of(broken, b"2"))
    await local.stop_broker()

    await local.start_broker()  # returns once it is ready

    (result,) = await local.publish(run_of(sound, b"3"))
    assert reason_of(result) == ""
    await until_links(local, UP, FAULTY)
    assert "PARTITION_FAULTY" in (await partitions(local))[1].link_detail
    disk.next_openings.clear()
    await until_links(local, UP, UP)
    await until_ready(await local.channel(), True)


async def test_a_broker_without_storage_is_not_ready_until_its_links_are_up_again(
    local: LocalBroker,
) -> None:
    """S5: it stayed ready for good once it had been."""
    channel = await local.channel()
    await until_ready(channel, True)

    await local.stop_storage()
    await until_ready(channel, False)
    states = [each.link_state for each in await partitions(local)]
    await local.start_storage()

    await until_ready(channel, True)
    assert set(states) == {DOWN}
    await until_links(local, *[UP] * local.partitions)


async def test_a_link_that_is_down_is_shown_beside_a_partition_that_serves(gated: Gated) -> None:
    """S8: storage reports that the partition serves, and the broker cannot use it."""
    local, gates = gated
    await until_links(local, *[UP] * local.partitions)
    gates.links[0].requests.close()
    await gates.links[0].break_now()

    await until_links(local, DOWN, *[UP] * (local.partitions - 1))
    first = (await partitions(local))[0]
    gates.links[0].requests.let_go()

    assert first.state == topic_pb2.PARTITION_STATE_SERVING
    assert first.link_detail != ""
    await until_links(local, *[UP] * local.partitions)


async def test_a_partition_that_another_broker_holds_is_shown_as_moved(local: LocalBroker) -> None:
    """S8: clients follow to the holder, so the broker stays ready."""
    settings = BrokerSettings(
        partitions=local.partitions,
        listen="127.0.0.1:0",
        storage_addresses=(local.storage_server.address,),
        broker_id="another",
    )

    async with broker(settings, SystemClock()):
        await until_links(local, *[MOVED] * local.partitions)
        await until_ready(await local.channel(), True)
