"""The output of a command: tables and sentences for people, JSON for programs.

On a terminal, tables fit its width; in a pipe they are plain and complete. With `--json`, stdout
carries only JSON: one document, or one object per line for streams. Notes go to stderr, and so does
progress if stderr is a terminal.
"""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from tidemark.cli.display.layout import Column, Layout, Row
from tidemark.cli.display.texts import without_bytes

T = TypeVar("T")

_STREAM_ROWS = 1000
"""Rows of a stream that are sampled to compute column widths."""


class Output:
    """The output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.on_terminal = sys.stdout.isatty()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # not all can show all text

    # --- results -------------------------------------------------------------------------------

    def result(self, value: Any, text: str) -> None:
        """One result: a JSON document, or a sentence."""
        if self.as_json:
            self.document(value)
        else:
            self.print(text)

    def document(self, value: Any) -> None:
        print(json.dumps(_plain(value), indent=2, ensure_ascii=False))

    def json_line(self, value: Any) -> None:
        print(json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")))

    def rows(
        self, values: Sequence[T], columns: Sequence[Column], row_of: Callable[[T], Row]
    ) -> None:
        """A list: a JSON array, or a table."""
        if self.as_json:
            self.document(list(values))
        else:
            self.table(columns, [row_of(value) for value in values])

    async def stream(
        self,
        values: AsyncIterator[T],
        columns: Sequence[Column],
        row_of: Callable[[T], Row],
        *,
        limit: int = 0,
    ) -> int:
        """A list of any length: JSON lines, or a table printed as rows arrive."""
        shown = 0
        layout: Layout | None = None
        sample: list[Row] = []
        async for value in values:
            shown += 1
            if self.as_json:
                self.json_line(value)
            elif layout is not None:
                self.print(layout.line(row_of(value)))
            else:
                sample.append(row_of(value))
                if len(sample) == _STREAM_ROWS:
                    layout = self.table(columns, sample)
            if shown == limit:
                break
        if layout is None and not self.as_json:
            self.table(columns, sample)
        return shown

    # --- text ----------------------------------------------------------------------------------

    def table(self, columns: Sequence[Column], rows: Iterable[Row]) -> Layout:
        rows = list(rows)
        layout = Layout(columns, rows, self.width)
        self.print(layout.header, style="bold")
        for row in rows:
            self.print(layout.line(row))
        return layout

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair per line."""
        pairs = list(pairs)
        widest = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.print(f"{name:<{widest}}  {value}".rstrip())

    def print(self, line: str, style: str = "") -> None:
        if style and self.on_terminal:
            from rich.text import Text

            self._console().print(Text(line, style=style), no_wrap=True, crop=True)
        else:
            print(line)

    def note(self, line: str) -> None:
        """A remark for people, on stderr."""
        print(line, file=sys.stderr)

    @property
    def width(self) -> int | None:
        """Width of the terminal; None if there is none."""
        return self._console().width if self.on_terminal else None

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A progress bar on stderr; the yielded function advances it."""
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        from tidemark.cli.display.terminal import console

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda advance: progress.advance(task, advance)

    def _console(self) -> Any:
        from tidemark.cli.display.terminal import console

        return console()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return without_bytes(asdict(value))
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return without_bytes(value)
