"""`tidemark outbox ...`: messages that wait in a partition for a destination that refuses them."""

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit, Yes, confirm

if TYPE_CHECKING:
    from tidemark.client.admin.values import OutboxEntry

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Dead letters and redriven messages on their way.",
)


@app.command("list")
@command()
async def list_(
    call: Call,
    destination: Annotated[
        str, typer.Argument(metavar="[QUEUE]", help="Only entries for this queue.")
    ] = "",
    limit: Limit = 0,
) -> None:
    """List entries that wait in the outboxes of all partitions; with --json, one line each."""
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    columns = (
        Column("ENTRY", right=True),
        Column("DESTINATION", cut=True),
        Column("MESSAGES", right=True),
        Column("REASON", importance=1),
        Column("WAITING", right=True),
        Column("RETRY IN", right=True, importance=2),
    )
    now_ms = SystemClock().wall_ms()

    def row(each: "OutboxEntry") -> tuple[str, ...]:
        retry_ms = each.retry_time_ms
        return (
            f"{each.partition}:{each.sequence}",
            each.destination_lmq_name,
            units.count(each.messages),
            each.reason,
            units.ago(each.create_time_ms, now_ms),
            "-" if retry_ms is None else units.duration(max(0, retry_ms - now_ms)),
        )

    shown = await call.out.stream(call.admin.list_outbox(destination), columns, row, limit=limit)
    if shown and shown == limit and not call.out.as_json:
        call.out.note(f"Showing the first {units.count(shown)}; raise --limit for more.")


@app.command()
@command()
async def drop(
    call: Call,
    destination: Annotated[str, typer.Argument(metavar="QUEUE", help="Where the messages go.")],
    entry: Annotated[
        str, typer.Option(metavar="ENTRY", help="Only this entry: PARTITION:SEQUENCE, as listed.")
    ] = "",
    yes: Yes = False,
) -> None:
    """Drop entries that wait for a queue, for good."""
    partition, separator, sequence = entry.partition(":")
    if entry and not (separator and partition.isdecimal() and sequence.isdecimal()):
        raise typer.BadParameter(f"{entry!r} is not PARTITION:SEQUENCE")
    what = f"entry {entry}" if entry else "all messages"
    confirm(f"Drop {what} on the way to {destination}?", yes)
    with call.out.progress("Dropping", None) as advance:
        dropped = await call.admin.drop_outbox(
            destination,
            partition=int(partition) if entry else None,
            sequence=int(sequence) if entry else 0,
            on_progress=advance,
        )
    call.out.result({"messages": dropped}, f"Dropped {units.counted(dropped, 'message')}.")
