"""`tidemark cluster`: the members of the cluster, and the partitions that each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, Refused, command
from tidemark.cli.options import PartitionNumber, Yes, confirm

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
                "storage_epoch": each.storage_epoch,
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
            str(each.storage_epoch or "-"),
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
            Column("STORAGE EPOCH", right=True),
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
    partition: PartitionNumber,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="Id or address of a broker or storage node.")
    ],
) -> None:
    """Move a partition to another member, which keeps it; refused while members are static."""
    found = _find(await call.admin.list_members(), member)
    if found.kind == "STORAGE":
        _check_moves(found)
        version = await call.admin.move_partition(partition, storage_id=found.id)
    else:
        version = await call.admin.move_partition(partition, found.id)
    call.out.result(
        {
            "partition": partition,
            f"{found.kind.lower()}_id": found.id,
            "assignment_version": version,
        },
        f"Partition {partition} moves to {found.id} (assignment {version})",
    )


@app.command()
@command()
async def drain(
    call: Call,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="Id or address of a broker or storage node.")
    ],
) -> None:
    """Take all partitions from a member until it starts again; refused while members are static."""
    found = _find(await call.admin.list_members(), member)
    if found.kind == "STORAGE":
        _check_moves(found)
    version = await call.admin.drain_member(found.id)
    others = "storage nodes" if found.kind == "STORAGE" else "brokers"
    call.out.result(
        {"member_id": found.id, "assignment_version": version},
        f"{found.id} gives its partitions to the other {others} (assignment {version})",
    )


@app.command("confirm-loss")
@command()
async def confirm_loss(
    call: Call,
    partition: PartitionNumber,
    yes: Yes = False,
) -> None:
    """Let a partition that has lost commits (DATA_LOST) serve the rest of its data.

    Messages of the lost commits are gone, and messages that they acknowledged come again. If the
    data can be brought back, do that instead.
    """
    from tidemark.cli.display import texts

    faults = [
        fault
        for each in await call.admin.list_partitions()
        if each.partition == partition
        for fault in each.faults
        if fault.reason == "DATA_LOST"
    ]
    if not faults:
        raise Refused(f"partition {partition} has lost nothing")
    call.out.note(f"Partition {partition}: {texts.printable(faults[0].detail)}")
    confirm(f"Serve partition {partition} without the lost commits?", yes)
    lost = await call.admin.confirm_loss(partition)
    call.out.result(
        {
            "partition": partition,
            "witnessed_commit": lost.witnessed_commit,
            "found_commit": lost.found_commit,
        },
        f"Partition {partition} serves what it has up to commit {lost.found_commit}; commit "
        f"{lost.witnessed_commit} had been answered.",
    )


def _check_moves(storage: "Member") -> None:
    """Only nodes that share a store through a registry are known by their address."""
    if storage.id != storage.address:
        raise Refused(
            f"the partitions of {storage.id or storage.address} do not move: they are in its data "
            "directory (rocksdb), or no registry assigns them (redis)"
        )


def _find(members: "list[Member]", member: str) -> "Member":
    for each in members:
        if member in (each.id, each.address):
            return each
    raise Refused(f"there is no member {member}")
