"""`tidemark retention ...`: run a pass, show the state of the jobs and the history."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import JobsAddress, StorageAddress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemark.client.admin.values import Finding, Job, Pass, PassProgress, Removal

_STATUS_TIMEOUT_MS: Final = 10_000

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Retention and eviction.")


JobName = Annotated[str, typer.Option(metavar="JOB", help="retention, eviction or metrics.")]


@app.command()
@command(timeout_ms=None)
async def run(
    call: Call,
    job: JobName = "retention",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is due without changing anything.")
    ] = False,
    jobs_address: JobsAddress = None,
) -> None:
    """Run a pass now and wait for it to finish; exits with 1 if partitions failed."""
    await _run(call, job, dry_run, jobs_address)


@app.command("dry-run")
@command(timeout_ms=None)
async def dry_run(call: Call, job: JobName = "retention", jobs_address: JobsAddress = None) -> None:
    """Show what a pass would remove now; the same as run --dry-run."""
    await _run(call, job, True, jobs_address)


async def _run(call: Call, job: str, dry_run: bool, jobs_address: str | None) -> None:
    from tidemark.cli.display.pass_progress import watched
    from tidemark.client.admin import upkeep

    if job not in upkeep.JOBS:
        raise typer.BadParameter(f"--job must be one of {', '.join(upkeep.JOBS)}")
    channel = call.open(jobs_address or call.settings.jobs_address)

    async def progress() -> "PassProgress | None":
        jobs = await upkeep.list_jobs(channel, timeout_ms=_STATUS_TIMEOUT_MS)
        return next((each.progress for each in jobs if each.name == job), None)

    running = upkeep.run_job(channel, job, dry_run=dry_run, timeout_ms=call.timeout_ms)
    done = await watched(job, running, progress)
    for partition, why in sorted(done.failed_partitions.items()):
        call.out.note(f"Partition {partition} failed: {why}")
    if call.out.as_json:
        call.out.document(done)
    else:
        _show_pass(call, job, done, dry_run)
    if done.failed_partitions:
        raise typer.Exit(1)


def _show_pass(call: Call, job: str, done: "Pass", dry_run: bool) -> None:
    from tidemark.cli.display.layout import Column

    columns = (
        Column("TOPIC", cut=True),
        Column("RULE"),
        Column("DUE", right=True),
        Column("WHY NOT"),
    )

    def row(finding: "Finding") -> tuple[str, ...]:
        due = units.count(finding.due)
        return finding.topic or "-", finding.rule, due, finding.why_not or "-"

    call.out.table(columns, map(row, done.findings))
    call.out.note(f"{'Planned' if dry_run else 'Finished'} pass {done.pass_id or '-'} of {job}.")


@app.command()
@command()
async def status(call: Call, jobs_address: JobsAddress = None) -> None:
    """Show the jobs: state, last pass, next pass, last error."""
    from tidemark.cli.display.layout import Column
    from tidemark.cli.display.pass_progress import drawn
    from tidemark.client.admin import upkeep
    from tidemark.clock import SystemClock

    columns = (
        Column("JOB"),
        Column("STATE"),
        Column("LAST PASS", right=True),
        Column("TOOK", right=True, importance=2),
        Column("REMOVED", cut=True, importance=1),
        Column("NEXT IN", right=True),
        Column("FAILED", right=True, importance=1),
        Column("ERROR", cut=True),
    )
    now_ms = SystemClock().wall_ms()

    def row(job: "Job") -> tuple[str, ...]:
        counts = " ".join(f"{kind}={number}" for kind, number in sorted(job.last_counts.items()))
        return (
            job.name,
            f"{job.state} ({drawn(job.progress)})" if job.progress else job.state,
            units.ago(job.last_pass_time_ms, now_ms),
            units.duration(job.last_duration_ms),
            counts or "-",
            units.duration(job.next_in_ms),
            units.counted(len(job.failed_partitions), "partition")
            if job.failed_partitions
            else "-",
            job.last_error or "-",
        )

    channel = call.open(jobs_address or call.settings.jobs_address)
    call.out.rows(await upkeep.list_jobs(channel, timeout_ms=call.timeout_ms), columns, row)


@app.command()
@command()
async def history(
    call: Call,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number; 0 for all.")] = 100,
    type_: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Only this type, such as expired.")
    ] = "",
    queue: Annotated[str, typer.Option(help="Only this queue.")] = "",
    topic: Annotated[str, typer.Option(help="Only queues of this topic.")] = "",
    pass_id: Annotated[str, typer.Option("--pass", metavar="PASS", help="Only this pass.")] = "",
    partition: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Only this partition.")
    ] = None,
    storage_address: StorageAddress = None,
) -> None:
    """Show what was removed, newest first; with --json, one line each."""
    from tidemark.cli.display.layout import Column
    from tidemark.client.admin import upkeep

    columns = (
        Column("TIME (UTC)"),
        Column("TYPE"),
        Column("QUEUE", cut=True),
        Column("MESSAGES", right=True),
        Column("BYTES", right=True, importance=1),
        Column("PARTITION", right=True, importance=3),
        Column("PASS", cut=True, importance=2),
    )

    def row(removal: "Removal") -> tuple[str, ...]:
        return (
            units.moment(removal.execute_time_ms),
            removal.type,
            removal.lmq_name or "-",
            units.count(removal.messages),
            units.size(removal.bytes),
            str(removal.partition),
            removal.pass_id,
        )

    addresses = [storage_address] if storage_address else await _storages(call)
    rows = upkeep.list_retention_history(
        [call.open(address) for address in addresses],
        retention_type=type_,
        queue=queue,
        topic=topic,
        pass_id=pass_id,
        partition=partition,
        timeout_ms=call.timeout_ms,
    )
    await call.out.stream(rows, columns, row, limit=limit)


async def _storages(call: Call) -> "Sequence[str]":
    """The storage nodes of the settings, or all that share a store, as one of those names them."""
    from tidemark.client.admin import upkeep
    from tidemark.errors import TidemarkError

    named = call.settings.storage_addresses
    for address in named:
        with suppress(TidemarkError):  # the listing reports it, if it is needed
            found = await upkeep.shared_storages(call.open(address), timeout_ms=call.timeout_ms)
            return found or named
    return named
