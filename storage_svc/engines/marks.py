"""Marks: how a node that shares its store finds the outcome of a commit.

Pure. A store keeps one mark per partition: the storage epoch, which every opening raises, an id of
that opening, and the number and id of the last commit. A commit is applied only on top of the mark
that its node has seen last. When an answer is lost, the mark decides.
"""

from enum import Enum
from typing import NamedTuple


class Mark(NamedTuple):
    """The last commit of a partition, and the opening under which it is written to."""

    epoch: int
    opening: bytes
    """Distinguishes openings also where a failover has lost one, and its epoch was given again."""
    sequence: int
    commit_id: bytes


class Fate(Enum):
    """The outcome of a commit."""

    DONE = "done"
    NOT_DONE = "not done: it can be sent again"
    FENCED = "not done, and never will be"
    LOST = "what it follows is gone"
    UNKNOWN = "cannot be known any more"


def fate_of(before: Mark, commit: Mark, stored: Mark | None) -> Fate:
    """The fate of a commit on top of `before`, from the mark that its store has now."""
    if stored is None:
        return Fate.LOST
    if (stored.sequence, stored.commit_id) == (commit.sequence, commit.commit_id):
        return Fate.DONE
    if stored == before:
        return Fate.NOT_DONE
    if stored.epoch > commit.epoch:
        # The other node counts on from the mark that it found: a higher number may hide this
        # commit.
        return Fate.FENCED if stored.sequence <= commit.sequence else Fate.UNKNOWN
    return Fate.LOST
