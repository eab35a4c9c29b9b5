"""Where scans of the due indexes start: the low-water mark of each index by time (V5, L7).

Pure; an index is known by any name. Entries are deleted at the front of an index, and a seek passes
over everything that was deleted there. So each scan starts at the mark, before which no entry lies.
"""

from collections.abc import Hashable


class DueIndexes:
    """The marks of one partition. They start at 0 when the partition is opened."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: dict[Hashable, int] = {}

    def mark_ms(self, index: Hashable) -> int:
        """The time before which the index has no entry."""
        return self._marks.get(index, 0)

    def added(self, index: Hashable, due_ms: int) -> None:
        """An entry was added: scans start there at the latest."""
        if due_ms < self._marks.get(index, 0):
            self._marks[index] = due_ms

    def scanned(self, index: Hashable, next_due_ms: int) -> None:
        """A scan found no entry before that time, or has dealt with all of them."""
        self._marks[index] = next_due_ms
