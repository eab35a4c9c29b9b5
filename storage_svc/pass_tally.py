"""The tally of passes: how many planned rows of each this process has applied so far.

Pure, in memory: it shows operators how far a pass is, and decides nothing.
"""

from collections import OrderedDict

PASSES_MAX = 64
"""Passes that are remembered, the last ones."""


class PassTally:
    """Planned rows that were applied, by pass."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, int] = OrderedDict()

    def add(self, pass_id: str, rows: int) -> None:
        self._rows[pass_id] = self._rows.pop(pass_id, 0) + rows
        if len(self._rows) > PASSES_MAX:
            self._rows.popitem(last=False)

    def rows(self, pass_id: str) -> int:
        """0 for a pass that is not known."""
        return self._rows.get(pass_id, 0)
