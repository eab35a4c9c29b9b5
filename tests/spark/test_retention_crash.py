"""Storage, Spark's Java and the Spark child are killed in the middle of passes (R9).

The scheduler runs passes of retention and eviction over queues of all kinds, with calls of a few
runs, so that every pass has a middle. Each process is killed with `kill -9` after some more rows of
history, and the next passes do the rest. In the end exactly the due messages are gone, and the
history counts each of them as it was removed. It starts Spark for every kill of Java, so that only
`make test-crash` runs it, in four minutes; `--seed N` chooses other queues and moments.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.spark.conftest import LOOPBACK
from tests.support.processes import child_of
from tests.support.retention_process import retention_process
from tests.support.retention_workload import AGES_S, PARTITIONS, QueueModel, fill
from tests.support.storage_client import RunningStorage, StorageClient, storage_process
from tidemark.api.lifecycle.v1.jobs_pb2 import (
    JOB_NAME_EVICTION,
    JOB_NAME_RETENTION,
    JOB_STATE_WAITING,
    JobStatus,
    ListJobsRequest,
)
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import JobServiceStub
from tidemark.api.storage.v1.retention_pb2 import (
    ListRetentionHistoryRequest,
    RetentionHistoryRow,
    RetentionType,
)
from tidemark.api.storage.v1.storage_pb2 import PeekQueueRequest
from tidemark.clock import ManualClock, SystemClock
from tidemark.names import partition_of
from tidemark.rpc import open_channel

SEED = 1
"""Unless `--seed` is given."""

QUEUES = 10_500
KILLS = 12
KINDS = ("storage", "java", "spark child")
ROWS_MAX = 40
"""Rows of history after which a process is killed, at most."""

CALL_RUNS = "3"
"""Runs that a call removes, which may be all of a queue."""

START_MS = 500_000
POLL_MS = 50
PEEK_MESSAGES_MAX = 1_000
PEEKS_AT_ONCE = 64

History = Counter[tuple[str, str]]
"""Removed messages by queue and type."""


class Retention:
    """Storage and a scheduler, each in processes of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.storage = storage_process(
            tmp_path / "data",
            tmp_path / "storage.log",
            partitions=str(PARTITIONS),
            storage_disk_free_bytes_min="0",
        )
        self.scheduler = retention_process(
            self.storage.address,
            tmp_path / "retention.log",
            retention_interval="1000",
            eviction_interval="1000",
            retention_batch_size=CALL_RUNS,
            eviction_batch_size=CALL_RUNS,
            spark_master="local[2]",
            spark_options=LOOPBACK,
        )
        self._struck: set[str] = set()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[StorageClient]:
        """A new channel: storage may have been killed since the last one."""
        async with open_channel(self.storage.address) as channel:
            yield StorageClient(channel)

    async def start(self) -> None:
        await self.storage.start()
        await self.storage.wait_healthy()
        await self.scheduler.start()
        await self.scheduler.wait_healthy(START_MS)

    async def kill(self) -> None:
        for each in (self.scheduler, self.storage):
            if each.running:
                await each.kill()

    async def strike(self, kind: str, rows: int) -> None:
        """Kill a process after new passes have written about so many rows of history."""
        async with asyncio.timeout(START_MS / 1000), self.client() as client:
            while len(await self._new_rows(client, rows)) < rows:
                assert self.scheduler.running
                await SystemClock().sleep_ms(POLL_MS)
        planner = child_of(self.scheduler.pid, b"spark_batch.planner")
        assert planner is not None
        if kind == "storage":
            await self.storage.kill()
            await self.storage.start()
            await self.storage.wait_healthy()
        elif kind == "java":
            java = child_of(planner, b"java")
            assert java is not None
            os.kill(java, signal.SIGKILL)
        else:
            os.kill(planner, signal.SIGKILL)

    async def _new_rows(self, client: StorageClient, rows: int) -> list[RetentionHistoryRow]:
        """The newest rows, without those of passes that were struck."""
        request = ListRetentionHistoryRequest(page_size=rows)
        newest = (await client.retention.ListRetentionHistory(request)).rows
        return [row for row in newest if row.pass_id not in self._struck]

    async def removed(self) -> History:
        """The history so far. Its passes are those that were struck, or have ended."""
        counted: History = Counter()
        token = ""
        async with self.client() as client:
            while True:
                request = ListRetentionHistoryRequest(page_size=1000, page_token=token)
                answer = await client.retention.ListRetentionHistory(request)
                for row in answer.rows:
                    self._struck.add(row.pass_id)
                    kind = RetentionType.Name(row.type).removeprefix("RETENTION_TYPE_").lower()
                    counted[row.lmq_name, kind] += row.messages
                token = answer.next_page_token
                if not token:
                    return counted

    async def until_nothing_is_due(self) -> None:
        """Return once an eviction pass, and then a retention pass, have found nothing.

        In this order: the messages that an eviction settles may be due for retention.
        """
        async with open_channel(self.scheduler.address) as channel:
            stub: Any = JobServiceStub(channel)
            while True:
                listed = {job.name: job for job in (await stub.ListJobs(ListJobsRequest())).jobs}
                eviction, retention = listed[JOB_NAME_EVICTION], listed[JOB_NAME_RETENTION]
                began_ms = [each.last_pass_time.ToMilliseconds() for each in (eviction, retention)]
                if (
                    found_nothing(eviction)
                    and found_nothing(retention)
                    and began_ms[0] < began_ms[1]
                ):
                    return
                assert self.scheduler.running
                await SystemClock().sleep_ms(POLL_MS)


def found_nothing(job: JobStatus) -> bool:
    """Whether the last pass of a job has ended so, and without an error."""
    ended = job.state == JOB_STATE_WAITING and bool(job.last_pass_id)
    return ended and not job.last_error and not any(job.last_counts.values())


async def stored_in(client: StorageClient, lmq_name: str, group: str = "") -> dict[int, bytes]:
    """Payloads by offset; of a group those that it has not settled."""
    request = PeekQueueRequest(
        partition=partition_of(lmq_name, PARTITIONS),
        lmq_name=lmq_name,
        max_messages=PEEK_MESSAGES_MAX,
        group=group,
    )
    answer = await client.storage.PeekQueue(request)
    assert not answer.HasField("next_offset") or len(answer.messages) < PEEK_MESSAGES_MAX
    return {each.offset: each.message.payload for each in answer.messages}


async def differences(client: StorageClient, models: Sequence[QueueModel]) -> list[str]:
    """Queues whose messages, or what their groups have left to do, are not as expected."""

    async def of_queue(model: QueueModel) -> list[str]:
        if not model.next_offset:
            return []
        found = {"stored": await stored_in(client, model.lmq_name)}
        expected = {"stored": model.stored}
        for group, settled in model.groups.items():
            found[group] = await stored_in(client, model.lmq_name, group)
            expected[group] = model.stored - settled
        return [
            f"{model.lmq_name}, {what}: {sorted(found[what])}, not {sorted(offsets)}"
            for what, offsets in expected.items()
            if found[what] != {offset: b"%d" % offset for offset in offsets}
        ]

    different: list[str] = []
    for start in range(0, len(models), PEEKS_AT_ONCE):
        some = models[start : start + PEEKS_AT_ONCE]
        for each in await asyncio.gather(*map(of_queue, some)):
            different += each
    return different


@pytest.mark.timeout(3600)
async def test_kill_9_in_the_middle_of_passes_leaves_exactly_what_is_not_due(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """R9, R1, R2, R5, R6: nothing due is left, nothing else is gone, all of it is counted."""
    if not request.config.getoption("--long"):
        pytest.skip("part of make test-crash")
    seed = request.config.getoption("--seed")
    rng = random.Random(SEED if seed is None else seed)
    clock = ManualClock(SystemClock().wall_ms() - 1000 * max(AGES_S))
    filled = RunningStorage(tmp_path / "data", clock, partitions=PARTITIONS)
    await filled.start()
    models = await fill(filled, clock, QUEUES, rng)
    assert await differences(filled, models) == []
    await filled.stop()
    due: History = Counter()
    for model in models:
        for kind, messages in model.apply_rules().items():
            due[model.lmq_name, kind] += messages

    async with AsyncExitStack() as running:
        retention = Retention(tmp_path)
        running.push_async_callback(retention.kill)
        await retention.start()
        removed = []
        for number in range(KILLS):
            await retention.strike(KINDS[number % len(KINDS)], rng.randrange(1, ROWS_MAX))
            removed.append((await retention.removed()).total())
        await retention.until_nothing_is_due()

        async with retention.client() as client:
            assert await differences(client, models) == []
        assert await retention.removed() == due
    assert all(0 < each < due.total() for each in removed), "killed in the middle"
