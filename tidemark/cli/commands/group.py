"""`tidemark group ...`: consumer groups of a queue and their progress."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import QueueName, Yes, confirm, moment_ms

if TYPE_CHECKING:
    from tidemark.client.admin.admin import Position
    from tidemark.client.admin.values import Group

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Consumer groups of a queue.")

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]


@app.command("list")
@command()
async def list_(call: Call, queue: QueueName) -> None:
    """List the groups of a queue with their progress."""
    show_groups(call, await call.admin.list_groups(queue))


@app.command()
@command()
async def reset(
    call: Call,
    queue: QueueName,
    group: GroupName,
    earliest: Annotated[
        bool, typer.Option("--earliest", help="Go back to the earliest stored message.")
    ] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Skip all stored messages.")] = False,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Continue with this many of the newest messages."),
    ] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Continue at this offset.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Continue with messages published since: 2h (ago), or 2026-01-31T12:00:00Z.",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Move the progress of a group; its reservations are revoked."""
    from tidemark.clock import SystemClock

    chosen: list[tuple[Position, int]] = []
    if earliest:
        chosen.append(("earliest", 0))
    if latest:
        chosen.append(("latest", 0))
    if last is not None:
        chosen.append(("last", last))
    if offset is not None:
        chosen.append(("offset", offset))
    at_ms = moment_ms("--at", at, SystemClock().wall_ms())
    if at_ms is not None:
        chosen.append(("time", at_ms))
    if len(chosen) != 1:
        raise typer.BadParameter("pass exactly one of --earliest, --latest, --last, --offset, --at")
    confirm(f"Move group {group} of {queue}?", yes)
    position, number = chosen[0]
    show_groups(call, await call.admin.reset_group(queue, group, position, number))


@app.command()
@command()
async def delete(call: Call, queue: QueueName, group: GroupName, yes: Yes = False) -> None:
    """Delete a group and its progress."""
    confirm(f"Delete group {group} of {queue}?", yes)
    await call.admin.delete_group(queue, group)
    call.out.result({"queue": queue, "group": group}, f"Deleted group {group} of {queue}.")


def show_groups(call: Call, groups: Sequence["Group"]) -> None:
    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column

    columns = (
        Column("GROUP", cut=True),
        Column("CURSOR", right=True),
        Column("UNSETTLED", right=True),
        Column("IN FLIGHT", right=True),
        Column("OWNER", cut=True, importance=1),
        Column("EPOCH", right=True, importance=2),
        Column("PARTITION", right=True, importance=3),
    )

    def row(group: "Group") -> tuple[str, ...]:
        return (
            group.name,
            units.count(group.cursor),
            units.count(group.unsettled),
            units.count(group.inflight),
            texts.printable(group.owner_client_id) or "-",
            str(group.owner_epoch or "-"),
            str(group.partition),
        )

    call.out.rows(groups, columns, row)
