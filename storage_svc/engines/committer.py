"""The committer of a node: one write and one sync for the commits of all its partitions.

Partitions hand over their batches. What arrives while a sync is under way gathers for the next
one; there is no timer. A commit completes after the sync that covers it, and a write or a sync that
fails has an unknown outcome for every commit in it and ends the committer. This module owns the
order and the bound of what gathers; the log that it writes to is behind a protocol.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from storage_svc.engines.engine import Batch, CommitEnded
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown
from tidemark.telemetry import histogram, seconds
from tidemark.telemetry.metrics import BYTES, COUNTS

GATHER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of one write, unless a single commit is larger: a write holds the event loop."""

_STALL_RETRY_MS: Final = 2
_CLOCK = SystemClock()  # waits for a real disk, also where a test moves time by hand

_sync_commits = histogram("tidemark.storage.sync.commits", "Commits of partitions per sync", COUNTS)
_sync_seconds = seconds("tidemark.storage.sync.duration", "From writing commits to durable")
_sync_bytes = histogram("tidemark.storage.sync.size", "Bytes that a sync covers", BYTES, unit="By")

Encoded = TypeVar("Encoded")


class Commit(NamedTuple):
    """A batch of one partition, and what is called with its outcome."""

    prefix: bytes
    batch: Batch
    ended: CommitEnded


class Log(Protocol[Encoded]):
    """The write-ahead log of a node."""

    def encode(self, commits: Sequence[Commit], onto: Encoded | None) -> Encoded:
        """Add commits to what is encoded already, or begin; raises what is wrong with them."""
        ...

    def write(self, encoded: Encoded) -> bool:
        """Write at once, not yet durable. False if the log must not be written to right now.
        `encoded` is spent either way."""
        ...

    def sync(self) -> Awaitable[None]:
        """Make durable what was written."""
        ...


class Gather(Generic[Encoded]):
    """Commits that become durable together. They are encoded as they arrive, beside the sync."""

    __slots__ = ("_encoded", "bytes_approx", "commits")

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.bytes_approx = 0
        self._encoded: Encoded | None = None

    def has_room(self, batch: Batch) -> bool:
        return not self.commits or self.bytes_approx + batch.bytes_approx <= GATHER_BYTES_MAX

    def add(self, commit: Commit, log: Log[Encoded]) -> None:
        """Raises what is wrong with the commit; the others are not affected."""
        encoded, self._encoded = self._encoded, None  # half a commit must never be written
        if encoded is not None or not self.commits:
            self._encoded = log.encode([commit], encoded)
        else:
            log.encode([commit], None)
        self.commits.append(commit)
        self.bytes_approx += commit.batch.bytes_approx

    def take_encoded(self, log: Log[Encoded]) -> Encoded:
        encoded, self._encoded = self._encoded, None
        return log.encode(self.commits, None) if encoded is None else encoded

    def complete(self) -> None:
        for commit in self.commits:
            commit.ended(None)

    def fail(self, error: Callable[[], CommitOutcomeUnknown]) -> None:
        for commit in self.commits:
            commit.ended(error())


class Committer(Generic[Encoded]):
    """Makes commits durable in the order of their calls, one gather after another."""

    def __init__(self, log: Log[Encoded], name: str) -> None:
        self.fault: str | None = None
        """Why nothing can be committed any more; None while commits go through."""
        self.failed = asyncio.Event()
        """Set together with the fault."""
        self._log = log
        self._name = name
        self._gathers: deque[Gather[Encoded]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._closing = False

    async def commit(self, prefix: bytes, batch: Batch) -> None:
        """Returns once the batch is durable. After an unknown outcome every commit fails."""
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin(prefix, batch, partial(_resolve, durable))
        await durable

    def begin(self, prefix: bytes, batch: Batch, ended: CommitEnded) -> None:
        """The same without a coroutine. All commits of one sync end in one turn of the event loop,
        one call after the other: `ended` must not raise."""
        if self.fault is not None:
            raise self._outcome_unknown()
        if not self._gathers or not self._gathers[-1].has_room(batch):
            self._gathers.append(Gather())
        self._gathers[-1].add(Commit(prefix, batch, ended), self._log)
        if self._writing is None:
            # In a context of its own: it works for all partitions, not for the one that came first.
            loop = asyncio.get_running_loop()
            self._writing = loop.create_task(self._write_gathers(), context=Context())

    async def close(self) -> None:
        """Finish what was handed over; a write that would have to wait fails instead."""
        self._closing = True
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write_gathers(self) -> None:
        try:
            while self._gathers:
                gather = self._gathers.popleft()
                try:
                    await self._make_durable(gather)
                except BaseException as error:
                    self._fail(error, gather)
                    if not isinstance(error, Exception):
                        raise
                else:
                    gather.complete()
        finally:
            self._writing = None

    async def _make_durable(self, gather: Gather[Encoded]) -> None:
        if not gather.commits:  # its only commit could not be encoded
            return
        while not self._log.write(gather.take_encoded(self._log)):
            if self._closing:
                raise RuntimeError("closed while the log refused writes")
            await _CLOCK.sleep_ms(_STALL_RETRY_MS)
        started_ns = _CLOCK.monotonic_ns()
        await self._log.sync()
        _sync_seconds.record((_CLOCK.monotonic_ns() - started_ns) / 1e9)
        _sync_commits.record(len(gather.commits))
        _sync_bytes.record(gather.bytes_approx)

    def _fail(self, error: BaseException, gather: Gather[Encoded]) -> None:
        """The outcome of this gather is unknown, and what gathered behind it is not written."""
        self.fault = str(error) or type(error).__name__
        self.failed.set()
        for each in (gather, *self._gathers):
            each.fail(self._outcome_unknown)
        self._gathers.clear()

    def _outcome_unknown(self) -> CommitOutcomeUnknown:
        return CommitOutcomeUnknown(f"{self._name} must be opened again: {self.fault}")


def _resolve(durable: asyncio.Future[None], error: Exception | None) -> None:
    if durable.done():  # its caller was cancelled
        return
    if error is None:
        durable.set_result(None)
    else:
        durable.set_exception(error)
