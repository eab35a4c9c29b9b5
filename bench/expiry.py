"""Benchmark `expiry`: how late messages come back while many reservations are open, under traffic.

One client holds many messages for a long time. Meanwhile traffic runs without a pause, and a stream
of messages is reserved and never settled, so that each comes back when its reservation expires. The
cost of open reservations that are not due is measured first, with and without traffic.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from bench.harness.benchmark import Bench, Result, benchmark, once
from bench.harness.broker import TOPIC, Broker, Stopwatch, broker_of, publish_each, take
from bench.harness.cluster import running_cluster
from bench.harness.figures import percentile
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import TopicSettings
from tidemark.client.transport.codec import receipt_of

LATENESS_P99_MS_MAX: Final = 100
VISIBILITY_MS: Final = 500
"""Visibility timeout of the messages that come back."""

_HELD_VISIBILITY_MS = 3_600_000
_HELD_PER_QUEUE = 100
_HELD_CHUNK = 5000
_TRAFFIC_TASKS = 4
_TRAFFIC_BATCH = 100
_EXPIRING_QUEUES = 100
_EXPIRING_EVERY_S = 0.01
_CREDIT = 1_000_000
_MESSAGE_BYTES = 100
_LAST_TIMEOUT_S = 60


@benchmark("expiry", "how late messages come back while 100 000 reservations are open")
async def expiry(bench: Bench) -> None:
    sizes = Sizes(
        held=bench.size(full=100_000, quick=5000),
        traffic_s=bench.size(full=60, quick=3),
        quiet_s=bench.size(full=10, quick=1),
        expiring_at_once=bench.size(full=3, quick=2),
    )
    bench.settings |= {
        "open_reservations": sizes.held,
        "traffic_s": sizes.traffic_s,
        "expiring_per_s": sizes.expiring_at_once / _EXPIRING_EVERY_S,
        "visibility_ms": VISIBILITY_MS,
        "traffic_batch_messages": _TRAFFIC_BATCH,
    }
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(bench.directory))
        broker = await opened.enter_async_context(broker_of(cluster, TopicSettings()))
        load = Load(broker, sizes, bench.random.randbytes(_MESSAGE_BYTES))
        costs = [await load.cost("nothing is open", expiring=False)]
        holder = await opened.enter_async_context(broker.session("holder"))
        await load.hold(holder)
        costs.append(await load.cost(f"{sizes.held:,} open, none due", expiring=False))
        lateness = await load.cost(f"{sizes.held:,} open, some expire", expiring=True)
        bench.tables.append([*costs, lateness])
        assert sum(each.reservations for each in await broker.partitions()) >= sizes.held
    bench.tables.append([load.lateness()])
    worst_ms = percentile(load.seen.late_ms, 99)
    bench.at_most("redelivery: lateness p99, ms", worst_ms, LATENESS_P99_MS_MAX)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the run."""

    held: int
    traffic_s: int
    quiet_s: int
    expiring_at_once: int


Place = tuple[str, int]
"""A queue and an offset."""


@dataclass(slots=True)
class Seen:
    """The outcome of the messages with an unsettled first delivery."""

    published: int = 0
    first_ms: dict[Place, float] = field(default_factory=dict)
    """From the commit of a message to its first delivery."""
    late_ms: list[float] = field(default_factory=list)
    """From the deadline to the second delivery, if it was reserved in the commit that stored it."""
    late_min_ms: list[float] = field(default_factory=list)
    """The same, if it was reserved when it arrived. The true value is between the two."""


class Load:
    """The load on the cluster during the measurement."""

    def __init__(self, broker: Broker, sizes: Sizes, payload: bytes) -> None:
        self.seen = Seen()
        self._broker = broker
        self._sizes = sizes
        self._one = MessageBatch(messages=[Message(payload=payload)])
        self._many = MessageBatch(messages=[Message(payload=payload)] * _TRAFFIC_BATCH)
        self._traffic_messages = 0

    async def hold(self, session: Session) -> None:
        """Reserve many messages, one reservation each, and hold them."""
        consumer = session.open_consumer("holders", visibility_ms=_HELD_VISIBILITY_MS)
        queues = [f"{TOPIC}/held-{number}" for number in range(self._sizes.held // _HELD_PER_QUEUE)]
        names = queues * _HELD_PER_QUEUE
        for start in range(0, len(names), _HELD_CHUNK):
            await publish_each(session, names[start : start + _HELD_CHUNK], self._one)
        await consumer.subscribe(*queues)
        held = await take(consumer, self._sizes.held)
        assert len(held) == self._sizes.held, "one reservation for each message"

    async def cost(self, name: str, *, expiring: bool) -> Result:
        """CPU time of the services: without any load, and under traffic."""
        figures = {} if expiring else await self._quiet()
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._traffic())
            if expiring:
                await opened.enter_async_context(self._expiring())
            cpu_ns, messages, stopwatch = self._broker.cpu_ns(), self._traffic_messages, Stopwatch()
            await asyncio.sleep(self._sizes.traffic_s if expiring else self._sizes.quiet_s)
            elapsed_s = stopwatch.elapsed_s()
            cpu_ns = self._broker.cpu_ns() - cpu_ns
            messages = self._traffic_messages - messages
        figures |= {
            "traffic_messages_per_s": messages / elapsed_s,
            "traffic_cpu_us_per_message": cpu_ns / 1000 / max(1, messages),
        }
        return once(name, figures)

    def lateness(self) -> Result:
        seen = self.seen
        assert len(seen.late_ms) == seen.published, "every message comes back"
        first_ms = list(seen.first_ms.values())
        figures = {
            "messages": float(seen.published),
            "first_p50_ms": percentile(first_ms, 50),
            "first_p99_ms": percentile(first_ms, 99),
            "late_at_least_p50_ms": percentile(seen.late_min_ms, 50),
            "late_at_least_p99_ms": percentile(seen.late_min_ms, 99),
            "late_at_most_p50_ms": percentile(seen.late_ms, 50),
            "late_at_most_p99_ms": percentile(seen.late_ms, 99),
            "earliest_ms": min(seen.late_ms),
        }
        return once("redelivery", figures)

    async def _quiet(self) -> dict[str, float]:
        commits, cpu_ns, stopwatch = await self._commits(), self._broker.cpu_ns(), Stopwatch()
        await asyncio.sleep(self._sizes.quiet_s)
        cpu_ns, elapsed_s = self._broker.cpu_ns() - cpu_ns, stopwatch.elapsed_s()
        return {
            "quiet_cpu_ms_per_s": cpu_ns / 1e6 / elapsed_s,
            "quiet_commits_per_s": (await self._commits() - commits) / elapsed_s,
        }

    async def _commits(self) -> int:
        return sum(each.commits for each in await self._broker.partitions())

    # --- traffic -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _traffic(self) -> AsyncIterator[None]:
        """Publish, deliver and acknowledge without a pause."""
        async with self._broker.session("traffic") as session:
            names = [f"{TOPIC}/traffic-{number}" for number in range(_TRAFFIC_TASKS)]
            consumer = session.open_consumer("traffic", credit=_CREDIT)
            await consumer.subscribe(*names)
            works = [self._acknowledge(session, consumer)]
            works += [self._publish(session, name) for name in names]
            async with _running(*works):
                yield

    async def _publish(self, session: Session, name: str) -> None:
        while True:
            await session.publish(name, self._many)

    async def _acknowledge(self, session: Session, consumer: Consumer) -> None:
        async for deliveries in consumer:
            for delivery in deliveries:
                session.settle_nowait(delivery.delivery_tag, Ack())
                consumer.give_credit(delivery.count)
                self._traffic_messages += delivery.count

    # --- expiry --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _expiring(self) -> AsyncIterator[None]:
        """Publish messages that are reserved but not settled; return once all came back."""
        async with self._broker.session("expiring") as session:
            names = [f"{TOPIC}/expiring-{number}" for number in range(_EXPIRING_QUEUES)]
            consumer = session.open_consumer("late", credit=_CREDIT, visibility_ms=VISIBILITY_MS)
            await consumer.subscribe(*names)
            async with _running(self._take_twice(session, consumer)):
                async with _running(self._publish_some(session, names)):
                    yield
                async with asyncio.timeout(_LAST_TIMEOUT_S):
                    while len(self.seen.late_ms) < self.seen.published:  # noqa: ASYNC110 - counted
                        await asyncio.sleep(_EXPIRING_EVERY_S)

    async def _publish_some(self, session: Session, names: list[str]) -> None:
        while True:
            for _ in range(self._sizes.expiring_at_once):
                name = names[self.seen.published % len(names)]
                self.seen.published += 1
                run = PublishRun(lmq_name=name, batch=self._one, count=1)
                session.submit(run).add_done_callback(lambda each: receipt_of(each.result()))
            await asyncio.sleep(_EXPIRING_EVERY_S)

    async def _take_twice(self, session: Session, consumer: Consumer) -> None:
        async for deliveries in consumer:
            for delivery in deliveries:
                self._took(session, delivery)

    def _took(self, session: Session, delivery: Delivery) -> None:
        waited_ms = time.time() * 1000 - delivery.publish_time_ms
        place = (delivery.lmq_name, delivery.first_offset)
        if delivery.attempt_count == 0:
            self.seen.first_ms[place] = waited_ms
            return
        if delivery.attempt_count == 1:  # a late settlement is not measured
            late_ms = waited_ms - VISIBILITY_MS
            self.seen.late_ms.append(late_ms)
            self.seen.late_min_ms.append(late_ms - self.seen.first_ms[place])
        session.settle_nowait(delivery.delivery_tag, Ack())


@asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run work in the background; if it fails, so does this."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
