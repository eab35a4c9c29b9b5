"""Full screen and keyboard for live views; neither has an effect without a terminal."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.text import Text

from tidemark.cli.display.terminal import console
from tidemark.cli.top.screen import Line


class Display:
    """The full screen; does nothing without a terminal."""

    def __init__(self, live: Any) -> None:
        self._live = live

    @property
    def size(self) -> tuple[int, int]:
        size = self._live.console.size
        return size.width, size.height

    def __call__(self, lines: list[Line]) -> None:
        whole = Text("\n", no_wrap=True, overflow="crop").join(
            Text(line.text, style=line.style) for line in lines
        )
        self._live.update(whole, refresh=True)


@contextmanager
def display(live: bool) -> Iterator[Display]:
    if not live:
        yield Display(None)
        return
    with Live(console=console(), screen=True, auto_refresh=False) as screen:
        yield Display(screen)


@contextmanager
def key_pressed(key: str, live: bool) -> Iterator[asyncio.Event]:
    """An event that is set when the key is pressed; Enter is not needed."""
    pressed = asyncio.Event()
    if not live or not sys.stdin.isatty():
        yield pressed
        return
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
