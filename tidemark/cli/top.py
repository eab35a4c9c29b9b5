"""`tidemark top`: a live view of the cluster, full-screen on a terminal.

Samples the partitions in an interval and shows what `top_view` makes of two samples, drawn by
`top_screen`. A broker that stops answering is waited for, with the last figures on the screen.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemark.cli import units
from tidemark.cli.commands import Call, command
from tidemark.cli.options import LifecycleAddress, duration_ms

if TYPE_CHECKING:
    from tidemark.cli.top_screen import Line
    from tidemark.cli.top_view import Sample


@command()
async def top(
    call: Call,
    interval: Annotated[
        int,
        typer.Option(
            parser=duration_ms, metavar="DURATION", show_default="1s", help="Between two samples."
        ),
    ] = 1000,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="End after that many; 0 goes on.")
    ] = 0,
    lifecycle_address: LifecycleAddress = None,
) -> None:
    """Show rates, depth, queues, reservations and sweeps, live; q or Ctrl-C ends it.

    In a pipe it prints one view after the other; with --json an object per line.
    """
    from tidemark.cli.top_screen import Screen
    from tidemark.cli.top_view import view_of
    from tidemark.clock import SystemClock
    from tidemark.errors import TidemarkError

    if interval < 100:
        raise typer.BadParameter("--interval is at least 100ms")
    clock = SystemClock()
    source = _Source(call, lifecycle_address or call.settings.lifecycle_address)
    before, trouble = await source.sample(clock.monotonic_ms()), ""
    screen = Screen(call.address)
    view = view_of(None, before)
    live = call.out.on_terminal and not call.out.as_json
    with _display(live) as show, _key_pressed("q", live) as quit_asked:
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
    """Where samples come from: the broker, and lifecycle if it answers."""

    def __init__(self, call: Call, lifecycle_address: str) -> None:
        self._lifecycle = call.open(lifecycle_address)
        self._admin = call.admin
        self._timeout_ms = call.timeout_ms

    async def sample(self, now_ms: int) -> "Sample":
        from tidemark.cli.partitions import ask_sweepers
        from tidemark.cli.top_view import Sample

        partitions, (sweepers, why_not) = await asyncio.gather(
            self._admin.list_partitions(), ask_sweepers(self._lifecycle, self._timeout_ms)
        )
        return Sample(now_ms, partitions, sweepers, why_not)


class _Display:
    """The full screen; does nothing where there is none."""

    def __init__(self, live: Any) -> None:
        self._live = live

    @property
    def size(self) -> tuple[int, int]:
        size = self._live.console.size
        return size.width, size.height

    def __call__(self, lines: list["Line"]) -> None:
        from rich.text import Text

        whole = Text("\n", no_wrap=True, overflow="crop").join(
            Text(line.text, style=line.style) for line in lines
        )
        self._live.update(whole, refresh=True)


@contextmanager
def _display(live: bool) -> Iterator[_Display]:
    if not live:
        yield _Display(None)
        return
    from rich.live import Live

    from tidemark.cli.terminal import console

    with Live(console=console(), screen=True, auto_refresh=False) as screen:
        yield _Display(screen)


@contextmanager
def _key_pressed(key: str, live: bool) -> Iterator[asyncio.Event]:
    """An event that is set when the key is pressed, without Enter."""
    pressed = asyncio.Event()
    if not live or not sys.stdin.isatty():
        yield pressed
        return
    import os
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if key.encode() in os.read(keyboard, 1024).lower():
            pressed.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
