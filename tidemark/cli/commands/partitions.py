"""`tidemark partitions`: health, brokers, figures and sweeps of the partitions, and their time."""

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import LifecycleAddress, PartitionNumber, Yes, confirm

if TYPE_CHECKING:
    import grpc

    from tidemark.client.admin.values import Partition, Sweeper


app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@command()
async def partitions(
    call: Call, context: typer.Context, lifecycle_address: LifecycleAddress = None
) -> None:
    """Show health, brokers, figures and sweeps of the partitions.

    STATE is the state in storage; LINK is the link of the called broker to the partition.
    """
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    asked = lifecycle_address or call.settings.lifecycle_address
    lifecycle = call.open(asked)
    found = await call.admin.list_partitions()
    sweepers, why_not = await ask_sweepers(lifecycle, asked, call.timeout_ms)
    if call.out.as_json:
        swept = {number: asdict(sweeper) for number, sweeper in sweepers.items()}
        call.out.document([asdict(each) | {"sweep": swept.get(each.partition)} for each in found])
        return
    columns = (
        Column("PARTITION", right=True),
        Column("STATE"),
        Column("LINK"),
        Column("BROKER", cut=True),
        Column("EPOCH", right=True, importance=4),
        Column("QUEUES", right=True),
        Column("LOADED", right=True),
        Column("MESSAGES", right=True),
        Column("BYTES", right=True, importance=3),
        Column("RESERVED", right=True, importance=1),
        Column("SWEEP", importance=2),
        Column("LAST", right=True, importance=5),
        Column("NEXT IN", right=True, importance=6),
        Column("ADDRESS", cut=True, importance=7),
    )
    now_ms = SystemClock().wall_ms()

    def row(each: "Partition") -> tuple[str, ...]:
        sweeper = sweepers.get(each.partition)
        return (
            str(each.partition),
            each.state,
            each.link_state,
            each.broker_id or "-",
            str(each.broker_epoch),
            units.count(each.queues),
            units.count(each.materialized_queues),
            units.count(each.messages),
            units.size(each.bytes),
            units.count(each.reservations),
            sweeper.state if sweeper else "-",
            units.ago(sweeper.last_sweep_time_ms, now_ms) if sweeper else "-",
            units.duration(sweeper.next_in_ms) if sweeper else "-",
            each.broker_address or "-",
        )

    call.out.rows(found, columns, row)
    for each in found:
        for fault in each.faults:
            since = units.ago(fault.since_time_ms, now_ms)
            detail = texts.printable(fault.detail)
            call.out.print(f"partition {each.partition}: {fault.reason} for {since}: {detail}")
    for each in found:
        if each.link_state != "UP":
            detail = texts.printable(each.link_detail)
            call.out.print(f"link of {call.address} to {each.partition}: {detail}")
    for number, sweeper in sweepers.items():
        if sweeper.last_error:
            call.out.print(f"sweep of {number}: {texts.printable(sweeper.last_error)}")
    if why_not:
        call.out.note(f"Sweeps unknown: {why_not}")


@app.command("confirm-time")
@command()
async def confirm_time(
    call: Call,
    partition: PartitionNumber,
    to_wall_clock: Annotated[
        bool,
        typer.Option(
            "--to-wall-clock",
            help="The clock was wrong and is corrected: return partition time to it first.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Confirm partition time after a jump of the clock (CLOCK_JUMPED): deletions go on.

    Without --to-wall-clock the present time is right, and messages that are past their time are
    deleted. Stored times stay as they are.
    """
    what = (
        "Return the time of partition {} to the wall clock"
        if to_wall_clock
        else ("Confirm the time of partition {}")
    )
    confirm(f"{what.format(partition)} and resume deletions?", yes)
    time_ms = await call.admin.confirm_partition_time(partition, to_wall_clock=to_wall_clock)
    call.out.result(
        {"partition": partition, "partition_time_ms": time_ms},
        f"Partition {partition} is at {units.moment(time_ms)} UTC; deletions go on.",
    )


async def ask_sweepers(
    lifecycle: "grpc.aio.Channel", address: str, timeout_ms: int | None
) -> tuple[dict[int, "Sweeper"], str]:
    """The sweepers by partition; if lifecycle does not answer, none and the reason."""
    from tidemark.client.admin.upkeep import list_sweepers
    from tidemark.errors import TidemarkError

    try:
        sweepers = await list_sweepers(lifecycle, timeout_ms=timeout_ms)
    except TidemarkError as error:
        return {}, f"{error.reason} at {address}"
    return {each.partition: each for each in sweepers}, ""
