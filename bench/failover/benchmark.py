"""Benchmarks `failover` and `failover-storage`: how long publishes wait when a part fails.

`failover`: three brokers share the partitions through a registry. In each round one of them is
stopped, killed or paused while a client publishes to one of its partitions, one message after the
other: the longest wait counts, from the fault on. Then one leaves and joins again, and the
partitions that move are counted. Last the registry is killed: plain clients publish to all
partitions without repeating anything, and every refusal counts. The rounds of `failover-storage`
follow.

`failover-storage`: storage nodes share the partitions on a cluster of Valkey servers, three masters
with a replica each. In each round a storage node is killed, or the server that has the partition.
"""

import asyncio
from contextlib import AsyncExitStack
from math import ceil
from typing import Final

from bench.failover.brokers import BROKERS, Brokers
from bench.failover.publishing import PARTITIONS, Publishing
from bench.failover.registry import Registry, without_registry
from bench.failover.storages import MASTERS, STORAGES, Storages
from bench.harness.benchmark import Bench, Result, benchmark, once
from bench.harness.figures import Figure, percentile
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.local.cluster import LocalCluster
from tidemark.registry.protocol import Timers

BUDGETS_MS: Final = {"SIGTERM": 500, "kill -9": 4_000, "SIGSTOP": 6_000}
"""The longest wait for each fault of a broker, as the 99th percentile."""
STORAGE_BUDGET_MS: Final = 7_000
"""For a storage node that is killed."""
STORE_BUDGET_MS: Final = 8_000
"""For a server of the store that is killed."""


@benchmark("failover", "how long publishes wait when a broker, storage or the registry fails")
async def failover(bench: Bench) -> None:
    await _brokers(bench)
    await _storages(bench)


@benchmark("failover-storage", "the rounds of failover with storage nodes on a shared store")
async def failover_storage(bench: Bench) -> None:
    await _storages(bench)


async def _brokers(bench: Bench) -> None:
    rounds = bench.size(full=30, quick=1)
    away_s = bench.size(full=60, quick=2)
    bench.settings |= {
        "brokers": BROKERS,
        "partitions": PARTITIONS,
        "faults_each": rounds,
        "registry_away_s": away_s,
    }
    directory = bench.directory / "brokers"
    async with AsyncExitStack() as opened:
        registry = await opened.enter_async_context(Registry.running(directory / "valkey"))
        cluster = LocalCluster(
            directory / "data",
            log_dir=directory / "logs",
            partitions=PARTITIONS,
            brokers=BROKERS,
            registry_url=registry.url,
        )
        await opened.enter_async_context(cluster)
        publishing = await opened.enter_async_context(Publishing.to(cluster))
        brokers = Brokers(cluster, publishing)
        await asyncio.sleep(Timers().time_to_live_ms / 1000)  # until a missing member is gone
        results = []
        for fault, budget_ms in BUDGETS_MS.items():
            waits_ms = [await brokers.fail(fault) for _ in range(rounds)]
            results.append(_waits(bench, f"broker, {fault}", waits_ms, budget_ms))
        bench.tables.append(results)
        moves = once("a broker leaves and joins", await brokers.leave_and_join())
        bench.tables.append([moves])
        own, left = moves["own"].median, moves["moved_by_leave"].median
        bench.at_most("leave: moves beyond its own partitions", left - own, 0)
        share = ceil(PARTITIONS / BROKERS)
        bench.at_most("join: moves", moves["moved_by_join"].median, share)
        bench.at_most("loads differ by", moves["loads_differ_by"].median, 1)
        await brokers.until_held()
        addresses = [cluster.address(name) for name in cluster.services_of("broker")]
        lost = await without_registry(addresses, registry, away_s)
        bench.tables.append([lost])
        bench.at_most("registry gone: refused publishes", lost["refused"].median, 0)
        await brokers.until_held()


async def _storages(bench: Bench) -> None:
    rounds = bench.size(full=30, quick=1)
    bench.settings |= {
        "storages": STORAGES,
        "store_masters": MASTERS,
        "store_replicas": MASTERS,
        "partitions": PARTITIONS,
        "faults_each": rounds,
    }
    directory = bench.directory / "storages"
    async with AsyncExitStack() as opened:
        registry = await opened.enter_async_context(Registry.running(directory / "valkey"))
        store = opened.enter_context(
            ValkeyCluster.running(directory / "store", MASTERS, replicas=MASTERS)
        )
        cluster = LocalCluster(
            directory / "data",
            log_dir=directory / "logs",
            partitions=PARTITIONS,
            storages=STORAGES,
            registry_url=registry.url,
            environment={
                "storage": {
                    "TIDEMARK_STORAGE_ENGINE": "redis",
                    "TIDEMARK_REDIS_URL": store.url,
                }
            },
        )
        await opened.enter_async_context(cluster)
        publishing = await opened.enter_async_context(Publishing.to(cluster))
        storages = Storages(cluster, store, publishing)
        await asyncio.sleep(Timers().time_to_live_ms / 1000)
        nodes_ms = [await storages.kill_node() for _ in range(rounds)]
        masters_ms = [await storages.kill_master() for _ in range(rounds)]
        bench.tables.append(
            [
                _waits(bench, "storage, kill -9", nodes_ms, STORAGE_BUDGET_MS),
                _waits(bench, "Valkey master, kill -9", masters_ms, STORE_BUDGET_MS),
            ]
        )


def _waits(bench: Bench, name: str, waits_ms: list[float], budget_ms: int) -> Result:
    bench.at_most(f"{name}: p99 ms", percentile(waits_ms, 99), budget_ms)
    return Result(name, {"longest_ms": Figure(tuple(waits_ms))})
