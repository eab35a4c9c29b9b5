"""An event loop in which nothing takes time by itself, and a run can be repeated from its seed.

Whenever nothing is left to do, the clock jumps to the next sleeper. What real code does in a
thread (waiting for a disk) is done in none, after a random time of the clock. A `Process` is all
tasks that it, or they, have started: it can be killed in the middle of anything.
"""

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar

from storage_svc.engines.disk_thread import WorkEnded
from tidemark.clock import ManualClock

DISK_MS_MAX: Final = 4
LASTS_MS_MAX: Final = 600_000

T = TypeVar("T")


class Stuck(AssertionError):
    """Every task waits for another."""


class SimulatedClock(ManualClock):
    """Moves by itself, when the loop has nothing else to do."""

    def jump(self) -> bool:
        """Wake the next sleeper at its time; False if none sleeps."""
        while self._sleepers:
            deadline_ms, _, wake = self._sleepers.pop(0)
            if not wake.done():
                self._monotonic_ms = deadline_ms
                wake.set_result(None)
                return True
        return False


class Process:
    """Tasks that live and die together."""

    def __init__(self) -> None:
        self.dead = False
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task of this process, started by any other."""
        context = copy_context()
        context.run(_process.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start what runs until the process is killed."""
        self.start(work).add_done_callback(_must_not_fail)

    def join(self, task: "asyncio.Task[Any]") -> None:
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def kill(self) -> None:
        """End everything that it does. Cut its wires first, so that nothing more leaves it."""
        self.dead = True
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.wait(list(self._tasks))


def _must_not_fail(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.result()


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs one simulation. `clock` belongs to it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(_Impatient(self._idle))
        self._chance = chance
        self.clock: SimulatedClock
        self.set_task_factory(_task_of_process)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> Awaitable[T]:
        return asyncio.ensure_future(self._in_no_thread(func, args), loop=self)

    async def _in_no_thread(self, func: Callable[..., T], args: tuple[Any, ...]) -> T:
        await self.clock.sleep_ms(self._chance.randint(0, DISK_MS_MAX))
        return func(*args)

    def _idle(self) -> None:
        if not self.clock.jump():
            raise Stuck("nothing is left to happen")
        if self.clock.monotonic_ms() > LASTS_MS_MAX:
            raise Stuck("it does not come to an end")


class SimulatedDisk:
    """The disk of a storage node: work on it takes some time of the clock, and no thread."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        self._loop = loop
        self._before: asyncio.Task[None] | None = None

    def begin(self, work: Callable[[], object], ended: WorkEnded) -> None:
        # A sync goes on when the process that began it is killed.
        doing = self._do(self._before, work, ended)
        self._before = self._loop.create_task(doing, context=Context())

    def close(self) -> None:
        self._before = None

    async def _do(
        self, before: "asyncio.Task[None] | None", work: Callable[[], object], ended: WorkEnded
    ) -> None:
        if before is not None:
            await before
        outcome: Exception | None = None
        try:
            await self._loop.run_in_executor(None, work)
        except Exception as error:
            outcome = error
        ended(outcome)


class _Impatient(selectors.SelectSelector):
    """Never waits: reports that the loop is idle instead."""

    def __init__(self, idle: Callable[[], None]) -> None:
        super().__init__()
        self._when_idle = idle

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._when_idle()
        return []


def _task_of_process(
    loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None
) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = _process.get() if context is None else context.get(_process)
    if process is not None:
        process.join(task)
    return task


def simulate(main: Callable[[SimulatedClock], Coroutine[Any, Any, T]], seed: int) -> T:
    """Run one simulation to its end. The same seed gives the same, turn for turn."""
    random.seed(seed)  # for what the services draw by themselves
    loop = SimulatedLoop(random.Random(seed))
    try:
        loop.clock = loop.run_until_complete(_clock())
        return loop.run_until_complete(main(loop.clock))
    finally:
        loop.close()


async def _clock() -> SimulatedClock:
    return SimulatedClock()
