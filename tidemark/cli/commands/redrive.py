"""`tidemark redrive`: moves dead letters back to the queues they came from."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit
from tidemark.dead_letters import DeadLetterReason

if TYPE_CHECKING:
    from tidemark.client.admin.values import Redriven

_PER_CALL: Final = 1000
"""Messages per call, so that progress can be shown and no call takes long."""

Moment = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="A duration ago, such as 2h, or an ISO time in UTC."),
]


@command(timeout_ms=60_000)
async def redrive(
    call: Call,
    queue: Annotated[
        str, typer.Argument(metavar="QUEUE", help="The dead-letter topic, or one of its queues.")
    ],
    reason: Annotated[
        DeadLetterReason | None, typer.Option(help="Only dead letters with this reason.")
    ] = None,
    source: Annotated[
        str, typer.Option(metavar="QUEUE", help="Only dead letters from this queue.")
    ] = "",
    after: Moment = None,
    before: Moment = None,
    limit: Limit = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count without changing anything.")
    ] = False,
) -> None:
    """Move dead letters back to the queues they came from."""
    from tidemark.client.admin.values import Redriven
    from tidemark.clock import SystemClock

    now_ms = SystemClock().wall_ms()
    chosen: dict[str, Any] = {
        "reason": reason or "",
        "source_lmq_name": source,
        "after_time_ms": _moment_ms("--after", after, now_ms),
        "before_time_ms": _moment_ms("--before", before, now_ms),
    }
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


def _moment_ms(option: str, text: str | None, now_ms: int) -> int | None:
    if text is None:
        return None
    try:
        return units.parse_moment_ms(text, now_ms)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _print_result(call: Call, redriven: "Redriven", verb: str) -> None:
    sentence = f"{verb.capitalize()} {units.counted(redriven.messages, 'message')} back."
    if redriven.orphans:
        sentence += f" {units.count(redriven.orphans)} stay: their source topic no longer exists."
    call.out.result(redriven, sentence)
