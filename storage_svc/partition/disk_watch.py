"""The disk watch: whether the disk of a partition has room for new messages.

Past its watermark nothing new is stored; settling and deleting continue, and make room.
"""

import logging

_log = logging.getLogger(__name__)


class DiskWatch:
    """The disk of one partition, as of its last check."""

    def __init__(self, partition: int, free_bytes_min: int) -> None:
        self._partition = partition
        self._free_bytes_min = free_bytes_min
        self.free_bytes = 0
        self.full = False

    def update(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        full = self.free_bytes < self._free_bytes_min
        if full != self.full:
            _log.warning(
                "the disk is past its watermark" if full else "the disk has room again",
                extra={"partition": self._partition, "free_bytes": self.free_bytes},
            )
        self.full = full
