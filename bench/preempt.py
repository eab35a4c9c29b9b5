"""Benchmark `preempt`: takeovers of exclusive queues.

Takeovers per second, a thousand at once and one at a time; how soon a new owner gets its first
message while the old owner is stalled and holds it; and the memory of a marker.
"""

import asyncio
import gc
import time
import tracemalloc
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from typing import Final

from bench.harness.benchmark import Bench, Result, benchmark, once
from bench.harness.broker import TOPIC, Broker, Stopwatch, ack_all, broker_of, publish_each, take
from bench.harness.cluster import running_cluster
from bench.harness.figures import percentile
from broker_svc.exclusive.markers import EvictionMarkers
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE, TopicSettings

STALLED_VISIBILITY_MS: Final = 600_000
"""Visibility timeout of the stalled owner: nothing expires during the run."""

_GROUP = "group"
_MESSAGE_BYTES = 100


@benchmark("preempt", "takeovers of exclusive queues, and how soon the new owner is served")
async def preempt(bench: Bench) -> None:
    sizes = Sizes(
        at_once=bench.size(full=1000, quick=100),
        singly=bench.size(full=500, quick=50),
        stalled=bench.size(full=500, quick=50),
    )
    markers = bench.size(full=100_000, quick=10_000)
    bench.settings |= {
        "queues_at_once": sizes.at_once,
        "queues_one_at_a_time": sizes.singly,
        "stalled_queues": sizes.stalled,
        "markers": markers,
    }
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(bench.directory))
        settings = TopicSettings(
            subscription=SUBSCRIPTION_KIND_EXCLUSIVE, visibility_timeout_ms=STALLED_VISIBILITY_MS
        )
        broker = await opened.enter_async_context(broker_of(cluster, settings))
        rivals = []
        for name in ("ada", "bob"):
            session = await opened.enter_async_context(broker.session(name))
            rivals.append(session.open_consumer(_GROUP))
        batch = MessageBatch(messages=[Message(payload=bench.random.randbytes(_MESSAGE_BYTES))])
        takeovers = Takeovers(broker, rivals, sizes, batch)
        await bench.measure(
            {
                f"take {sizes.at_once:,} queues at once": takeovers.at_once,
                "take one queue at a time": takeovers.singly,
            }
        )
        await bench.measure({"first delivery, old owner stalled": takeovers.from_stalled})
    bench.tables.append(
        [
            _marker_memory("a client with one marker", markers, clients=markers),
            _marker_memory("a marker of a client with many", markers, clients=1),
        ]
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many queues one round takes over."""

    at_once: int
    singly: int
    stalled: int


class Takeovers:
    """Two clients that take queues from each other, and pairs with a stalled owner."""

    def __init__(
        self, broker: Broker, rivals: list[Consumer], sizes: Sizes, batch: MessageBatch
    ) -> None:
        self._broker = broker
        self._rivals = rivals
        self._sizes = sizes
        self._batch = batch
        self._rounds = count()

    async def at_once(self) -> dict[str, float]:
        """In one sync."""
        names = [f"{TOPIC}/at-once-{number}" for number in range(self._sizes.at_once)]
        old, new = self._rivals
        await old.subscribe(*names)
        cpu_ns, stopwatch = self._broker.cpu_ns(), Stopwatch()
        await new.subscribe(*names)
        elapsed_s, cpu_ns = stopwatch.elapsed_s(), self._broker.cpu_ns() - cpu_ns
        return _rate(len(names), elapsed_s, cpu_ns)

    async def singly(self) -> dict[str, float]:
        """One sync after the other."""
        names = [f"{TOPIC}/singly-{number}" for number in range(self._sizes.singly)]
        old, new = self._rivals
        await old.subscribe(*names)
        cpu_ns, stopwatch = self._broker.cpu_ns(), Stopwatch()
        for name in names:
            await new.subscribe(name)
        elapsed_s, cpu_ns = stopwatch.elapsed_s(), self._broker.cpu_ns() - cpu_ns
        return _rate(len(names), elapsed_s, cpu_ns)

    async def from_stalled(self) -> dict[str, float]:
        """The old owner holds the only message of each queue, settles nothing and ignores notices.

        Measured from the subscription request to the arrival of the message.
        """
        number = next(self._rounds)
        names = [f"{TOPIC}/stalled-{number}-{each}" for each in range(self._sizes.stalled)]
        async with (
            self._broker.session(f"stalled-{number}") as stalled,
            self._broker.session(f"taker-{number}") as taker,
        ):
            old = stalled.open_consumer(_GROUP)
            await old.subscribe(*names)
            await publish_each(taker, names, self._batch)
            held = {each.lmq_name: each.epoch for each in await take(old, len(names))}
            new = taker.open_consumer(_GROUP)
            times_ns = [await self._first(taker, new, name, held[name]) for name in names]
        return {f"p{percent}_ms": percentile(times_ns, percent) / 1e6 for percent in (50, 99)}

    async def _first(self, session: Session, consumer: Consumer, name: str, epoch: int) -> int:
        begin_ns = time.perf_counter_ns()
        subscribed = asyncio.create_task(consumer.subscribe(name))
        (delivery,) = await take(consumer, 1)
        elapsed_ns = time.perf_counter_ns() - begin_ns
        assert delivery.lmq_name == name
        assert delivery.epoch > epoch, "a takeover raises the epoch"
        await subscribed
        await ack_all(session, [delivery])
        return elapsed_ns


def _rate(queues: int, elapsed_s: float, cpu_ns: int) -> dict[str, float]:
    return {"takeovers_per_s": queues / elapsed_s, "cpu_us_per_takeover": cpu_ns / 1000 / queues}


def _marker_memory(name: str, markers: int, *, clients: int) -> Result:
    """The size of the broker's record for each, ids included, and the memory left afterwards."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        held = EvictionMarkers()
        for number in range(markers):
            client_id = f"client-{number % clients:07}"
            held.add(client_id, _GROUP, f"{TOPIC}/queue-{number:07}", epoch=1000 + number)
        assert len(held) == markers
        full, _ = tracemalloc.get_traced_memory()
        for number in range(clients):
            held.remove_client(f"client-{number:07}")
        assert len(held) == 0
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return once(
        name,
        {
            "bytes_per_marker": (full - before) / markers,
            "left_bytes_per_marker": (after - before) / markers,
        },
    )
