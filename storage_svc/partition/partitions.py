"""The partitions that this process holds, by number."""

from collections.abc import Mapping

from storage_svc.partition.partition import Partition
from tidemark.errors import PartitionNotFound


class Partitions:
    """The partitions of this process, by number."""

    def __init__(self, held: Mapping[int, Partition], count: int) -> None:
        self.held = held
        self.count = count
        """The number of partitions of the cluster; 0 until the storage nodes have agreed on it."""

    def get(self, number: int) -> Partition:
        """Raises PartitionNotFound for one that is held elsewhere, or nowhere."""
        try:
            return self.held[number]
        except KeyError:
            raise not_held_here(number) from None


def not_held_here(number: int) -> PartitionNotFound:
    return PartitionNotFound(f"partition {number} is not held here", partition=str(number))
