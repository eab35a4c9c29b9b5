"""The progress of a pass on stderr: a bar on a terminal, otherwise a line whenever it changes."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from tidemark.cli.display import units
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from tidemark.client.admin.values import PassProgress

ASK_MS: Final = 1_000
BAR_CELLS: Final = 10

T = TypeVar("T")
Show = Callable[["PassProgress"], None]


async def watched(
    what: str, work: Awaitable[T], ask: "Callable[[], Awaitable[PassProgress | None]]"
) -> T:
    """The result of some work; `ask` is called once a second for the progress to show."""
    clock = SystemClock()
    working = asyncio.ensure_future(work)
    try:
        with _display(what) as show:
            while True:
                with suppress(TimeoutError):
                    return await clock.wait_for(asyncio.shield(working), ASK_MS)
                with suppress(TidemarkError):  # the work reports why it fails
                    progress = await ask()
                    if progress is not None:
                        show(progress)
    finally:
        working.cancel()


def describe(progress: "PassProgress") -> str:
    """The progress of a pass, in a few words."""
    if progress.rows_planned:
        planned, applied = units.count(progress.rows_planned), units.count(progress.rows_applied)
        left = units.count(progress.rows_left)
        return f"{planned} rows planned, {applied} applied, {left} left"
    if progress.tasks:
        return f"{progress.tasks_done} of {units.counted(progress.tasks, 'task')} done"
    return progress.phase.lower().replace("_spark", " Spark")


def drawn(progress: "PassProgress") -> str:
    """The same with a bar of text, once the rows of the plan are known."""
    if not progress.rows_planned:
        return describe(progress)
    full = BAR_CELLS * progress.rows_applied // progress.rows_planned
    return f"{'#' * full}{'.' * (BAR_CELLS - full)} {describe(progress)}"


@contextmanager
def _display(what: str) -> Iterator[Show]:
    if sys.stderr.isatty():
        with _bar(what) as show:
            yield show
        return
    before = ""

    def show_line(progress: "PassProgress") -> None:
        nonlocal before
        line = f"{what}: {describe(progress)}"
        if line != before:
            took = units.duration(progress.running_for_ms)
            print(f"{line}, after {took}", file=sys.stderr, flush=True)
            before = line

    yield show_line


@contextmanager
def _bar(what: str) -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    from tidemark.cli.display.terminal import console

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(progress: "PassProgress") -> None:
            total, done = progress.tasks, progress.tasks_done
            if progress.rows_planned:
                total, done = progress.rows_planned, progress.rows_applied
            bar.update(
                task,
                description=f"{what}: {describe(progress)}",
                total=total or None,
                completed=done,
            )

        yield show
