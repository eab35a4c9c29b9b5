"""Benchmark `retention`: a pass over two million messages, beside the same deletion in PostgreSQL.

Small passes with one batch due come first; they are measured once Spark is warm. Half of the
messages are removed in a quiet pass, the other half while messages are published. Planning and
applying are measured separately; in production they overlap.

PostgreSQL gives the same guarantee: it deletes the same number of rows, found by the limit of their
topic, in batches of 1000 (`DELETE ... LIMIT 1000`), and each batch commits durably with its history
rows. A client (psql, on a socket) sends one batch after the other. PostgreSQL finds and deletes in
one statement; for Tidemark only applying is compared, and planning is reported as `plan_s`.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bench import retention_single
from bench.harness.benchmark import Bench, benchmark, once
from bench.harness.bodies import random_body
from bench.harness.figures import percentile
from bench.harness.partition import ask, open_partition
from bench.harness.postgres import find_postgres, running_postgres
from bench.harness.usage import unshared_bytes
from bench.retention_passes import (
    LIMIT,
    LIVE_TOPIC,
    WARM_TOPIC,
    Figures,
    Publisher,
    Storage,
    running_storage,
    set_limit,
    spark_jobs,
    warm_passes,
)
from spark_batch.passes.outcome import JobName
from spark_batch.storage_client import find_partitions, find_topics
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from tidemark.topics import Topic, TopicSettings

if TYPE_CHECKING:
    from spark_batch.passes.jobs import Jobs

RATIO_MIN: Final = 10.0
P99_RATIO_MAX: Final = 2.0
WRITER_MS_MAX: Final = 50.0
WARM_S_MAX: Final = 1.0
MEMORY_MB_MAX: Final = 64.0
"""How much storage may grow while millions of rows stream out of it."""

_RUN = 10
_RUNS_PER_QUEUE = 20
_QUIET, _BUSY = "quiet", "busy"
_NO_LIMIT = TopicSettings(retention_enabled=True)

T = TypeVar("T")


@benchmark("retention", "a retention pass beside DELETE loops of PostgreSQL, and beside publishing")
async def retention(bench: Bench) -> None:
    queues = bench.queues or bench.size(full=10_000, quick=200)
    due = queues // 2 * _RUNS_PER_QUEUE * _RUN
    bench.settings |= {"queues": queues, "messages": 2 * due, "due_per_pass": due, "run": _RUN}
    data = bench.directory / "data"
    body = random_body(bench.random, _RUN)
    bench.progress(f"{2 * due:,} messages in {queues:,} queues are filled")
    await _fill(data, queues, body)
    async with running_storage(data, bench.directory) as storage:
        quiet, busy, warm, latencies = await _passes(bench, storage, due)
    rows = [once("quiet pass", quiet), once("pass beside publishing", busy)]
    rows.append(once("warm pass, one batch due", warm))
    rows += [once(f"publishing beside {name}", each) for name, each in latencies.items()]
    message_bytes = len(body) // _RUN
    deleted_per_s = await asyncio.to_thread(_postgres_rate, bench, due, message_bytes, queues, _RUN)
    if deleted_per_s:
        rows.append(once("PostgreSQL, DELETE loops", {"messages_per_s": deleted_per_s}))
        ratio = quiet["apply_messages_per_s"] / deleted_per_s
        bench.at_least("apply / PostgreSQL, messages per second", ratio, RATIO_MIN)
    bench.tables.append(rows)
    await _single_messages(bench)
    p99 = latencies["apply"]["p99_ms"] / latencies["plan"]["p99_ms"]
    bench.at_most("publish p99, beside apply / beside plan", p99, P99_RATIO_MAX)
    bench.at_most("worst publish beside apply, ms", latencies["apply"]["max_ms"], WRITER_MS_MAX)
    bench.at_most("warm pass with one batch due, median s", warm["median_s"], WARM_S_MAX)
    bench.at_most("memory of storage during the scan, MB more", quiet["grown_mb"], MEMORY_MB_MAX)


async def _single_messages(bench: Bench) -> None:
    queues = bench.queues or bench.size(full=100_000, quick=1_000)
    data = bench.directory / "single"
    bench.progress(f"one message per queue: {queues:,} queues are filled")
    await retention_single.fill(data, queues, bench)
    async with running_storage(data, bench.directory) as storage, spark_jobs(storage) as jobs:

        async def limit(topic: str, settings: TopicSettings) -> None:
            await set_limit(storage, topic, settings)

        pid = storage.process.pid
        rate = await retention_single.measure(bench, jobs, pid, queues, limit)
    message_bytes = len(random_body(bench.random, 1))
    postgres = await asyncio.to_thread(_postgres_rate, bench, queues, message_bytes, 2 * queues, 1)
    if postgres:
        figures = {"messages_per_s": postgres, "ratio": rate / postgres}
        bench.tables.append([once("PostgreSQL, one message per queue", figures)])


async def _fill(data: Path, queues: int, body: bytes) -> None:
    """Runs over all queues in turn, half of them to each topic."""
    async with open_partition(data) as partition:
        for name in (_QUIET, _BUSY, LIVE_TOPIC):
            await ask(partition, [PutTopic(Topic(name, _NO_LIMIT), create=True)])
        await ask(partition, [PutTopic(Topic(WARM_TOPIC, LIMIT), create=True)])
        names = [f"{_QUIET if n % 2 else _BUSY}/{n:06}" for n in range(queues)]
        for _ in range(_RUNS_PER_QUEUE):
            for start in range(0, queues, 1000):
                frame = [Append(name, _RUN, body) for name in names[start : start + 1000]]
                await ask(partition, frame)


async def _passes(
    bench: Bench, storage: Storage, due: int
) -> tuple[Figures, Figures, Figures, dict[str, Figures]]:
    async with spark_jobs(storage) as jobs:
        bench.progress("warm passes, one batch due")
        warm = await warm_passes(storage, jobs)
        bench.progress(f"a quiet pass over {due:,} messages")
        await set_limit(storage, _QUIET)
        before = unshared_bytes(storage.process.pid)
        plan, plan_s, peak = await _watched(storage, lambda: _plan(jobs))
        _, apply_s, _ = await _watched(storage, lambda: _apply(jobs, plan, due))
        quiet = {
            "plan_s": plan_s,
            "apply_s": apply_s,
            "apply_messages_per_s": due / apply_s,
            "pass_messages_per_s": due / (plan_s + apply_s),
            "grown_mb": max(0, peak - before) / 1e6,
        }
        bench.progress("the same beside publishing")
        await set_limit(storage, _BUSY)
        async with Publisher(storage.stub) as publisher:
            publishing = asyncio.create_task(publisher.publish_on_and_on())
            plan, plan_s, _ = await _watched(storage, lambda: _plan(jobs))
            while_planning = publisher.taken()
            _, apply_s, _ = await _watched(storage, lambda: _apply(jobs, plan, due))
            while_applying = publisher.taken()
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        busy = {
            "plan_s": plan_s,
            "apply_s": apply_s,
            "apply_messages_per_s": due / apply_s,
            "pass_messages_per_s": due / (plan_s + apply_s),
            "grown_mb": 0.0,
        }
        latencies = {"plan": _latency(while_planning), "apply": _latency(while_applying)}
        return quiet, busy, warm, latencies


def _plan(jobs: "Jobs") -> Any:
    """A plan that Spark has computed and cached."""
    due = jobs.find_due(JobName.RETENTION)
    plan = jobs.plan_retention(due, find_topics(due.cluster), jobs.collect_failures())
    assert plan is not None
    plan = plan.cache()
    plan.count()
    return plan


def _apply(jobs: "Jobs", plan: Any, due: int) -> None:
    failures = jobs.collect_failures()
    cluster = find_partitions(jobs.storage)
    counts = jobs.apply(plan, cluster, f"bench-{time.monotonic_ns()}", 1000, failures)
    removed = sum(counts.values())
    assert removed == due, f"{removed} of {due} messages were removed"
    plan.unpersist()


async def _watched(storage: Storage, work: Callable[[], T]) -> tuple[T, float, int]:
    """The result, its duration, and the peak memory of storage in the meantime."""
    peak = 0
    began = time.perf_counter()
    working = asyncio.ensure_future(asyncio.to_thread(work))
    while not working.done():
        peak = max(peak, unshared_bytes(storage.process.pid))
        await asyncio.wait({working}, timeout=0.1)
    return working.result(), time.perf_counter() - began, peak


def _latency(latencies_ns: list[int]) -> Figures:
    return {
        "publishes": len(latencies_ns),
        "p50_ms": percentile(latencies_ns, 50) / 1e6,
        "p99_ms": percentile(latencies_ns, 99) / 1e6,
        "max_ms": max(latencies_ns) / 1e6,
    }


def _postgres_rate(bench: Bench, due: int, message_bytes: int, queues: int, run: int) -> float:
    """Rows deleted per second; 0 without PostgreSQL, which is noted in the settings."""
    programs = find_postgres()
    if programs is None:
        bench.settings["postgres"] = "not found on this machine: nothing to compare with"
        return 0.0
    bench.progress(f"PostgreSQL, {2 * due:,} rows in {queues:,} queues, half of them deleted")
    with running_postgres(programs) as postgres:
        bench.settings["postgres"] = postgres.run("show server_version")
        postgres.run(_TABLES.format(limit_s=LIMIT.retention_seconds))
        postgres.run(
            f"""
            insert into messages (topic, queue, publish_time_ms, body)
              select n / {run} % 2, n / {run} % {queues}, n,
                decode(repeat('ab', {message_bytes}), 'hex')
              from generate_series(0, {2 * due - 1}) n;
            """
        )
        postgres.run("vacuum analyze; checkpoint;")
        # Until a batch is empty, as a cleanup loop would do it.
        loop = _DELETE_BATCH * (-(-due // _POSTGRES_BATCH) + 1)
        began = time.perf_counter()
        postgres.run(loop)
        elapsed = time.perf_counter() - began
        left = int(postgres.run("select count(*) from messages"))
        counted = int(postgres.run("select sum(messages) from history"))
        assert left == due, f"{left} rows are left of {2 * due}"
        assert counted == due, f"the history counts {counted} rows, not {due}"
    return due / elapsed


_POSTGRES_BATCH: Final = 1000
_TABLES: Final = """
create table topics (id int primary key, retention_enabled bool, retention_seconds bigint);
insert into topics values (0, true, 0), (1, true, {limit_s});
create table messages (
  id bigserial primary key, topic int not null references topics, queue int not null,
  publish_time_ms bigint not null, body bytea not null);
create index on messages (queue, id);
create index on messages (topic, publish_time_ms);
create table history (
  queue int not null, retention_type text not null, pass_id text not null,
  messages bigint not null, bytes bigint not null, executed_at timestamptz not null);
"""
_DELETE_BATCH: Final = f"""
with gone as (
  delete from messages where id in (
    select m.id from messages m join topics t on t.id = m.topic
    where t.retention_enabled and t.retention_seconds > 0
      and m.publish_time_ms <= extract(epoch from now()) * 1000 - t.retention_seconds * 1000
    limit {_POSTGRES_BATCH})
  returning queue, octet_length(body) as bytes)
insert into history
  select queue, 'expired', 'pass', count(*), sum(bytes), now() from gone group by queue;
"""
