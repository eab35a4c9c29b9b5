"""Sweeps and retention as operators see them.

Each function calls the service that does the work: lifecycle for sweepers, the scheduler for jobs,
storage for the history. It keeps no state, retries nothing and closes no channel.
"""

from collections.abc import AsyncIterator, Sequence

import grpc

from tidemark.api.lifecycle.v1 import jobs_pb2, lifecycle_pb2
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import JobServiceStub
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.api.storage.v1 import retention_pb2, storage_pb2
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.client.admin.pages import pages
from tidemark.client.admin.values import Finding, Job, Pass, PassProgress, Removal, Sweeper
from tidemark.client.arguments import check_bool, check_int, check_str
from tidemark.errors import InvalidArgument, PartitionNotFound
from tidemark.limits import PAGE_SIZE_MAX, PARTITIONS_MAX
from tidemark.rpc.enums import word_of

JOBS = ("metrics", "retention", "eviction")
"""The jobs, in the order in which the scheduler starts them."""


async def list_sweepers(
    lifecycle: grpc.aio.Channel, *, timeout_ms: int | None = None
) -> list[Sweeper]:
    request = lifecycle_pb2.ListSweepersRequest()
    stub = LifecycleServiceStub(lifecycle)
    answer = await stub.ListSweepers(request, timeout=_seconds(timeout_ms))
    return [_sweeper(each) for each in answer.sweepers]


async def list_jobs(scheduler: grpc.aio.Channel, *, timeout_ms: int | None = None) -> list[Job]:
    request = jobs_pb2.ListJobsRequest()
    answer = await JobServiceStub(scheduler).ListJobs(request, timeout=_seconds(timeout_ms))
    return [_job(each) for each in answer.jobs]


async def run_job(
    scheduler: grpc.aio.Channel, name: str, *, dry_run: bool = False, timeout_ms: int | None = None
) -> Pass:
    """Run a pass now and wait for its end; with `dry_run`, only report the planned deletions."""
    if name not in JOBS:
        raise InvalidArgument(f"there is no job {name!r}", field="name")
    job = jobs_pb2.JobName.Value(f"JOB_NAME_{name.upper()}")
    request = jobs_pb2.RunJobRequest(name=job, dry_run=check_bool("dry_run", dry_run))
    answer = await JobServiceStub(scheduler).RunJob(request, timeout=_seconds(timeout_ms))
    findings = tuple(
        Finding(each.topic, each.rule, each.due, each.why_not) for each in answer.findings
    )
    return Pass(answer.pass_id, findings, dict(answer.failed_partitions))


async def shared_storages(storage: grpc.aio.Channel, *, timeout_ms: int | None = None) -> list[str]:
    """The addresses of all storage nodes that share a store with this one; none if it does not
    share one."""
    request = storage_pb2.DescribeStorageRequest()
    stub = StorageServiceStub(storage)
    described = await stub.DescribeStorage(request, timeout=_seconds(timeout_ms))
    return list(described.node_addresses)


async def list_retention_history(
    storages: Sequence[grpc.aio.Channel],
    *,
    retention_type: str = "",
    queue: str = "",
    topic: str = "",
    pass_id: str = "",
    partition: int | None = None,
    timeout_ms: int | None = None,
) -> AsyncIterator[Removal]:
    """The history of removals, newest first, page by page; empty values do not restrict it (R6).

    `storages` are all nodes of the cluster: one that cannot be read fails the listing (C1).
    """
    if partition is not None:
        check_int("partition", partition, 0, PARTITIONS_MAX - 1)
    request = retention_pb2.ListRetentionHistoryRequest(
        partition=partition,
        page_size=PAGE_SIZE_MAX,
        lmq_name=check_str("queue", queue),
        topic=check_str("topic", topic),
        pass_id=check_str("pass_id", pass_id),
    )
    if check_str("retention_type", retention_type):
        try:
            request.type = retention_pb2.RetentionType.Value(
                f"RETENTION_TYPE_{retention_type.upper()}"
            )
        except ValueError:
            known = [
                name.removeprefix("RETENTION_TYPE_").lower()
                for name in retention_pb2.RetentionType.keys()[1:]  # the first is unspecified
            ]
            detail = f"retention_type is one of {', '.join(known)}, not {retention_type!r}"
            raise InvalidArgument(detail, field="retention_type") from None
    rows: list[tuple[Removal, AsyncIterator[Removal]]] = []
    missing: PartitionNotFound | None = None
    for storage in storages:
        history = _history_of(storage, request, _seconds(timeout_ms))
        try:
            first = await anext(history, None)
        except PartitionNotFound as error:  # another node holds it
            missing = error
            continue
        if first is not None:
            rows.append((first, history))
        partition = None  # one node holds it
    if partition is not None and missing is not None:
        raise missing
    while rows:
        newest = max(range(len(rows)), key=lambda at: rows[at][0].execute_time_ms)
        removal, history = rows[newest]
        yield removal
        following = await anext(history, None)
        if following is None:
            del rows[newest]
        else:
            rows[newest] = following, history


async def _history_of(
    storage: grpc.aio.Channel,
    asked: retention_pb2.ListRetentionHistoryRequest,
    timeout_s: float | None,
) -> AsyncIterator[Removal]:
    """The history of one storage node, newest first."""
    stub = RetentionServiceStub(storage)
    request = retention_pb2.ListRetentionHistoryRequest()
    request.CopyFrom(asked)  # paging writes into it

    async def fetch(
        request: retention_pb2.ListRetentionHistoryRequest,
    ) -> retention_pb2.ListRetentionHistoryResponse:
        return await stub.ListRetentionHistory(request, timeout=timeout_s)

    async for page in pages(fetch, request):
        for each in page.rows:
            yield _removal(each)


def _seconds(timeout_ms: int | None) -> float | None:
    return None if timeout_ms is None else timeout_ms / 1000


def _sweeper(proto: lifecycle_pb2.SweeperStatus) -> Sweeper:
    swept = proto.HasField("last_sweep_time")
    return Sweeper(
        partition=proto.partition,
        state=word_of(lifecycle_pb2.SweeperState, proto.state, "SWEEPER_STATE_"),
        last_sweep_time_ms=proto.last_sweep_time.ToMilliseconds() if swept else None,
        last_duration_ms=proto.last_duration_ms,
        last_found=proto.last_found,
        last_done=proto.last_done,
        last_stale=proto.last_stale,
        next_in_ms=proto.next_in_ms,
        failures=proto.failures,
        last_error=proto.last_error,
    )


def _job(proto: jobs_pb2.JobStatus) -> Job:
    passed = proto.HasField("last_pass_time")
    return Job(
        name=word_of(jobs_pb2.JobName, proto.name, "JOB_NAME_").lower(),
        state=word_of(jobs_pb2.JobState, proto.state, "JOB_STATE_"),
        last_pass_time_ms=proto.last_pass_time.ToMilliseconds() if passed else None,
        last_duration_ms=proto.last_duration_ms,
        last_counts=dict(proto.last_counts),
        next_in_ms=proto.next_in_ms,
        last_error=proto.last_error,
        last_pass_id=proto.last_pass_id,
        progress=_progress(proto.progress) if proto.HasField("progress") else None,
        failed_partitions=dict(proto.failed_partitions),
    )


def _progress(proto: jobs_pb2.PassProgress) -> PassProgress:
    return PassProgress(
        phase=word_of(jobs_pb2.PassPhase, proto.phase, "PASS_PHASE_"),
        running_for_ms=proto.running_for_ms,
        tasks=proto.tasks,
        tasks_done=proto.tasks_done,
        rows_planned=proto.rows_planned,
        rows_applied=proto.rows_applied,
    )


def _removal(proto: retention_pb2.RetentionHistoryRow) -> Removal:
    return Removal(
        partition=proto.partition,
        lmq_name=proto.lmq_name,
        messages=proto.messages,
        bytes=proto.bytes,
        type=word_of(retention_pb2.RetentionType, proto.type, "RETENTION_TYPE_").lower(),
        execute_time_ms=proto.execute_time.ToMilliseconds(),
        pass_id=proto.pass_id,
    )
