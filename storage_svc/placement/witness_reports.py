"""Reports of commit numbers to the registry, and the question that precedes every opening.

Once a second the registry gets the last commit that this node has made in each of its partitions.
The registry is then a witness, if the store loses commits together with this node and its brokers.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Final, Protocol

from storage_svc.partition.partition import Partition
from tidemark.clock import Clock
from tidemark.errors import RegistryUnavailable

REPORT_EVERY_MS: Final = 1_000

_log = logging.getLogger(__name__)


class Witnesses(Protocol):
    """Where commit numbers are reported to: `RedisRegistry`."""

    async def report_commits(self, commits: Mapping[int, int]) -> None: ...
    async def highest_commit(self, partition: int) -> int: ...


class WitnessReports:
    """The reports of one node."""

    def __init__(self, witnesses: Witnesses, clock: Clock) -> None:
        self._witnesses = witnesses
        self._clock = clock
        self._is_away = False

    async def highest(self, partition: int) -> int:
        """The highest commit of a partition that any node has reported; 0 if that is unknown."""
        try:
            return await self._witnesses.highest_commit(partition)
        except RegistryUnavailable as error:
            _log.warning(
                "a partition is opened without asking the registry for lost commits",
                extra={"partition": partition, "why": error.detail},
            )
            return 0

    async def run(self, partitions: Collection[Partition]) -> None:
        """Report for as long as the node serves."""
        while True:
            await self._clock.sleep_ms(REPORT_EVERY_MS)
            await self.run_once(partitions)

    async def run_once(self, partitions: Collection[Partition]) -> None:
        """Report all commits, also unchanged ones: the registry may have been flushed. Also of
        partitions that have failed: this node may be the only one that knows of a loss."""
        commits = {each.number: each.last_commit for each in partitions if each.last_commit}
        if not commits:
            return
        try:
            await self._witnesses.report_commits(commits)
        except RegistryUnavailable as error:
            if not self._is_away:
                _log.warning("commits are not reported", extra={"why": error.detail})
            self._is_away = True
            return
        self._is_away = False
