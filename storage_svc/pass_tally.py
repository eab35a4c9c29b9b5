"""The tally of passes: planned rows of each that were reported to this process, and applied so far.

Pure, in memory: it shows operators how far a pass is, and decides nothing.
"""

from collections import OrderedDict
from typing import NamedTuple

PASSES_MAX = 64
"""Passes that are remembered, the last ones."""


class PassRows(NamedTuple):
    """Planned rows of a pass: those that callers have reported, and those that were applied."""

    planned: int = 0
    applied: int = 0


class PassTally:
    """The planned rows of the last passes."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, PassRows] = OrderedDict()

    def add(self, pass_id: str, *, planned: int = 0, applied: int = 0) -> None:
        before = self._rows.pop(pass_id, PassRows())
        self._rows[pass_id] = PassRows(before.planned + planned, before.applied + applied)
        if len(self._rows) > PASSES_MAX:
            self._rows.popitem(last=False)

    def rows(self, pass_id: str) -> PassRows:
        """None of a pass that is not known."""
        return self._rows.get(pass_id, PassRows())
