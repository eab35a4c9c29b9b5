"""`tidemark dead ...` and `tidemark redrive`: dead letters by reason, source and time.

One filter serves all of them.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidemark.cli.command import Call, Command, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit, Yes, confirm, moment_ms
from tidemark.dead_letters import DeadLetterReason

if TYPE_CHECKING:
    from tidemark.client.admin.values import DeadLetterCount, DeadLetters, Redriven

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Dead letters of a dead-letter topic."
)

_PER_CALL: Final = 1000
"""Messages that one call moves, so that progress can be shown and no call takes long."""

DeadQueue = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The dead-letter topic, or one of its queues.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count without changing anything.")]
_Reason = Annotated[
    DeadLetterReason | None, typer.Option(help="Only dead letters with this reason.")
]
_Source = Annotated[str, typer.Option(metavar="QUEUE", help="Only dead letters from this queue.")]
_Moment = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="A duration ago, such as 2h, or an ISO time in UTC."),
]
_FILTER: Final = (
    ("reason", _Reason, None),
    ("source", _Source, ""),
    ("after", _Moment, None),
    ("before", _Moment, None),
)


def with_filter(function: Callable[..., Any]) -> Command:
    """Add the options of the filter to a command; they are passed as `chosen`, for the admin."""

    async def run(call: Call, **arguments: Any) -> None:
        from tidemark.clock import SystemClock

        now_ms = SystemClock().wall_ms()
        named = {name: arguments.pop(name) for name, _, _ in _FILTER}
        chosen = {
            "reason": named["reason"] or "",
            "source_lmq_name": named["source"],
            "after_time_ms": moment_ms("--after", named["after"], now_ms),
            "before_time_ms": moment_ms("--before", named["before"], now_ms),
        }
        await function(call, chosen=chosen, **arguments)

    own = list(inspect.signature(function, eval_str=True).parameters.values())
    parameters = [each for each in own if each.name != "chosen"]
    for name, annotation, default in _FILTER:
        kind = inspect.Parameter.KEYWORD_ONLY
        added = inspect.Parameter(name, kind, annotation=annotation, default=default)
        parameters.append(added)
    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    return run


@app.command()
@command(timeout_ms=60_000)
@with_filter
async def summary(call: Call, queue: DeadQueue, *, chosen: dict[str, Any]) -> None:
    """Count dead letters by reason and source, the most first."""
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    columns = (
        Column("REASON"),
        Column("SOURCE", cut=True),
        Column("MESSAGES", right=True),
        Column("OLDEST", right=True, importance=1),
    )
    now_ms = SystemClock().wall_ms()

    def row(each: "DeadLetterCount") -> tuple[str, ...]:
        return (
            each.reason or "-",
            each.source_lmq_name or "-",
            units.count(each.messages),
            units.ago(each.oldest_dead_time_ms, now_ms),
        )

    call.out.rows(await call.admin.count_dead_letters(queue, **chosen), columns, row)


@app.command("list")
@command(timeout_ms=60_000)
@with_filter
async def list_(call: Call, queue: DeadQueue, limit: Limit = 0, *, chosen: dict[str, Any]) -> None:
    """List dead letters; those that died together are one row. With --json, one line each.

    `tidemark queue peek` shows payloads, from the OFFSET of a row on.
    """
    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    columns = (
        Column("OFFSET", right=True),
        Column("MESSAGES", right=True),
        Column("REASON"),
        Column("SOURCE", cut=True),
        Column("AT", right=True, importance=3),
        Column("GROUP", cut=True, importance=2),
        Column("ATTEMPTS", right=True, importance=4),
        Column("DEAD FOR", right=True, importance=1),
        Column("PARTITION", right=True, importance=6),
        Column("DETAIL", cut=True, importance=5),
    )
    now_ms = SystemClock().wall_ms()

    def row(each: "DeadLetters") -> tuple[str, ...]:
        return (
            str(each.first_offset),
            units.count(each.messages),
            texts.printable(each.reason) or "-",
            texts.printable(each.source_lmq_name) or "-",
            str(each.source_offset),
            texts.printable(each.group) or "-",
            str(each.attempt_count),
            units.ago(each.dead_time_ms, now_ms),
            str(each.partition),
            texts.printable(each.detail) or "-",
        )

    found = call.admin.list_dead_letters(queue, **chosen)
    shown = await call.out.stream(found, columns, row, limit=limit)
    if shown and shown == limit and not call.out.as_json:
        call.out.note(f"Showing the first {units.count(shown)}; raise --limit for more.")


@app.command()
@command(timeout_ms=60_000)
@with_filter
async def delete(
    call: Call,
    queue: DeadQueue,
    limit: Limit = 0,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    chosen: dict[str, Any],
) -> None:
    """Delete dead letters for good."""
    admin = call.admin
    found = await admin.delete_dead_letters(queue, **chosen, limit=limit, dry_run=True)
    if dry_run:
        sentence = f"Would delete {units.counted(found, 'message')}."
        call.out.result({"messages": found}, sentence)
        return
    confirm(f"Delete {units.counted(found, 'dead letter')} of {queue}?", yes)
    with call.out.progress("Deleting", found) as advance:
        deleted = await admin.delete_dead_letters(queue, **chosen, limit=limit, on_progress=advance)
    call.out.result({"messages": deleted}, f"Deleted {units.counted(deleted, 'message')}.")


@command(timeout_ms=60_000)
@with_filter
async def redrive(
    call: Call,
    queue: DeadQueue,
    limit: Limit = 0,
    dry_run: DryRun = False,
    *,
    chosen: dict[str, Any],
) -> None:
    """Move dead letters back to the queues they came from."""
    from tidemark.client.admin.values import Redriven

    admin = call.admin
    found = await admin.redrive(queue, **chosen, limit=limit, dry_run=True)
    if dry_run:
        _print_result(call, found, "would move")
        return
    moved = 0
    with call.out.progress("Redriving", found.messages) as advance:
        while moved < found.messages:
            part = min(_PER_CALL, found.messages - moved)
            done = await admin.redrive(queue, **chosen, limit=part)
            if not done.messages:
                break  # another redrive was faster
            moved += done.messages
            advance(done.messages)
    _print_result(call, Redriven(moved, found.orphans), "moved")


def _print_result(call: Call, redriven: "Redriven", verb: str) -> None:
    sentence = f"{verb.capitalize()} {units.counted(redriven.messages, 'message')} back."
    if redriven.orphans:
        sentence += f" {units.count(redriven.orphans)} stay: their source topic no longer exists."
    call.out.result(redriven, sentence)
