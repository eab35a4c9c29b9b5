"""The thread in which a node waits for its disk, so that the event loop never does.

Work is done in the order of its calls, and its outcome comes back as a call on the event loop. An
executor would do the same with two futures and their locks for each piece of work: about 60
microseconds of a publish that is alone (ADR 42).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeAlias

WorkEnded: TypeAlias = Callable[[BaseException | None], None]
"""Gets what the work has raised. Called on the event loop; it must not raise."""


class Disk(Protocol):
    """Does work that waits for the disk, a piece at a time."""

    def begin(self, work: Callable[[], object], ended: WorkEnded) -> None:
        """Do the work after all that was begun before it."""
        ...

    def close(self) -> None:
        """Let go of the thread once all work is done. Nothing may be begun any more."""
        ...


class DiskThread:
    """A disk that is waited for in a thread of its own, for the event loop that made it."""

    def __init__(self, name: str = "tidemark-sync") -> None:
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[tuple[Callable[[], object], WorkEnded] | None] = SimpleQueue()
        # A daemon: a disk that hangs must not keep the process from ending.
        Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, work: Callable[[], object], ended: WorkEnded) -> None:
        self._work.put((work, ended))

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (begun := self._work.get()) is not None:
            work, ended = begun
            outcome: BaseException | None = None
            try:
                work()
            except BaseException as error:
                outcome = error
            with suppress(RuntimeError):  # the event loop is closed: nothing waits any more
                self._loop.call_soon_threadsafe(ended, outcome)
            # Work refers to the database, whose directory is locked for as long as anything does.
            del begun, work, ended, outcome
