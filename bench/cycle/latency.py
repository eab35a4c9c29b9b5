"""The latency of a publish when one task publishes one message at a time.

Its floors are measured in alternation, call by call: two empty round trips, as frames on open
streams and as unary calls, through two processes like broker and storage, with gRPC as it comes
(ADR 46); and one fdatasync of the same bytes.
"""

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final

import tidemark
from bench.harness.benchmark import Bench, Round
from bench.harness.cluster import running_cluster
from bench.harness.figures import percentile
from bench.rpc.benchmark import Call, servers, stream_call, sync_call, unary_call
from tidemark.rpc import open_channel

TOPIC: Final = "cycle"
PAYLOAD: Final = bytes(100)
OVER_FLOOR_MAX: Final = 1.5


async def measure_latency(bench: Bench) -> None:
    count = bench.size(full=500, quick=20)
    bench.settings |= {"publishes_per_round": count}
    directory = bench.directory / "latency"
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(directory))
        client = await opened.enter_async_context(tidemark.connect(cluster.address("broker")))
        await client.create_topic(TOPIC)
        publisher = await client.publisher(f"{TOPIC}/single")
        _, forwarder = await opened.enter_async_context(servers(directory))
        channel = await opened.enter_async_context(open_channel(forwarder.address))
        file = opened.enter_context((directory / "synced").open("wb", buffering=0))
        calls = {
            "publish": lambda: publisher.publish(PAYLOAD),
            "stream": stream_call(channel),
            "unary": unary_call(channel),
            "sync": sync_call(file, PAYLOAD),
        }
        name = "one publish at a time, beside two round trips and one sync"
        results = await bench.measure({name: _in_turns(calls, count)})
    over_floor = results[name]["over_floor"].median
    bench.at_most("publish / (two stream round trips + sync), p50", over_floor, OVER_FLOOR_MAX)


def _in_turns(calls: Mapping[str, Call], count: int) -> Round:
    async def measure() -> dict[str, float]:
        times_us: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(count):
            for name, call in calls.items():
                begin_ns = time.perf_counter_ns()
                await call()
                times_us[name].append((time.perf_counter_ns() - begin_ns) / 1000)
        p50_us = {name: percentile(times, 50) for name, times in times_us.items()}
        return {
            **{f"{name}_p50_us": value for name, value in p50_us.items()},
            **{f"{name}_p99_us": percentile(times, 99) for name, times in times_us.items()},
            "over_floor": p50_us["publish"] / (p50_us["stream"] + p50_us["sync"]),
        }

    return measure
