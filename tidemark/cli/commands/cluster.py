"""`tidemark cluster`: the members of the cluster, and the partitions that each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, Refused, command

if TYPE_CHECKING:
    from tidemark.client.admin.values import Cluster, Member, Partition

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@command()
async def cluster(call: Call, context: typer.Context) -> None:
    """Show the members of the cluster, and who holds each partition."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column

    described = await call.admin.describe_cluster()
    partitions = await call.admin.list_partitions()
    members, assigned = described.members, described.assigned
    if call.out.as_json:
        holders = [
            {
                "partition": each.partition,
                "state": each.state,
                "assigned_broker_id": _assigned_to(described, each),
                "pinned": each.partition in assigned and assigned[each.partition].pinned,
                "broker_id": each.broker_id,
                "broker_address": each.broker_address,
                "broker_epoch": each.broker_epoch,
                "storage_address": each.storage_address,
            }
            for each in partitions
        ]
        call.out.document(
            {
                "assignment": {
                    "version": described.assignment_version,
                    "static": described.static_members,
                    "registry_error": described.registry_error,
                },
                "members": [asdict(each) for each in members],
                "partitions": holders,
            }
        )
        return

    def member(each: "Member") -> tuple[str, ...]:
        held = " ".join(map(str, each.partitions)) or "-"
        answers = "no" if each.error else "drained" if each.draining else "yes"
        return each.kind, each.id or "-", each.address, answers, held

    def partition(each: "Partition") -> tuple[str, ...]:
        return (
            str(each.partition),
            each.state,
            _holder(described, each),
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
    call.out.print("")
    kind = "static members" if described.static_members else "registry"
    call.out.print(f"Assignment {described.assignment_version}, {kind}")
    if described.registry_error:
        call.out.print(f"The registry is away: {texts.printable(described.registry_error)}")


def _assigned_to(described: "Cluster", partition: "Partition") -> str:
    assigned = described.assigned.get(partition.partition)
    return "" if assigned is None else assigned.broker_id


def _holder(described: "Cluster", partition: "Partition") -> str:
    """The broker that has claimed a partition, and the one that it moves to."""
    holder, assigned = partition.broker_id or "-", _assigned_to(described, partition)
    return holder if assigned in ("", partition.broker_id) else f"{holder} -> {assigned}"


@app.command()
@command()
async def move(
    call: Call,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="Its number.")],
    broker: Annotated[str, typer.Argument(metavar="BROKER", help="Id of a broker.")],
) -> None:
    """Move a partition to another broker, which keeps it; refused while members are static."""
    found = _find(await call.admin.list_members(), broker, "BROKER")
    version = await call.admin.move_partition(partition, found.id)
    call.out.result(
        {"partition": partition, "broker_id": found.id, "assignment_version": version},
        f"Partition {partition} moves to {found.id} (assignment {version})",
    )


@app.command()
@command()
async def drain(
    call: Call,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="Id of a broker or storage node.")
    ],
) -> None:
    """Take all partitions from a broker until it starts again; refused while members are static."""
    found = _find(await call.admin.list_members(), member)
    if found.kind == "STORAGE":
        raise Refused(f"{member} has the only copy of its partitions, which do not move (rocksdb)")
    version = await call.admin.drain_member(found.id)
    call.out.result(
        {"member_id": found.id, "assignment_version": version},
        f"{found.id} gives its partitions to the other brokers (assignment {version})",
    )


def _find(members: "list[Member]", member: str, kind: str = "") -> "Member":
    for each in members:
        if member in (each.id, each.address) and kind in ("", each.kind):
            return each
    raise Refused(f"there is no {kind.lower() or 'member'} {member}")
