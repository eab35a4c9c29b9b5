"""Tables as lines of text: which columns fit, how wide each is, what is cut.

Pure. A table that is too wide first loses the columns that matter least, then cuts the widest of
those that may be cut; numbers are never cut and no line is ever wrapped. Without a width, as in a
pipe, everything is shown whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size

_GAP: Final = 2
_CUT_MIN: Final = 8
"""Least cells of a column that is cut."""


@dataclass(frozen=True, slots=True)
class Column:
    """How one column behaves."""

    title: str
    right: bool = False
    """Numbers are aligned at their end."""
    importance: int = 0
    """0 always stays; of the others the highest number leaves first."""
    cut: bool = False
    """Whether long values may be cut."""


Row = Sequence[str]


class Layout:
    """Widths for a table, found from a sample of its rows; further rows are set in the same."""

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
        """One row, without spaces at its end."""
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
        """Let columns go while the others would have to be cut to nothing."""
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
