"""`tidemark top`: a live view of the cluster, full-screen on a terminal.

Samples the partitions at an interval, derives rates from two samples (`top.view`) and draws them
(`top.screen`). While the broker does not answer, the last figures stay on the screen.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import LifecycleAddress, duration_ms

if TYPE_CHECKING:
    from tidemark.cli.top.view import Sample


@command()
async def top(
    call: Call,
    interval: Annotated[
        int,
        typer.Option(
            parser=duration_ms,
            metavar="DURATION",
            show_default="1s",
            help="Time between two samples.",
        ),
    ] = 1000,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Number of views; 0 for no end.")
    ] = 0,
    lifecycle_address: LifecycleAddress = None,
) -> None:
    """Show live rates, depth, queues, reservations and sweeps; q or Ctrl-C ends it.

    In a pipe it prints one view after the other; with --json, one object per line.
    """
    from dataclasses import asdict

    from tidemark.cli.top.full_screen import display, key_pressed
    from tidemark.cli.top.screen import Screen
    from tidemark.cli.top.view import view_of
    from tidemark.clock import SystemClock
    from tidemark.errors import TidemarkError

    if interval < 100:
        raise typer.BadParameter("--interval must be at least 100ms")
    clock = SystemClock()
    source = _Source(call, lifecycle_address or call.settings.lifecycle_address)
    before, trouble = await source.sample(clock.monotonic_ms()), ""
    screen = Screen(call.address)
    view = view_of(None, before)
    live = call.out.on_terminal and not call.out.as_json
    with display(live) as show, key_pressed("q", live) as quit_asked:
        shown = 0
        while not count or shown < count:
            if live:
                now = f"{units.moment(clock.wall_ms())} UTC"
                width, height = show.size
                show(screen.lines(view, width, height, clock=now, trouble=trouble))
            with suppress(TimeoutError):
                await clock.wait_for(quit_asked.wait(), interval)
                return
            try:
                after = await source.sample(clock.monotonic_ms())
            except TidemarkError as error:
                if not live:
                    raise
                trouble = str(error)
                continue
            view, trouble = view_of(before, after), ""
            screen.add(view)
            before = after
            shown += 1
            if call.out.as_json:
                call.out.json_line({"time_ms": clock.wall_ms(), **asdict(view)})
            elif not live:
                now = f"{units.moment(clock.wall_ms())} UTC"
                for line in screen.lines(view, None, None, clock=now):
                    call.out.print(line.text)
                call.out.print("")
            sys.stdout.flush()


class _Source:
    """Takes samples from the broker, and from lifecycle if it answers."""

    def __init__(self, call: Call, lifecycle_address: str) -> None:
        self._address = lifecycle_address
        self._lifecycle = call.open(lifecycle_address)
        self._admin = call.admin
        self._timeout_ms = call.timeout_ms

    async def sample(self, now_ms: int) -> "Sample":
        from tidemark.cli.commands.partitions import ask_sweepers
        from tidemark.cli.top.view import Sample

        partitions = await self._admin.list_partitions()
        sweepers, why_not = await ask_sweepers(self._lifecycle, self._address, self._timeout_ms)
        return Sample(now_ms, partitions, sweepers, why_not)
