"""The partitions of this process: opened, created, announced to lifecycle, and closed."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from storage_svc.engines.engine import Engines, Identity
from storage_svc.lifecycle.announcer import Announcer
from storage_svc.lifecycle.lifecycle_watch import SilencePolicy
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.health import FaultReason
from storage_svc.partition.losses import Witness, no_witness
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import Partitions
from storage_svc.turns import CommonTurns
from tidemark.clock import Clock
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import StorageSettings


class StorageNode:
    """Owns the partitions. They are announced from `announce` on."""

    def __init__(
        self,
        settings: StorageSettings,
        engines: Callable[[], Engines],
        channels: ChannelPool,
        clock: Clock,
        *,
        witness: Witness = no_witness,
    ) -> None:
        """`engines` is called for each partition that is opened: those of a shared store remember
        under which epoch they had it open, and take it back only if no other node has opened it.
        `witness` answers how far a partition has been seen."""
        self._settings = settings
        self._engines = engines
        self._channels = channels
        self._clock = clock
        self._witness = witness
        self._held: dict[int, Partition] = {}
        self._lost: set[int] = set()
        self._address = ""
        self._turns = CommonTurns()
        self._figures = CommitFigures(clock)
        self._announcing: dict[int, asyncio.Task[None]] = {}
        self.partitions = Partitions(self._held, settings.partitions)

    def set_count(self, partitions: int) -> None:
        """The number of partitions of the cluster, which `open` needs."""
        self.partitions.count = partitions

    async def open(
        self,
        numbers: Collection[int],
        on_taken_over: Callable[[int], None] = lambda _number: None,
    ) -> None:
        """Raises the first refusal, after all have ended: they share one database.

        `on_taken_over` is called with the number of a partition that another node has opened since.
        """
        await self._open([self._partition(number, on_taken_over) for number in numbers])

    async def create(self, partition: int) -> None:
        # Where it replaces a lost one, brokers may have seen commits that it does not have.
        replaces_lost = self._settings.create_lost
        await self._open([self._partition(partition, loss_confirmed=replaces_lost)])

    async def _open(self, opening: Sequence[Partition]) -> None:
        try:
            outcomes = await asyncio.gather(
                *(each.open() for each in opening), return_exceptions=True
            )
        finally:
            # Only now: brokers would take a partition that is being created for a faulty one.
            self._held.update((each.number, each) for each in opening)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        for partition in opening:
            self._announce(partition)

    async def leave(self, partition: int) -> None:
        """Close a partition that another node is to hold."""
        if announcing := self._announcing.pop(partition, None):
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        try:
            await self._held[partition].leave()
        finally:
            # Only now: another node waits until it is not held here.
            del self._held[partition]

    def report_lost(self, partition: int, detail: str) -> None:
        """Hold a partition without data, which only reports why."""
        if partition not in self._held:
            self._lost.add(partition)
            lost = self._held[partition] = self._partition(partition)
            lost.health.add(FaultReason.DATA_LOST, detail, self._clock.wall_ms())

    def forget_lost(self, partition: int) -> None:
        """It was found, or is created again."""
        if partition in self._lost:
            self._lost.discard(partition)
            del self._held[partition]

    def announce(self, address: str) -> None:
        """Announce the partitions that are open, and those to come, as reached at `address`."""
        self._address = address
        for partition in self._held.values():
            self._announce(partition)

    async def close(self) -> None:
        for task in self._announcing.values():
            task.cancel()
        await asyncio.gather(*self._announcing.values(), return_exceptions=True)
        await asyncio.gather(*(partition.close() for partition in self._held.values()))

    def _partition(
        self,
        number: int,
        on_taken_over: Callable[[int], None] = lambda _number: None,
        *,
        loss_confirmed: bool = False,
    ) -> Partition:
        settings = self._settings
        return Partition(
            self._engines(),
            Identity(settings.cluster_id, number, self.partitions.count),
            self._clock,
            await_sweep=settings.await_sweep,
            disk_free_bytes_min=settings.disk_free_bytes_min,
            silence=_silence(settings),
            on_taken_over=lambda: on_taken_over(number),
            witness=self._witness,
            loss_confirmed=loss_confirmed,
            turns=self._turns,
            figures=self._figures,
        )

    def _announce(self, partition: Partition) -> None:
        if self._address and self._settings.await_sweep and partition.number not in self._lost:
            announcer = Announcer(
                partition,
                self._channels,
                self._settings.lifecycle_address,
                self._address,
                self._clock,
            )
            self._announcing[partition.number] = asyncio.create_task(announcer.run())


def _silence(settings: StorageSettings) -> SilencePolicy:
    """Without lifecycle (`await_sweep` off) its silence is no alarm."""
    after_ms = settings.lifecycle_silent_after_ms if settings.await_sweep else 0
    return SilencePolicy(after_ms, settings.lifecycle_silent_is_fault)
