"""Time: the only module that reads a clock or sleeps.

Everything else takes a `Clock`, or `now_ms` as an argument if it is pure, so that tests move time
by hand instead of waiting for it. Wall time is for people and stored deadlines and can jump;
monotonic time is for durations and never goes back.
"""

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time, as the code may use it."""

    def wall_ms(self) -> int:
        """Unix time in milliseconds. Can jump either way when the clock is set."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary moment. Never goes back."""
        ...

    def monotonic_ns(self) -> int:
        """The same clock as `monotonic_ms`, in nanoseconds, for measuring short work."""
        ...

    async def sleep_ms(self, duration_ms: int) -> None:
        """Sleep by the monotonic clock; zero or less only yields to other tasks."""
        ...

    async def wait_for(self, awaitable: Awaitable[T], timeout_ms: int | None) -> T:
        """The awaitable's result, or TimeoutError after cancelling it. None waits forever."""
        ...


class SystemClock:
    """The clock of the machine."""

    __slots__ = ()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_ms(self, duration_ms: int) -> None:
        await asyncio.sleep(duration_ms / 1000)

    async def wait_for(self, awaitable: Awaitable[T], timeout_ms: int | None) -> T:
        # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation that arrives in
        # the same turn as the result.
        async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
            return await awaitable


async def _cancel(work: asyncio.Future[T]) -> None:
    """Cancel, and wait for the end."""
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()  # retrieved, so that asyncio does not report it as lost


# Sleepers sort by deadline, then by the order in which they went to sleep.
_Sleeper = tuple[int, int, asyncio.Future[None]]


class ManualClock:
    """A clock that stands still until a test moves it. Belongs to one event loop.

    `advance_ms` stops at every deadline on its way: each sleeper wakes at exactly its deadline, in
    order, and runs before time moves on. A loop that sleeps 10 ms at a time thus ticks ten times in
    `advance_ms(100)`. I/O that a woken task starts is not awaited: the test waits for its effect,
    or for `until_sleepers`.
    """

    # Turns of the event loop for a woken task and the tasks that it wakes.
    _TURNS_PER_WAKE = 10

    def __init__(self, wall_ms: int = 1_800_000_000_000) -> None:
        self._monotonic_ms = 0
        self._wall_offset_ms = wall_ms
        self._sleepers: list[_Sleeper] = []
        self._sequence = 0
        self._sleeper_added = asyncio.Event()

    def wall_ms(self) -> int:
        return self._wall_offset_ms + self._monotonic_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def monotonic_ns(self) -> int:
        return self._monotonic_ms * 1_000_000

    async def sleep_ms(self, duration_ms: int) -> None:
        if duration_ms <= 0:
            await asyncio.sleep(0)
            return
        sleeper = self._fall_asleep(duration_ms)
        try:
            await sleeper[2]
        finally:
            self._forget(sleeper)

    async def wait_for(self, awaitable: Awaitable[T], timeout_ms: int | None) -> T:
        if timeout_ms is None:
            return await awaitable
        work = asyncio.ensure_future(awaitable)
        sleeper = self._fall_asleep(max(timeout_ms, 0))
        try:
            either: set[asyncio.Future[Any]] = {work, sleeper[2]}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _cancel(work)
            raise
        finally:
            self._forget(sleeper)
        if not work.done():
            await _cancel(work)
            if work.cancelled():
                raise TimeoutError
        return work.result()

    async def advance_ms(self, duration_ms: int) -> None:
        """Move wall and monotonic time forward together, waking sleepers on the way."""
        if duration_ms < 0:
            raise ValueError(f"time only moves forward, not by {duration_ms} ms")
        target_ms = self._monotonic_ms + duration_ms
        await self._let_run()
        while self._sleepers and self._sleepers[0][0] <= target_ms:
            deadline_ms, _, wake = self._sleepers.pop(0)
            self._monotonic_ms = deadline_ms
            if not wake.done():
                wake.set_result(None)
                await self._let_run()
        self._monotonic_ms = target_ms

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set the wall clock, as an operator or NTP would. Monotonic time and sleepers stay."""
        self._wall_offset_ms = wall_ms - self._monotonic_ms

    @property
    def sleepers(self) -> int:
        """The number of pending sleeps and timeouts."""
        return len(self._sleepers)

    async def until_sleepers(self, count: int) -> None:
        """Return once at least `count` sleeps and timeouts are pending: the tested code is idle."""
        while len(self._sleepers) < count:
            self._sleeper_added.clear()
            await self._sleeper_added.wait()

    def _fall_asleep(self, duration_ms: int) -> _Sleeper:
        self._sequence += 1
        wake = asyncio.get_running_loop().create_future()
        sleeper = (self._monotonic_ms + duration_ms, self._sequence, wake)
        if duration_ms == 0:
            wake.set_result(None)
            return sleeper
        insort(self._sleepers, sleeper)
        self._sleeper_added.set()
        return sleeper

    def _forget(self, sleeper: _Sleeper) -> None:
        """Remove a sleeper that ended early; the others were removed when they woke."""
        index = bisect_left(self._sleepers, sleeper)
        if index < len(self._sleepers) and self._sleepers[index] is sleeper:
            del self._sleepers[index]

    async def _let_run(self) -> None:
        for _ in range(self._TURNS_PER_WAKE):
            await asyncio.sleep(0)
