"""`tidemark cluster`: the members of the cluster, and the partitions that each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, Refused, command

if TYPE_CHECKING:
    from tidemark.client.admin.values import Member, Partition

app = typer.Typer(rich_markup_mode=None)

_STATIC = "members are static (TIDEMARK_BROKERS, TIDEMARK_STORAGE_ADDRESSES)"


@app.callback(invoke_without_command=True)
@command()
async def cluster(call: Call, context: typer.Context) -> None:
    """Show the members of the cluster, and who holds each partition."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column

    members = await call.admin.list_members()
    partitions = await call.admin.list_partitions()
    if call.out.as_json:
        holders = [
            {
                "partition": each.partition,
                "state": each.state,
                "broker_id": each.broker_id,
                "broker_address": each.broker_address,
                "broker_epoch": each.broker_epoch,
                "storage_address": each.storage_address,
            }
            for each in partitions
        ]
        call.out.document({"members": [asdict(each) for each in members], "partitions": holders})
        return

    def member(each: "Member") -> tuple[str, ...]:
        held = " ".join(map(str, each.partitions)) or "-"
        return each.kind, each.id or "-", each.address, "no" if each.error else "yes", held

    def partition(each: "Partition") -> tuple[str, ...]:
        return (
            str(each.partition),
            each.state,
            each.broker_id or "-",
            str(each.broker_epoch),
            each.storage_address or "-",
        )

    call.out.rows(
        members,
        (
            Column("MEMBER"),
            Column("ID", cut=True),
            Column("ADDRESS", cut=True),
            Column("ANSWERS"),
            Column("PARTITIONS", cut=True),
        ),
        member,
    )
    call.out.print("")
    call.out.rows(
        partitions,
        (
            Column("PARTITION", right=True),
            Column("STATE"),
            Column("BROKER", cut=True),
            Column("EPOCH", right=True),
            Column("STORAGE", cut=True),
        ),
        partition,
    )
    for each in members:
        if each.error:
            call.out.print(f"{each.address}: {texts.printable(each.error)}")


@app.command()
@command()
async def move(
    call: Call,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="Its number.")],
    broker: Annotated[str, typer.Argument(metavar="BROKER", help="Id of a broker.")],
) -> None:
    """Move a partition to another broker; refused while members are static."""
    _find(await call.admin.list_members(), broker, "BROKER")
    if all(each.partition != partition for each in await call.admin.list_partitions()):
        raise Refused(f"there is no partition {partition}")
    raise Refused(f"partition {partition} stays where it is: {_STATIC}")


@app.command()
@command()
async def drain(
    call: Call,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="Id of a broker or storage node.")
    ],
) -> None:
    """Take all partitions from a member; refused while members are static."""
    found = _find(await call.admin.list_members(), member)
    if found.kind == "STORAGE":
        raise Refused(f"{member} has the only copy of its partitions, which do not move (rocksdb)")
    raise Refused(f"{member} keeps its partitions: {_STATIC}")


def _find(members: "list[Member]", member: str, kind: str = "") -> "Member":
    for each in members:
        if member in (each.id, each.address) and kind in ("", each.kind):
            return each
    raise Refused(f"there is no {kind.lower() or 'member'} {member}")
