"""Storage nodes as processes that share a Valkey through a registry: killed, stopped and paused."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import tidemark
from tests.cluster.conftest import StartCluster
from tests.support.local_broker import until
from tests.support.traffic import Traffic
from tests.support.valkey import valkey
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.local.cluster import LocalCluster
from tidemark.topics import Subscription, TopicSettings

PARTITIONS = 4
VISIBILITY_MS = 4_000


@pytest.fixture
async def cluster(
    start_cluster: StartCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[LocalCluster]:
    if not request.config.getoption("redis"):
        pytest.skip("runs with --redis")
    with valkey(tmp_path / "valkey", durable=True) as server:
        url = server.connection_url
        engine = {"TIDEMARK_STORAGE_ENGINE": "redis", "TIDEMARK_REDIS_URL": url}
        started: LocalCluster = await start_cluster(
            brokers=2,
            storages=3,
            partitions=PARTITIONS,
            registry_url=url,
            environment={"storage": engine},
        )
        yield started


async def until_open_at(client: tidemark.Client, cluster: LocalCluster, *nodes: str) -> None:
    """Until these nodes have all partitions open and serving, and none of them has none."""
    expected = {cluster.address(each) for each in nodes}

    async def is_so() -> bool:
        try:
            held = await client.admin.list_partitions()
        except TidemarkError:
            return False
        serving = {each.storage_address for each in held if each.state == "SERVING"}
        return serving == expected and all(each.link_state != "DOWN" for each in held)

    await until(is_so)


async def test_nothing_is_lost_while_storage_nodes_are_killed_stopped_and_paused(
    cluster: LocalCluster,
) -> None:
    """S9, S5, S11, E10: no publish fails, and what was acknowledged does not come back."""
    clock = SystemClock()
    async with tidemark.connect(cluster.address("broker")) as client:
        shared = TopicSettings(visibility_timeout_ms=VISIBILITY_MS, partitions=PARTITIONS)
        exclusive = replace(shared, subscription=Subscription.EXCLUSIVE, partitions=1)
        await client.admin.create_topic("orders", shared)
        await client.admin.create_topic("own", exclusive)
        await until_open_at(client, cluster, "storage", "storage-2", "storage-3")
        traffic = Traffic(client, PARTITIONS)
        async with traffic.running():
            await traffic.rounds(3)
            await cluster.kill("storage-3")
            began_ms = clock.monotonic_ms()
            await traffic.rounds(2)  # the second one began after the kill
            print(f"kill -9: publishes again after {clock.monotonic_ms() - began_ms} ms")
            await until_open_at(client, cluster, "storage", "storage-2")
            await traffic.rounds(3)
            await cluster.restart("storage-3")
            await until_open_at(client, cluster, "storage", "storage-2", "storage-3")
            os.kill(cluster.pid("storage-2"), signal.SIGSTOP)
            await until_open_at(client, cluster, "storage", "storage-3")
            await traffic.rounds(3)
            os.kill(cluster.pid("storage-2"), signal.SIGCONT)
            await until_open_at(client, cluster, "storage", "storage-2", "storage-3")
            await traffic.rounds(3)
            code = await cluster.terminate("storage")
            await until_open_at(client, cluster, "storage-2", "storage-3")
            await traffic.rounds(3)

    assert code == 0
    assert traffic.published.keys() == traffic.acked.keys()
    assert set(traffic.acked.values()) == {1}
