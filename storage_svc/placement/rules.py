"""The rules of placement: who creates a partition, and when it counts as lost.

Pure. The data decides which partitions a node holds. A partition that no node holds is created by
the node at `partition % nodes` in the sorted list of addresses, and only if every other node has
answered and none has ever seen it created by another one. All nodes have the same number of
partitions.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from tidemark.limits import PARTITIONS_DEFAULT


class NodeAnswer(NamedTuple):
    """The partitions in the view of another node."""

    node_id: str
    held: frozenset[int]
    placed: Mapping[int, str]
    """The nodes that created partitions, in the record of that node."""


class Verdict(Enum):
    """The decision of this node about a partition that it would create."""

    CREATE = "create"
    ELSEWHERE = "elsewhere"
    """Another node holds it."""
    WAIT = "wait"
    """Another node that is there was about to create it."""
    LOST = "lost"
    """The node that created it is gone, and its data with it."""


def creator(partition: int, addresses: Sequence[str]) -> str:
    """The address of the node that creates a partition."""
    return sorted(addresses)[partition % len(addresses)]


def agreed_count(others: Collection[int]) -> int:
    """The number of partitions for a node without data whose settings name none.

    `others` are the numbers of all other nodes, 0 for one that has none either. Returns 0 if they
    differ.
    """
    known = set(others) - {0}
    if len(known) > 1:
        return 0
    return known.pop() if known else PARTITIONS_DEFAULT


def verdict(
    partition: int, node_id: str, placed: Mapping[int, str], others: Sequence[NodeAnswer]
) -> Verdict:
    """For a partition that this node does not hold, once all other nodes have answered.

    `placed` is the record of this node itself.
    """
    if any(partition in each.held for each in others):
        return Verdict.ELSEWHERE
    creators = {each.placed[partition] for each in others if partition in each.placed}
    if partition in placed:
        creators.add(placed[partition])
    creators.discard(node_id)
    if not creators:
        return Verdict.CREATE
    if creators & {each.node_id for each in others}:
        return Verdict.WAIT
    return Verdict.LOST
