"""How late scheduled messages arrive, with 100 000 of them due over a minute.

All messages are published before the first is due; then a consumer of all queues receives them. The
due time of a message is its publish time by storage's clock, which the delivery carries, plus its
delay. No message may be early, lost or duplicated.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from bench.harness.benchmark import Bench, once
from bench.harness.broker import TOPIC, Broker, broker_of
from bench.harness.cluster import running_cluster
from bench.harness.figures import percentile
from bench.harness.usage import cpu_ns
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1.message_pb2 import Ack, Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import TopicSettings
from tidemark.client.transport.codec import receipt_of
from tidemark.local.cluster import SERVICES

LATENESS_P99_MS_MAX: Final = 200

_QUEUES = 1000
_CHUNK_RUNS = 2000
_LAST_TIMEOUT_S = 120
_HOURS_MS = 12 * 60 * 60 * 1000


async def measure_lateness(bench: Bench) -> None:
    count = bench.size(full=100_000, quick=2000)
    plan = Plan(
        count=count,
        lead_s=bench.size(full=30, quick=2),
        over_s=bench.size(full=60, quick=3),
        queues=[f"{TOPIC}/{number}" for number in range(_QUEUES)],
    )
    bench.settings |= {"scheduled": count, "due_over_s": plan.over_s, "scheduled_queues": _QUEUES}
    directory = bench.directory / "lateness"
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(directory))
        broker = await opened.enter_async_context(broker_of(cluster, TopicSettings()))
        seen = await schedule_and_take(broker, plan)
    figures = {"publish_s": seen.publish_s, **seen.figures(), **seen.cpu_us}
    bench.tables.append([once(f"{count:,} scheduled over {plan.over_s} s", figures)])
    late_ms = figures["late_p99_ms"]
    bench.at_most("scheduled: lateness p99, ms", late_ms, LATENESS_P99_MS_MAX)
    bench.at_least("scheduled: earliest arrival after its time, ms", min(seen.late_ms), 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The number, times and queues of the scheduled messages."""

    count: int
    lead_s: float
    """Time until the first message is due, enough to publish all of them."""
    over_s: float
    queues: Sequence[str]


@dataclass(slots=True)
class Seen:
    """The messages that arrived."""

    publish_s: float = 0
    cpu_us: dict[str, float] = field(default_factory=dict)
    """CPU time per message that arrived after all were published, by process."""
    late_ms: list[float] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)

    def figures(self) -> dict[str, float]:
        return {
            "earliest_ms": min(self.late_ms),
            "late_p50_ms": percentile(self.late_ms, 50),
            "late_p99_ms": percentile(self.late_ms, 99),
            "latest_ms": max(self.late_ms),
        }


async def schedule_and_take(broker: Broker, plan: Plan) -> Seen:
    """Publish and receive all messages. Raises if one is lost or duplicated."""
    seen = Seen()
    async with broker.session("schedules") as publisher, broker.session("takes") as session:
        consumer = session.open_consumer("late", credit=plan.count, visibility_ms=_HOURS_MS)
        await consumer.subscribe(*plan.queues)
        taking = asyncio.create_task(_take(session, consumer, seen, plan.count))
        try:
            seen.publish_s = await _publish(publisher, plan)
            before_ns, left = _cpu_ns(broker), plan.count - len(seen.numbers)
            async with asyncio.timeout(plan.lead_s + plan.over_s + _LAST_TIMEOUT_S):
                await taking
            seen.cpu_us = {
                f"{name}_cpu_us": (at_ns - before_ns[name]) / 1000 / max(1, left)
                for name, at_ns in _cpu_ns(broker).items()
            }
        finally:
            taking.cancel()
    assert not session.failed_settlements, session.failed_settlements[0]
    return seen


def _cpu_ns(broker: Broker) -> dict[str, int]:
    spent: dict[str, int] = {name: cpu_ns(broker.cluster.pid(name)) for name in SERVICES}
    return {**spent, "client": time.process_time_ns()}


async def _publish(session: Session, plan: Plan) -> float:
    """Due times spread evenly, in shuffled order."""
    begin = time.time()
    step = _coprime_step(plan.count)
    for at in range(0, plan.count, _CHUNK_RUNS):
        runs = []
        for number in range(at, min(at + _CHUNK_RUNS, plan.count)):
            place = number * step % plan.count
            due = begin + plan.lead_s + plan.over_s * place / plan.count
            delay_ms = max(1, round((due - time.time()) * 1000))
            payload = b"%d %d" % (number, delay_ms)
            runs.append(
                PublishRun(
                    lmq_name=plan.queues[number % len(plan.queues)],
                    batch=MessageBatch(messages=[Message(payload=payload)]),
                    count=1,
                    delay_ms=delay_ms,
                )
            )
        for result in await asyncio.gather(*map(session.submit, runs)):
            receipt_of(result)
    return time.time() - begin


def _coprime_step(count: int) -> int:
    """A step size that visits every index once, modulo the count."""
    return 7919 if count % 7919 else 1  # a prime


async def _take(session: Session, consumer: Consumer, seen: Seen, count: int) -> None:
    while len(seen.numbers) < count:
        for delivery in await consumer.deliveries():
            now_ms = time.time() * 1000
            for message in delivery.batch.messages:
                number, delay_ms = map(int, message.payload.split())
                assert number not in seen.numbers, f"{number} came twice"
                seen.numbers.add(number)
                seen.late_ms.append(now_ms - delivery.publish_time_ms - delay_ms)
            session.settle_nowait(delivery.delivery_tag, Ack())
