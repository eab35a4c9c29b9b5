"""Benchmark `members`: the CPU of three brokers and three storage nodes, beside one of each.

Both clusters get the same load at the same rate: calls of 100 messages, to one queue after another,
delivered and acknowledged. They take turns, so that the machine affects both alike.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

import tidemark
from bench.harness.benchmark import Bench, benchmark
from bench.harness.usage import cpu_ns
from tidemark.client.consume.subscription import Subscription
from tidemark.client.publish.publisher import Publisher
from tidemark.local.cluster import LocalCluster, kind_of

MEMBERS: Final = (1, 3)
"""Brokers, and as many storage nodes."""

COST_MAX: Final = 1.25
CALL_MESSAGES: Final = 100

_PARTITIONS = 12
_QUEUES = 48
_CALLS_PER_S = 25
_CREDIT = 200_000
_MESSAGE_BYTES = 100
_TOPIC = "members"


class Side:
    """One cluster, and a client that publishes to it and consumes from it."""

    def __init__(
        self,
        cluster: LocalCluster,
        publishers: list[Publisher],
        deliveries: Subscription,
        payload: bytes,
    ) -> None:
        self._cluster = cluster
        self._publishers = cycle(publishers)
        self._deliveries = deliveries
        self._call = [payload] * CALL_MESSAGES

    async def measure(self, calls: int) -> Mapping[str, float]:
        before, began_s = self._cpu_ns(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take(calls * CALL_MESSAGES))
            for number in range(calls):
                due_s = began_s + number / _CALLS_PER_S
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(next(self._publishers).publish_many(self._call))
        elapsed_s = time.perf_counter() - began_s
        messages = calls * CALL_MESSAGES
        used = {kind: after - before[kind] for kind, after in self._cpu_ns().items()}
        return {
            "messages_per_s": messages / elapsed_s,
            "cpu_us": sum(used.values()) / 1000 / messages,
            **{f"{kind}_cpu_us": each / 1000 / messages for kind, each in used.items()},
        }

    async def _take(self, messages: int) -> None:
        async for batch in self._deliveries.batches():
            await batch.ack()
            messages -= batch.count
            if messages <= 0:
                break
        await self._deliveries.flush()

    def _cpu_ns(self) -> dict[str, int]:
        """CPU time of the services so far, by kind."""
        used: dict[str, int] = {}
        for name in self._cluster.services:
            kind = kind_of(name)
            used[kind] = used.get(kind, 0) + cpu_ns(self._cluster.pid(name))
        return used


@benchmark("members", "CPU of 3 brokers and 3 storage nodes, beside one of each")
async def members(bench: Bench) -> None:
    calls = bench.size(full=20, quick=2) * _CALLS_PER_S
    bench.settings |= {
        "partitions": _PARTITIONS,
        "queues": _QUEUES,
        "messages_per_call": CALL_MESSAGES,
        "offered_messages_per_s": _CALLS_PER_S * CALL_MESSAGES,
        "calls_per_round": calls,
    }
    payload = bench.random.randbytes(_MESSAGE_BYTES)
    async with AsyncExitStack() as opened:
        sides = {
            _name(count): await opened.enter_async_context(
                _side(bench.directory / str(count), count, payload)
            )
            for count in MEMBERS
        }
        results = await bench.measure(
            {name: partial(side.measure, calls) for name, side in sides.items()}
        )
    one, several = (results[_name(count)]["cpu_us"] for count in MEMBERS)
    name = f"CPU per message, {_name(MEMBERS[1])} / {_name(MEMBERS[0])}"
    bench.at_most(name, several.over(one).median, COST_MAX)


def _name(count: int) -> str:
    return f"{count} + {count}"


@asynccontextmanager
async def _side(directory: Path, count: int, payload: bytes) -> AsyncIterator[Side]:
    cluster = LocalCluster(
        directory / "data",
        log_dir=directory / "logs",
        partitions=_PARTITIONS,
        brokers=count,
        storages=count,
    )
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(cluster)
        client = await opened.enter_async_context(tidemark.connect(cluster.address("broker")))
        await client.create_topic(_TOPIC)
        names = [f"{_TOPIC}/{number}" for number in range(_QUEUES)]
        publishers = [await client.publisher(name) for name in names]
        subscribing = client.subscribe(names, group="bench", credit=_CREDIT)
        yield Side(cluster, publishers, await opened.enter_async_context(subscribing), payload)
