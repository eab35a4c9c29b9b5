"""Tables as lines of text: which columns fit, their widths, and which are truncated.

Pure. A table that is too wide first drops its least important columns, then truncates the widest
ones that allow it. Numbers are never truncated and lines never wrap. Without a width, as in a pipe,
everything is shown in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size

_GAP: Final = 2
_CUT_MIN: Final = 8
"""Minimum width of a truncated column."""


@dataclass(frozen=True, slots=True)
class Column:
    """How one column is laid out."""

    title: str
    right: bool = False
    """Right-aligned, for numbers."""
    importance: int = 0
    """0 is always shown; of the others, the highest number is dropped first."""
    cut: bool = False
    """Whether long values may be truncated."""


Row = Sequence[str]


class Layout:
    """Column widths, computed from a sample of rows and used for all further rows."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> None:
        self._width = width
        self._columns = columns
        self._widths = [
            max(cell_len(text) for text in texts)
            for texts in zip([each.title for each in columns], *rows, strict=True)
        ]
        self._shown = list(range(len(columns)))
        if width is not None:
            self._drop(width)
            self._cut(width)

    @property
    def header(self) -> str:
        return self.line([each.title for each in self._columns])

    def line(self, row: Row) -> str:
        """One row, without trailing spaces."""
        cells = (self._cell(at, row[at]) for at in self._shown)
        line = (" " * _GAP).join(cells).rstrip()
        if self._width is not None and cell_len(line) > self._width:  # wider than the sample
            return set_cell_size(line, self._width - 1) + "…"
        return line

    def _cell(self, at: int, text: str) -> str:
        column, width = self._columns[at], self._widths[at]
        excess = cell_len(text) - width
        if excess > 0 and column.cut and self._width is not None:
            return set_cell_size(text, width - 1) + "…"
        padding = " " * -excess
        return padding + text if column.right else text + padding

    def _needed(self) -> int:
        return sum(self._widths[at] for at in self._shown) + _GAP * (len(self._shown) - 1)

    def _drop(self, width: int) -> None:
        """Drop columns while truncation alone would leave too little of the others."""
        while True:
            excess = self._needed() - width
            spare = sum(
                max(0, self._widths[at] - max(_CUT_MIN, cell_len(self._columns[at].title)) * 3)
                for at in self._shown
                if self._columns[at].cut
            )
            least = max(self._shown, key=lambda at: self._columns[at].importance)
            if excess <= spare or not self._columns[least].importance:
                return
            self._shown.remove(least)

    def _cut(self, width: int) -> None:
        while (excess := self._needed() - width) > 0:
            cuttable = [
                at for at in self._shown if self._columns[at].cut and self._widths[at] > _CUT_MIN
            ]
            if not cuttable:
                return
            widest = max(cuttable, key=lambda at: self._widths[at])
            self._widths[widest] = max(_CUT_MIN, self._widths[widest] - excess)
