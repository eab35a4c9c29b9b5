"""Brokers as processes that share the partitions through a registry, killed, stopped and paused."""

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
from tidemark.errors import TidemarkError
from tidemark.local.cluster import LocalCluster
from tidemark.topics import Subscription, TopicSettings

PARTITIONS = 4
VISIBILITY_MS = 4_000


@pytest.fixture
async def cluster(start_cluster: StartCluster, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    with valkey(tmp_path / "valkey") as registry:
        started: LocalCluster = await start_cluster(
            brokers=3, storages=1, partitions=PARTITIONS, registry_url=registry.connection_url
        )
        yield started


async def until_held_by(client: tidemark.Client, *brokers: str) -> None:
    """Until these brokers hold all partitions, and none of them holds none."""

    async def is_so() -> bool:
        try:
            held = await client.admin.list_partitions()
        except TidemarkError:
            return False
        return {each.broker_id for each in held} == set(brokers)

    await until(is_so)


async def test_nothing_is_lost_while_brokers_are_killed_stopped_and_paused(
    cluster: LocalCluster,
) -> None:
    """C5, S5, S8, S11, E10: no publish fails, and what was acknowledged does not come back."""
    async with tidemark.connect(cluster.address("broker")) as client:
        # What was on the way through a broker that is killed comes again after this time.
        shared = TopicSettings(visibility_timeout_ms=VISIBILITY_MS, partitions=PARTITIONS)
        exclusive = replace(shared, subscription=Subscription.EXCLUSIVE, partitions=1)
        await client.admin.create_topic("orders", shared)
        await client.admin.create_topic("own", exclusive)
        await until_held_by(client, "broker-0", "broker-1", "broker-2")
        traffic = Traffic(client, PARTITIONS)
        async with traffic.running():
            await traffic.rounds(3)
            await cluster.kill("broker-3")
            await until_held_by(client, "broker-0", "broker-1")
            await traffic.rounds(3)
            os.kill(cluster.pid("broker-2"), signal.SIGSTOP)
            await until_held_by(client, "broker-0")
            await traffic.rounds(3)
            os.kill(cluster.pid("broker-2"), signal.SIGCONT)
            await cluster.wait_healthy(["broker-2"])
            await traffic.rounds(3)
            code = await cluster.terminate("broker")  # the one that the client was given
            await until_held_by(client, "broker-1")
            await traffic.rounds(3)

    assert code == 0
    assert traffic.published.keys() == traffic.acked.keys()
    assert set(traffic.acked.values()) == {1}
