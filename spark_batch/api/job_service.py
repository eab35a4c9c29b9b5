"""The job API: translates between protos and the scheduler."""

from typing import Any

import grpc

from spark_batch.passes.outcome import JobName
from spark_batch.scheduler import Job, Scheduler
from tidemark.api.lifecycle.v1 import jobs_pb2, jobs_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import InvalidArgument

Context = grpc.aio.ServicerContext[Any, Any]


class JobService(jobs_pb2_grpc.JobServiceServicer):
    """The state of the jobs, and passes on demand."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock

    async def ListJobs(
        self, request: jobs_pb2.ListJobsRequest, context: Context
    ) -> jobs_pb2.ListJobsResponse:
        return jobs_pb2.ListJobsResponse(jobs=map(self._status, self._scheduler.jobs.values()))

    async def RunJob(
        self, request: jobs_pb2.RunJobRequest, context: Context
    ) -> jobs_pb2.RunJobResponse:
        try:
            name = JobName(jobs_pb2.JobName.Name(request.name).removeprefix("JOB_NAME_").lower())
        except ValueError:
            raise InvalidArgument("unknown job", field="name") from None
        done = await self._scheduler.run_now(name, request.dry_run)
        response = jobs_pb2.RunJobResponse(pass_id=done.pass_id, failed_partitions=done.failed)
        for each in done.findings:
            response.findings.add(
                topic=each.topic, rule=each.rule, due=each.due, why_not=each.why_not
            )
        return response

    def _status(self, job: Job) -> jobs_pb2.JobStatus:
        status = jobs_pb2.JobStatus(
            name=jobs_pb2.JobName.Value(f"JOB_NAME_{job.name.name}"),
            state=jobs_pb2.JobState.Value(f"JOB_STATE_{job.state.name}"),
            last_duration_ms=job.last_duration_ms,
            last_counts=job.last_counts,
            next_in_ms=max(0, job.next_at_ms - self._clock.monotonic_ms()),
            last_error=job.last_error,
            last_pass_id=job.last_pass_id,
            failed_partitions=job.last_failed,
        )
        if job.progress is not None:
            status.progress.phase = jobs_pb2.PassPhase.Value(
                f"PASS_PHASE_{job.progress.phase.name}"
            )
            status.progress.running_for_ms = self._clock.monotonic_ms() - job.began_ms
            status.progress.tasks = job.progress.tasks
            status.progress.tasks_done = job.progress.tasks_done
            status.progress.rows_planned = job.progress.rows_planned
            status.progress.rows_applied = job.progress.rows_applied
        if job.last_pass_ms:
            status.last_pass_time.FromMilliseconds(job.last_pass_ms)
        return status
