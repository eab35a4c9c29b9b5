"""An engine whose commits wait or fail on demand, before or after they reach the disk.

Opening it and looking at its disk can be made to fail as well.

Wraps the engines of any `Engines`, so that everything else happens for real. A failed commit breaks
the engine for good, as in the protocol: it must be opened again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from enum import Enum

from storage_svc.engines.engine import (
    Batch,
    CommitEnded,
    Engine,
    EngineFailed,
    Engines,
    Identity,
    Table,
)
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.wrapped_engine import WrappedEngine
from tidemark.errors import CommitOutcomeUnknown


class Fault(Enum):
    """The fate of a failed commit; its caller cannot distinguish the two."""

    BEFORE_WRITING = "nothing is written"
    AFTER_WRITING = "everything is on disk"


class FaultyEngines:
    """Opens engines that obey `next_commit`."""

    def __init__(self, engines: Engines) -> None:
        self.next_commit: Fault | None = None
        """How the next commit fails, of whichever engine; None after it has, and by default."""
        self.is_meant: Callable[[Batch], bool] = lambda _: True
        """Which commit `next_commit` is for, where others may come before it; by default any."""
        self.only: int | None = None
        """The partition that `next_commit` and the gate are for; None for all."""
        self.next_openings: list[Exception] = []
        """How the next openings fail, one after the other."""
        self.next_looks: list[Exception] = []
        """How the next looks at the disk fail."""
        self.commits = 0
        """Commits that succeeded."""
        self.writing = 0
        """Commits that are being written."""
        self.row_operations: Counter[Table] = Counter()
        """Puts and deletes of those commits, by table."""
        self.gate = asyncio.Event()
        """While it is clear, commits wait before they write."""
        self.gate.set()
        self.waiting = asyncio.Event()
        """Set once a commit waits at the gate."""
        self._engines = engines

    async def release_node(self) -> None:
        if isinstance(self._engines, RocksEngines):
            await self._engines.release_node()

    async def open(self, identity: Identity) -> "FaultyEngine":
        if self.next_openings:
            raise self.next_openings.pop(0)
        return FaultyEngine(await self._engines.open(identity), self)


class FaultyEngine(WrappedEngine):
    """One open partition."""

    def __init__(self, engine: Engine, controls: FaultyEngines) -> None:
        super().__init__(engine)
        self._controls = controls
        self._broken = False

    async def commit(self, batch: Batch) -> None:
        if self._is_concerned and not self._controls.gate.is_set():
            self._controls.waiting.set()
            await self._controls.gate.wait()
        fault = self._take_fault(batch)
        if fault is Fault.BEFORE_WRITING or self._broken:
            raise self._failure()
        self._controls.writing += 1
        try:
            await self._engine.commit(batch)
        finally:
            self._controls.writing -= 1
        if fault is Fault.AFTER_WRITING:
            raise self._failure()
        self._count(batch)

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        """Fails as a sync does that all partitions of a turn share: in a later turn."""
        if self.storage_epoch or (self._is_concerned and not self._controls.gate.is_set()):
            return False
        fault = self._take_fault(batch)
        if self._broken:
            raise self._failure()
        if fault is Fault.BEFORE_WRITING:
            asyncio.get_running_loop().call_soon(ended, self._failure())
            return True

        def end(error: Exception | None) -> None:
            self._controls.writing -= 1
            if error is None and fault is Fault.AFTER_WRITING:
                error = self._failure()
            elif error is None:
                self._count(batch)
            ended(error)

        began = self._engine.begin_commit(batch, end)
        assert began, "the embedded engine always can"
        self._controls.writing += 1
        return True

    @property
    def _is_concerned(self) -> bool:
        return self._controls.only in (None, self.identity.partition)

    def _take_fault(self, batch: Batch) -> Fault | None:
        """How this commit fails."""
        if not (self._is_concerned and self._controls.is_meant(batch)):
            return None
        fault, self._controls.next_commit = self._controls.next_commit, None
        return fault

    def _count(self, batch: Batch) -> None:
        self._controls.commits += 1
        self._controls.row_operations.update(table for table, *_ in batch.operations)

    async def verify(self) -> None:
        if self._broken:
            raise EngineFailed("the disk failed, as the test asked")
        await self._engine.verify()

    async def free_bytes(self) -> int:
        if self._controls.next_looks:
            raise self._controls.next_looks.pop(0)
        return await self._engine.free_bytes()

    def _failure(self) -> CommitOutcomeUnknown:
        self._broken = True
        return CommitOutcomeUnknown("the disk failed, as the test asked")
