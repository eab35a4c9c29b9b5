"""The static assignment: which broker of the cluster holds which partition.

Pure. Every broker computes the same from the same settings, so that no two of them claim one
partition. There is no failover: the partitions of a broker that is gone wait for it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Member(NamedTuple):
    """A broker, and the address at which clients and other brokers reach it."""

    broker_id: str
    address: str


def assign(partitions: int, members: Sequence[Member]) -> Mapping[int, Member]:
    """The holder of each partition: loads differ by at most one."""
    ordered = sorted(members)
    return {number: ordered[number % len(ordered)] for number in range(partitions)}
