"""The committer of a node: one write and one sync for the commits of all its partitions.

Partitions hand over their batches. What arrives while a sync is under way gathers for the next
one; there is no timer. A commit completes after the sync that covers it, and a write or a sync that
fails has an unknown outcome for every commit in it and ends the committer. This module owns the
order and the bound of what gathers; the log that it writes to is behind a protocol.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from storage_svc.engines.disk_thread import WorkEnded
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

_ENDED_RAISED: Final = "a partition cannot take the outcome of its commit; the others go on"
_log = logging.getLogger(__name__)

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

    def begin_sync(self, ended: WorkEnded) -> None:
        """Make durable what was written; `ended` is called in a later turn of the event loop."""
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
            try:
                commit.ended(None)
            except Exception:
                _log.exception(_ENDED_RAISED)

    def fail(self, error: Callable[[], CommitOutcomeUnknown]) -> None:
        for commit in self.commits:
            try:
                commit.ended(error())
            except Exception:
                _log.exception(_ENDED_RAISED)


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
        self._writing: Gather[Encoded] | None = None
        """The gather that is written, or whose sync is under way."""
        self._sync_started_ns = 0
        self._idle = asyncio.Event()
        """Set while nothing is to be made durable."""
        self._idle.set()
        self._closing = False
        self._context = Context()  # of no partition: it works for all of them
        self._on_synced: WorkEnded = self._synced

    async def commit(self, prefix: bytes, batch: Batch) -> None:
        """Returns once the batch is durable. After an unknown outcome every commit fails."""
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin(prefix, batch, partial(_resolve, durable))
        await durable

    def begin(self, prefix: bytes, batch: Batch, ended: CommitEnded) -> None:
        """The same without a coroutine. All commits of one sync end in one turn of the event loop,
        one call after the other. An `ended` that raises is logged and holds up no other."""
        if self.fault is not None:
            raise self._outcome_unknown()
        if not self._gathers or not self._gathers[-1].has_room(batch):
            self._gathers.append(Gather())
        self._gathers[-1].add(Commit(prefix, batch, ended), self._log)
        if self._idle.is_set():
            # In the next turn: other partitions hand over theirs in this one.
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._write_next, context=self._context)

    async def close(self) -> None:
        """Finish what was handed over; a write that would have to wait fails instead."""
        self._closing = True
        await self._idle.wait()

    def _write_next(self) -> None:
        """Write what has gathered, and have it synced."""
        while self._gathers and not self._gathers[0].commits:
            self._gathers.popleft()  # its only commit could not be encoded
        if self._gathers:
            self._writing = self._gathers.popleft()
            self._write()
        else:
            self._writing = None
            self._idle.set()

    def _write(self) -> None:
        gather = self._writing
        assert gather is not None, "it was taken"
        try:
            if self._log.write(gather.take_encoded(self._log)):
                self._sync_started_ns = _CLOCK.monotonic_ns()
                self._log.begin_sync(self._on_synced)
                return
            if self._closing:
                raise RuntimeError("closed while the log refused writes")
        except Exception as error:
            self._fail(error, gather)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_STALL_RETRY_MS / 1000, self._write, context=self._context)

    def _synced(self, error: BaseException | None) -> None:
        gather = self._writing
        assert gather is not None, "its sync was begun"
        if error is not None:
            self._fail(error, gather)
            return
        took_ns = _CLOCK.monotonic_ns() - self._sync_started_ns
        gather.complete()
        self._write_next()  # at once: the disk has been idle since the sync ended
        _sync_seconds.record(took_ns / 1e9)
        _sync_commits.record(len(gather.commits))
        _sync_bytes.record(gather.bytes_approx)

    def _fail(self, error: BaseException, gather: Gather[Encoded]) -> None:
        """The outcome of this gather is unknown, and what gathered behind it is not written."""
        self.fault = str(error) or type(error).__name__
        self.failed.set()
        for each in (gather, *self._gathers):
            each.fail(self._outcome_unknown)
        self._gathers.clear()
        self._writing = None
        self._idle.set()

    def _outcome_unknown(self) -> CommitOutcomeUnknown:
        return CommitOutcomeUnknown(f"{self._name} must be opened again: {self.fault}")


def _resolve(durable: asyncio.Future[None], error: Exception | None) -> None:
    if durable.done():  # its caller was cancelled
        return
    if error is None:
        durable.set_result(None)
    else:
        durable.set_exception(error)
