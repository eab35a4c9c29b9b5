"""The cost of one sweep: with a thousand and a million messages stored, with little and much due.

Real storage and broker processes with one partition for each size. The sweeper of lifecycle runs
inside this process, so that a sweep is measured exactly. Stored messages have a time to live of
hours, and some are scheduled for later, so that no index is empty. The due messages are past their
time to live and deleted by the sweep, so the number of stored messages does not change.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from bench.harness.benchmark import Bench, Round
from bench.harness.broker import TOPIC, Broker, broker_of
from bench.harness.cluster import running_cluster
from bench.harness.usage import cpu_ns
from lifecycle_svc.holders import Holders
from lifecycle_svc.sweeper import Replica, Sweeper
from tests.support.session import Session
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import TopicSettings
from tidemark.client.transport.codec import receipt_of
from tidemark.clock import SystemClock
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import LifecycleSettings

FEW: Final = 1000
RATIO_MAX: Final = 2
"""A sweep with nothing due over many stored messages, relative to one over a few."""

_PARTITION = 0
_QUEUES = 1000
_RUN_MESSAGES = 10
_SCHEDULED_EVERY = 4  # runs
_LATER_MS = 6 * 60 * 60 * 1000
_CHUNK_RUNS = 2000
_IDLE_SWEEPS = 20
_MESSAGE_BYTES = 100


async def measure_cost(bench: Bench) -> None:
    sizes = [FEW, bench.size(full=100_000, quick=2000), bench.size(full=1_000_000, quick=10_000)]
    dues = [0, 100, bench.size(full=10_000, quick=1000)]
    bench.settings |= {"stored": sizes, "due": dues, "stored_run_messages": _RUN_MESSAGES}
    payload = bench.random.randbytes(_MESSAGE_BYTES)
    async with AsyncExitStack() as opened:
        variants: dict[str, Round] = {}
        for stored in sizes:
            directory = bench.directory / f"stored-{stored}"
            swept = await opened.enter_async_context(_swept(directory, payload))
            await swept.fill(stored)
            variants |= {_name(stored, due): swept.measuring(due) for due in dues}
        results = await bench.measure(variants)
    few, many = results[_name(FEW, 0)], results[_name(sizes[-1], 0)]
    for figure in ("sweep_us", "storage_cpu_us"):
        ratio = many[figure].over(few[figure]).median
        bench.at_most(f"nothing due: {sizes[-1]:,} stored / {FEW:,}, {figure}", ratio, RATIO_MAX)


def _name(stored: int, due: int) -> str:
    return f"{stored:,} stored, {due:,} due"


class Swept:
    """A partition with a sweeper that runs on demand."""

    def __init__(self, broker: Broker, session: Session, sweeper: Sweeper, payload: bytes) -> None:
        self._broker = broker
        self._session = session
        self._sweeper = sweeper
        self._payload = payload

    async def fill(self, messages: int) -> None:
        """Store messages that live for hours, some of them scheduled."""
        batch = MessageBatch(messages=[Message(payload=self._payload)] * _RUN_MESSAGES)
        runs = (
            PublishRun(
                lmq_name=f"{TOPIC}/{number % _QUEUES}",
                batch=batch,
                count=_RUN_MESSAGES,
                ttl_ms=2 * _LATER_MS,
                delay_ms=0 if number % _SCHEDULED_EVERY else _LATER_MS,
            )
            for number in range(messages // _RUN_MESSAGES)
        )
        await self._publish(list(runs))

    def measuring(self, due: int) -> Round:
        async def measure() -> dict[str, float]:
            sweeps = 1 if due else _IDLE_SWEEPS
            await self._make_due(due)
            cpu_before_ns, begin_ns = self._cpu_ns(), time.perf_counter_ns()
            for _ in range(sweeps):
                await self._sweep()
            wall_ns = time.perf_counter_ns() - begin_ns
            cpu = {name: at - cpu_before_ns[name] for name, at in self._cpu_ns().items()}
            assert self._sweeper.last is not None
            assert self._sweeper.last.done == due, self._sweeper.last
            figures = {f"{name}_cpu_us": spent / 1000 / sweeps for name, spent in cpu.items()}
            return {"sweep_us": wall_ns / 1000 / sweeps, **figures}

        return measure

    async def _make_due(self, messages: int) -> None:
        batch = MessageBatch(messages=[Message(payload=self._payload)])
        await self._publish(
            [
                PublishRun(lmq_name=f"{TOPIC}/{number % _QUEUES}", batch=batch, count=1, ttl_ms=1)
                for number in range(messages)
            ]
        )
        await asyncio.sleep(0.01)  # the last of them as well

    async def _publish(self, runs: list[PublishRun]) -> None:
        for at in range(0, len(runs), _CHUNK_RUNS):
            sent = [self._session.submit(run) for run in runs[at : at + _CHUNK_RUNS]]
            for result in await asyncio.gather(*sent):
                receipt_of(result)

    async def _sweep(self) -> None:
        """One sweep, from its first read to its last action."""
        before = self._sweeper.last
        self._sweeper.opened()
        await self._sweeper.run_once()
        assert self._sweeper.last is not before, self._sweeper.last_error

    def _cpu_ns(self) -> dict[str, int]:
        cluster = self._broker.cluster
        return {
            "storage": cpu_ns(cluster.pid("storage")),
            "broker": cpu_ns(cluster.pid("broker")),
            "sweeper": time.process_time_ns(),
        }


@asynccontextmanager
async def _swept(directory: Path, payload: bytes) -> AsyncIterator[Swept]:
    """A cluster whose own lifecycle service has swept it once and was stopped."""
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(directory, partitions=1))
        await cluster.terminate("lifecycle")  # its lease is given up
        broker = await opened.enter_async_context(broker_of(cluster, TopicSettings()))
        session = await opened.enter_async_context(broker.session("sweep-cost"))
        channels = await opened.enter_async_context(ChannelPool())
        clock = SystemClock()
        settings = LifecycleSettings(partitions=1, sweep_interval_ms_min=1)
        holders = Holders(channels, clock, settings.sweep_timeout_ms)
        address = cluster.address("storage")
        holders.set_storage(_PARTITION, address)
        replica = Replica("bench", cluster.address("lifecycle"))
        sweeper = Sweeper(_PARTITION, replica, address, channels, holders, settings, clock)
        yield Swept(broker, session, sweeper, payload)
