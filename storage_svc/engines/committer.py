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
from typing import Final, Generic, Protocol, TypeVar

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


Commit = tuple[bytes, Batch, CommitEnded]
"""The prefix of a partition, its batch, and what is called with the outcome. A plain tuple: a turn
makes one for each partition."""


class Log(Protocol[Encoded]):
    """The write-ahead log of a node."""

    def encode(self, commits: Sequence[Commit], onto: Encoded | None) -> Encoded:
        """Add commits to what is encoded already, or begin; raises if one cannot be encoded."""
        ...

    def write(self, encoded: Encoded) -> bool:
        """Write at once, not yet durable. False if the log must not be written to right now.
        `encoded` is spent either way."""
        ...

    def begin_sync(self, ended: WorkEnded) -> None:
        """Make durable what was written; `ended` is called in a later turn of the event loop."""
        ...


class Gather(Generic[Encoded]):
    """Commits that become durable together. Those that arrive during a sync are encoded beside it,
    all of one turn at once."""

    __slots__ = ("_encoded", "_encoded_commits", "bytes_approx", "commits")

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.bytes_approx = 0
        self._encoded: Encoded | None = None
        self._encoded_commits = 0

    def encode(self, log: Log[Encoded]) -> None:
        """Encode the commits that are not yet. One that cannot be encoded fails alone."""
        added = self.commits[self._encoded_commits :] if self._encoded_commits else self.commits
        if not added:
            return
        encoded, self._encoded = self._encoded, None  # half a commit must never be written
        try:
            self._encoded = log.encode(added, encoded)
        except Exception:
            self._leave_out(log)
        self._encoded_commits = len(self.commits)

    def _leave_out(self, log: Log[Encoded]) -> None:
        """Encode all commits once more, without those that cannot be. Raises if the rest cannot be
        encoded together; then none of them counts as encoded."""
        commits, self.commits = self.commits, []
        self._encoded, self._encoded_commits = None, 0
        for commit in commits:
            try:
                log.encode([commit], None)
            except Exception as error:
                _end(commit, error)
            else:
                self.commits.append(commit)
        if self.commits:
            self._encoded = log.encode(self.commits, None)

    def take_encoded(self, log: Log[Encoded]) -> Encoded | None:
        """None if no commit can be encoded."""
        self.encode(log)
        encoded, self._encoded, self._encoded_commits = self._encoded, None, 0
        return encoded

    def complete(self) -> None:
        for _, _, ended in self.commits:
            try:
                ended(None)
            except Exception:
                _log.exception(_ENDED_RAISED)

    def fail(self, error: Callable[[], CommitOutcomeUnknown]) -> None:
        for commit in self.commits:
            _end(commit, error())


def _end(commit: Commit, error: Exception) -> None:
    _, _, ended = commit
    try:
        ended(error)
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
        self._turn_asked = False
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
        size, gathers = batch.bytes_approx, self._gathers
        if not gathers or gathers[-1].bytes_approx + size > GATHER_BYTES_MAX:
            gathers.append(Gather())
        gather = gathers[-1]
        gather.commits.append((prefix, batch, ended))
        gather.bytes_approx += size
        if not self._turn_asked:
            # In the next turn: other partitions hand over theirs in this one.
            self._turn_asked = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._take_turn, context=self._context)

    async def close(self) -> None:
        """Finish what was handed over; a write that would have to wait fails instead."""
        self._closing = True
        await self._idle.wait()

    def _take_turn(self) -> None:
        """Commits were handed over: write them, or encode them beside the sync under way."""
        self._turn_asked = False
        if self._writing is None:
            self._write_next()
            return
        for gather in self._gathers:
            try:
                gather.encode(self._log)
            except Exception:  # it is tried once more when it is written, and fails the gather then
                _log.exception("commits could not be encoded beside a sync")

    def _write_next(self) -> None:
        """Write what has gathered, and have it synced."""
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
            encoded = gather.take_encoded(self._log)
            if encoded is None:
                self._write_next()
                return
            if self._log.write(encoded):
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
