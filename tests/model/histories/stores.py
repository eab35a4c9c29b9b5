"""The rules of storage nodes that share a store, checked against what the store has confirmed and
what the nodes have answered (S9).

Pure. Nodes may stand still, lose answers and believe in what another has taken over, and the store
may lose its last commits; these hold all the same.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from tests.support.shared_engine import Confirmed, TailLost


class Answered(NamedTuple):
    """A node has answered what it was asked, in a commit or after a verification."""

    partition: int
    epoch: int
    """Under which the node had the partition open."""
    newest_epoch: int
    """Of the store, when the node was asked."""


class StoreRule(StrEnum):
    """What must hold for the nodes of every history."""

    ONE_NODE_PER_EPOCH = "no two nodes commit under one storage epoch"
    NO_FORK = "every commit follows the one before it"
    ONE_COMMIT_PER_NUMBER = "no number is given to two commits, also if the first was lost"
    NO_STALE_CONFIRMATION = "nothing is confirmed below the newest storage epoch"
    NO_STALE_ANSWER = "no node answers what it was asked after another had opened the partition"


Broken = tuple[StoreRule, Confirmed | Answered]
_Log = Sequence[Confirmed | TailLost]


def check_store(log: _Log, answers: Sequence[Answered]) -> list[Broken]:
    """Everything that breaks a rule."""
    broken: list[Broken] = [
        (StoreRule.NO_STALE_ANSWER, each) for each in answers if each.epoch < each.newest_epoch
    ]
    for partition in sorted({each.partition for each in log}):
        of_one = [each for each in log if each.partition == partition]
        for rule in (_one_node_per_epoch, _no_fork, _one_commit_per_number, _no_stale):
            broken += rule(of_one)
    return broken


def _commits(log: _Log) -> Iterator[Confirmed]:
    return (each for each in log if isinstance(each, Confirmed) and each.follows is not None)


def _one_node_per_epoch(log: _Log) -> Iterator[Broken]:
    """An epoch that the store has lost is given again: the commits under it are gone as well."""
    openings: dict[int, bytes] = {}
    for each in log:
        if isinstance(each, TailLost):
            openings = {epoch: by for epoch, by in openings.items() if epoch <= each.mark.epoch}
        elif each.follows is not None:
            opening = openings.setdefault(each.mark.epoch, each.mark.opening)
            if opening != each.mark.opening:
                yield StoreRule.ONE_NODE_PER_EPOCH, each


def _no_fork(log: _Log) -> Iterator[Broken]:
    sequence, commit_id = 0, b""
    for each in log:
        if isinstance(each, Confirmed):
            if each.follows is None:
                continue
            if (each.mark.sequence, each.follows) != (sequence + 1, commit_id):
                yield StoreRule.NO_FORK, each
        sequence, commit_id = each.mark.sequence, each.mark.commit_id


def _one_commit_per_number(log: _Log) -> Iterator[Broken]:
    given: dict[int, bytes] = {}
    for each in _commits(log):
        if (
            each.number
            and given.setdefault(each.number, each.mark.commit_id) != each.mark.commit_id
        ):
            yield StoreRule.ONE_COMMIT_PER_NUMBER, each


def _no_stale(log: _Log) -> Iterator[Broken]:
    for each in log:
        if isinstance(each, Confirmed) and each.mark.epoch < each.newest_epoch:
            yield StoreRule.NO_STALE_CONFIRMATION, each
