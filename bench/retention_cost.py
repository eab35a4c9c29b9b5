"""Benchmark `retention-cost`: passes with little or nothing to do, and the index of ages.

Passes over very many queues of which nothing is due, over an empty cluster with 64 partitions, and
with thousands of topics that have limits. Publishing is compared with publishing that writes
nothing to the index, in turns, end to end and in storage alone: the first message of a queue, and a
message to one that has some.
"""

import asyncio
import os
from pathlib import Path
from typing import Final

from bench import retention_single
from bench.age_index.in_storage import measure_in_storage
from bench.age_index.publishing import measure_publishing
from bench.harness.benchmark import Bench, benchmark, once
from bench.harness.partition import ask, open_partition
from bench.harness.usage import cpu_ns
from bench.retention_passes import (
    LIMIT,
    WARM_TOPIC,
    Figures,
    retention_settings,
    running_storage,
    spark_jobs,
    warm_passes,
)
from spark_batch.passes.outcome import JobName
from spark_batch.passes.without_work import pass_without_work
from storage_svc.operations.topics import PutTopic
from tidemark.clock import SystemClock
from tidemark.topics import Topic

NOTHING_DUE_CPU_MS_MAX: Final = 50.0
EMPTY_CLUSTER_CPU_S_MAX: Final = 1.0
MANY_TOPICS_S_MAX: Final = 2.0

_PARTITIONS: Final = 64
_PASSES: Final = 3
_TOPICS_PER_COMMIT: Final = 500


@benchmark("retention-cost", "passes with nothing due or many topics, and what publishing pays")
async def retention_cost(bench: Bench) -> None:
    await measure_publishing(bench)
    await measure_in_storage(bench)
    await _nothing_due(bench)
    await _empty_cluster(bench)
    await _many_topics(bench)


async def _nothing_due(bench: Bench) -> None:
    queues = bench.many_queues
    bench.settings["queues"] = queues
    data = bench.directory / "many-queues"
    bench.progress(f"nothing due: {queues:,} queues are filled")
    await retention_single.fill(data, queues, bench)
    bench.progress(f"nothing due: {_PASSES} passes")
    figures = await _idle_passes(data, bench.directory, partitions=1)
    bench.tables.append([once(f"nothing due, {queues:,} queues", figures)])
    value = 1000 * figures["storage_cpu_s"]
    bench.at_most("nothing due, storage CPU ms per pass", value, NOTHING_DUE_CPU_MS_MAX)


async def _empty_cluster(bench: Bench) -> None:
    bench.progress(f"empty cluster of {_PARTITIONS} partitions: {_PASSES} passes")
    figures = await _idle_passes(bench.directory / "empty", bench.directory, _PARTITIONS)
    bench.tables.append([once(f"empty cluster, {_PARTITIONS} partitions", figures)])
    value = figures["storage_cpu_s"] + figures["scheduler_cpu_s"]
    bench.at_most("empty cluster, CPU s per pass", value, EMPTY_CLUSTER_CPU_S_MAX)


async def _idle_passes(data: Path, directory: Path, partitions: int) -> Figures:
    """The most that a pass without work takes, as the scheduler runs it."""
    worst = {"storage_cpu_s": 0.0, "scheduler_cpu_s": 0.0}
    async with running_storage(data, directory, partitions) as storage:
        settings, clock = retention_settings(storage), SystemClock()
        pids = {"storage_cpu_s": storage.process.pid, "scheduler_cpu_s": os.getpid()}
        for _ in range(_PASSES):
            before = {name: cpu_ns(pid) for name, pid in pids.items()}
            done = await asyncio.to_thread(
                pass_without_work, settings, JobName.RETENTION, False, clock
            )
            assert done is not None, "something is due"
            assert not done.failed, done.failed
            for name, pid in pids.items():
                worst[name] = max(worst[name], (cpu_ns(pid) - before[name]) / 1e9)
    return {**worst, "passes": _PASSES}


async def _many_topics(bench: Bench) -> None:
    """Passes with one batch due, with and without thousands of other topics that have limits."""
    topics = bench.size(full=5_000, quick=50)
    bench.settings["topics"] = topics
    rows, seconds = [], []
    for count in (1, topics):
        bench.progress(f"one batch due, topics with limits: {count}")
        data = bench.directory / f"topics-{count}"
        async with open_partition(data) as partition:
            names = [WARM_TOPIC, *(f"topic-{number}" for number in range(1, count))]
            for start in range(0, count, _TOPICS_PER_COMMIT):
                some = names[start : start + _TOPICS_PER_COMMIT]
                await ask(partition, [PutTopic(Topic(name, LIMIT), create=True) for name in some])
        async with running_storage(data, bench.directory) as storage, spark_jobs(storage) as jobs:
            figures = await warm_passes(storage, jobs)
        rows.append(once(f"one batch due, topics with limits: {count}", figures))
        seconds.append(figures["median_s"])
    bench.tables.append(rows)
    bench.at_most("many topics, median s more", seconds[1] - seconds[0], MANY_TOPICS_S_MAX)
