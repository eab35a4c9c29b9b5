"""Whether a partition with failing or slow reads delays the others (L1).

In one cluster, messages are scheduled in all partitions but one, first while that one is healthy,
then while its reads fail, then while they stall for ten seconds.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Final

from bench.harness.benchmark import Bench, Round
from bench.harness.broker import TOPIC, Broker, broker_of
from bench.harness.cluster import running_cluster
from bench.sweep.lateness import Plan, schedule_and_take
from bench.sweep.stalling_storage import FAULT_FILE, PARTITION, STALL_S, Fault
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import GetQueueRequest, TopicSettings
from tidemark.api.lifecycle.v1.lifecycle_pb2 import (
    SWEEPER_STATE_BACKING_OFF,
    SWEEPER_STATE_READING,
    ListSweepersRequest,
    SweeperState,
)
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.client.transport.codec import receipt_of
from tidemark.names import partition_of
from tidemark.rpc import open_channel

CHANGE_MAX: Final = 1.1
"""Lateness of the others with a faulty partition, relative to that with a healthy one."""

_PARTITIONS = 4
_HERE: Final = next(
    name
    for name in (f"{TOPIC}/here-{number}" for number in count())
    if partition_of(name, _PARTITIONS) == PARTITION
)
"""A queue of the partition that is broken."""

_DUE_HERE_EVERY_S = 0.1
_QUEUES = 60
_PER_S = 100
_LEAD_S = 1.0
_HEAL_TIMEOUT_S = 120
_POLL_S = 0.05

_NAMES: Final = {
    Fault.NONE: "all partitions well",
    Fault.FAIL: "reads of one partition fail",
    Fault.STALL: f"reads of one partition take {STALL_S} s",
}


async def measure_isolation(bench: Bench) -> None:
    over_s = bench.size(full=STALL_S - 2, quick=1)  # longer than a stall
    bench.settings |= {"others_due_per_s": _PER_S, "faulty_for_s": _LEAD_S + over_s}
    candidates = (f"{TOPIC}/{number}" for number in range(4 * _QUEUES))
    queues = [name for name in candidates if partition_of(name, _PARTITIONS) != PARTITION]
    plan = Plan(count=_PER_S * over_s, lead_s=_LEAD_S, over_s=over_s, queues=queues[:_QUEUES])
    directory = bench.directory / "isolation"
    directory.mkdir()
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(
            running_cluster(
                directory,
                partitions=_PARTITIONS,
                variables={FAULT_FILE: str(directory / "fault")},
                storage_module="bench.sweep.stalling_storage",
            )
        )
        broker = await opened.enter_async_context(broker_of(cluster, TopicSettings()))
        faulty = Faulty(broker, plan, directory / "fault")
        results = await bench.measure(
            {name: faulty.measuring(fault) for fault, name in _NAMES.items()}
        )
    well = results[_NAMES[Fault.NONE]]
    for fault in (Fault.FAIL, Fault.STALL):
        name = _NAMES[fault]
        ratio = results[name]["late_p50_ms"].over(well["late_p50_ms"]).median
        bench.at_most(f"{name} / {_NAMES[Fault.NONE]}: lateness p50", ratio, CHANGE_MAX)


class Faulty:
    """A cluster with a partition that can be made to fail and always has work due."""

    def __init__(self, broker: Broker, plan: Plan, file: Path) -> None:
        self._broker = broker
        self._plan = plan
        self._file = file
        self._due = 0

    def measuring(self, fault: Fault) -> Round:
        async def measure() -> dict[str, float]:
            await self._schedule_here()
            self._break(fault)
            try:
                seen = await schedule_and_take(self._broker, self._plan)
                state = await self._sweeper_here()
            finally:
                self._break(Fault.NONE)
            hindered = state in (SWEEPER_STATE_READING, SWEEPER_STATE_BACKING_OFF)
            assert hindered or fault is Fault.NONE, "the partition was swept despite its fault"
            async with asyncio.timeout(_HEAL_TIMEOUT_S):
                while await self._promoted() < self._due:  # noqa: ASYNC110 - another process heals
                    await asyncio.sleep(_POLL_S)
            return seen.figures()

        return measure

    async def _schedule_here(self) -> None:
        """So that the partition is swept again and again."""
        runs_here = round(self._plan.over_s / _DUE_HERE_EVERY_S)
        batch = MessageBatch(messages=[Message()])
        async with self._broker.session("here") as session:
            delays_s = (_LEAD_S + _DUE_HERE_EVERY_S * at for at in range(runs_here))
            runs = [
                PublishRun(lmq_name=_HERE, batch=batch, count=1, delay_ms=round(1000 * each))
                for each in delays_s
            ]
            for result in await asyncio.gather(*map(session.submit, runs)):
                receipt_of(result)
        self._due += runs_here

    async def _sweeper_here(self) -> SweeperState.ValueType:
        async with open_channel(self._broker.cluster.address("lifecycle")) as channel:
            answer = await LifecycleServiceStub(channel).ListSweepers(ListSweepersRequest())
        return answer.sweepers[PARTITION].state

    async def _promoted(self) -> int:
        """Scheduled messages of the partition that have their offsets."""
        found = await self._broker.topics.GetQueue(GetQueueRequest(lmq_name=_HERE))
        return found.queue.next_offset

    def _break(self, fault: Fault) -> None:
        self._file.write_text(fault.value)
