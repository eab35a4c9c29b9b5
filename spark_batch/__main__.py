"""`python -m spark_batch run|serve|report`: one pass, the scheduler, or an HTML report."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spark_batch.app import retention
from spark_batch.passes.findings import Finding, describe_failures
from spark_batch.passes.outcome import JobName, Pass
from spark_batch.passes.without_work import pass_without_work
from spark_batch.session import BRIEF, start_session
from tidemark import telemetry
from tidemark.clock import Clock, SystemClock
from tidemark.errors import TidemarkError
from tidemark.local.java import why_no_spark
from tidemark.service.process import CANNOT_START, main
from tidemark.settings import RetentionSettings, load_or_exit

SERVICE = "tidemark-retention"


def run(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    settings = load_or_exit(RetentionSettings)
    missing = why_no_spark(settings.java_home)
    if missing:
        print(missing, file=sys.stderr)
        return CANNOT_START
    if options.command == "serve":
        status = 0
        try:
            main(SERVICE, RetentionSettings, retention)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        # Everything is stopped and reported. Threads that are still starting Spark or waiting for
        # storage must not delay the end of the process. Java ends when its input is closed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    started = telemetry.setup(SERVICE, settings.telemetry)
    try:
        if options.command == "report":
            return _report(settings, options.output)
        return _run_once(settings, options.job, options.dry_run)
    except TidemarkError as error:
        print(error.detail, file=sys.stderr)
        return 1
    finally:
        started.shutdown()


def _run_once(settings: RetentionSettings, job: str, dry_run: bool) -> int:
    clock = SystemClock()
    done = pass_without_work(settings, JobName(job), dry_run, clock)
    if done is None:
        done = _run_on_spark(settings, job, dry_run, clock)
    show(done.findings, dry_run, Console(width=None if sys.stdout.isatty() else 120))
    if done.failed:
        print(describe_failures(done.failed), file=sys.stderr)
    return 1 if done.failed else 0


def _run_on_spark(settings: RetentionSettings, job: str, dry_run: bool, clock: Clock) -> Pass:
    from spark_batch.passes.jobs import Jobs

    spark = start_session(settings)
    try:
        jobs = Jobs(spark, settings, clock)
        return (jobs.retention if job == JobName.RETENTION else jobs.eviction)(dry_run)
    finally:
        spark.stop()


def _report(settings: RetentionSettings, output: Path) -> int:
    from spark_batch.report import write_report

    spark = start_session(settings, BRIEF)
    try:
        write_report(spark, ",".join(settings.storage_addresses), output, SystemClock())
    finally:
        spark.stop()
    print(output.resolve())
    return 0


def show(findings: Sequence[Finding], dry_run: bool, console: Console) -> None:
    """Print removals or planned removals of a pass, per topic and rule."""
    table = Table(title="Dry run: nothing was changed" if dry_run else None)
    table.add_column("topic")
    table.add_column("rule")
    table.add_column("due" if dry_run else "removed", justify="right")
    table.add_column("why not")
    for each in findings:
        table.add_row(each.topic, each.rule, f"{each.due:,}", each.why_not)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spark_batch", description="Retention and eviction on PySpark."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    once = commands.add_parser("run", help="run one pass and exit")
    once.add_argument("job", choices=("retention", "eviction"))
    once.add_argument("--dry-run", action="store_true", help="show what is due; change nothing")
    commands.add_parser("serve", help="run passes on their intervals until stopped")
    report = commands.add_parser("report", help="write an HTML report about queues and retention")
    report.add_argument(
        "--output", type=Path, default=Path("tidemark-report.html"), help="(%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run())
