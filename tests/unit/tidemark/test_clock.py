"""The clocks: real time moves by itself, manual time only by hand."""

import asyncio
from collections.abc import Callable

import pytest

from tidemark.clock import Clock, ManualClock, SystemClock

ClockMaker = Callable[[], Clock]


async def forever() -> None:
    await asyncio.Event().wait()


class Recorder:
    """Notes what happened, and at which manual time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.notes: list[tuple[str, int]] = []

    async def sleep(self, name: str, duration_ms: int) -> None:
        await self.clock.sleep_ms(duration_ms)
        self.notes.append((name, self.clock.monotonic_ms()))


async def test_the_system_clock_measures_its_own_sleep() -> None:
    clock = SystemClock()
    before_ns = clock.monotonic_ns()
    before_ms = clock.monotonic_ms()

    await clock.sleep_ms(5)

    assert clock.monotonic_ns() - before_ns >= 4_000_000
    assert clock.monotonic_ms() - before_ms >= 4


def test_the_system_clock_gives_unix_milliseconds() -> None:
    year_2020_ms, year_2200_ms = 1_577_836_800_000, 7_258_118_400_000

    assert year_2020_ms < SystemClock().wall_ms() < year_2200_ms


@pytest.mark.parametrize("make_clock", [SystemClock, ManualClock])
class TestEveryClock:
    async def test_wait_for_gives_the_result(self, make_clock: ClockMaker) -> None:
        async def work() -> str:
            await asyncio.to_thread(lambda: None)
            return "done"

        assert await make_clock().wait_for(work(), 60_000) == "done"

    async def test_wait_for_without_a_timeout_gives_the_result(
        self, make_clock: ClockMaker
    ) -> None:
        clock = make_clock()
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answer.set_result("done")

        assert await clock.wait_for(answer, None) == "done"

    async def test_wait_for_passes_errors_on(self, make_clock: ClockMaker) -> None:
        async def work() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            await make_clock().wait_for(work(), 60_000)

    @pytest.mark.parametrize("timeout_ms", [0, -1])
    async def test_wait_for_a_timeout_that_is_over_raises(
        self, make_clock: ClockMaker, timeout_ms: int
    ) -> None:
        with pytest.raises(TimeoutError):
            await make_clock().wait_for(forever(), timeout_ms)

    async def test_cancelling_wait_for_cancels_the_work(self, make_clock: ClockMaker) -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            started.set()
            try:
                await forever()
            finally:
                ended.set()

        waiting = asyncio.create_task(make_clock().wait_for(work(), 60_000))
        await started.wait()

        waiting.cancel()

        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()

    async def test_a_sleep_of_nothing_returns(self, make_clock: ClockMaker) -> None:
        clock = make_clock()

        await clock.sleep_ms(0)
        await clock.sleep_ms(-5)


class TestManualClock:
    async def test_time_stands_still_until_it_is_advanced(self) -> None:
        clock = ManualClock(wall_ms=1000)
        assert (clock.wall_ms(), clock.monotonic_ms(), clock.monotonic_ns()) == (1000, 0, 0)

        await clock.advance_ms(7)

        assert (clock.wall_ms(), clock.monotonic_ms(), clock.monotonic_ns()) == (1007, 7, 7_000_000)

    async def test_sleepers_wake_in_the_order_of_their_deadlines_at_their_time(self) -> None:
        clock = ManualClock()
        recorder = Recorder(clock)
        async with asyncio.TaskGroup() as tasks:
            for name, duration_ms in [("c", 30), ("a", 10), ("b", 20), ("a2", 10)]:
                tasks.create_task(recorder.sleep(name, duration_ms))
            await clock.until_sleepers(4)

            await clock.advance_ms(100)

        assert recorder.notes == [("a", 10), ("a2", 10), ("b", 20), ("c", 30)]
        assert clock.monotonic_ms() == 100

    async def test_a_sleeper_is_not_woken_one_millisecond_early(self) -> None:
        clock = ManualClock()
        recorder = Recorder(clock)
        task = asyncio.create_task(recorder.sleep("a", 10))
        await clock.until_sleepers(1)

        await clock.advance_ms(9)
        assert recorder.notes == []

        await clock.advance_ms(1)
        assert recorder.notes == [("a", 10)]
        await task

    async def test_a_loop_ticks_as_often_as_time_passes(self) -> None:
        clock = ManualClock()
        ticks: list[int] = []

        async def loop() -> None:
            while True:
                await clock.sleep_ms(10)
                ticks.append(clock.monotonic_ms())

        task = asyncio.create_task(loop())

        await clock.advance_ms(35)

        assert ticks == [10, 20, 30]
        task.cancel()

    async def test_a_jump_of_the_wall_clock_leaves_monotonic_time_and_sleepers_alone(self) -> None:
        clock = ManualClock(wall_ms=1_000_000)
        recorder = Recorder(clock)
        task = asyncio.create_task(recorder.sleep("a", 10))
        await clock.advance_ms(3)

        clock.set_wall_ms(5)
        assert (clock.wall_ms(), clock.monotonic_ms()) == (5, 3)
        clock.set_wall_ms(9_000_000)
        assert (clock.wall_ms(), clock.monotonic_ms()) == (9_000_000, 3)

        await clock.advance_ms(7)
        assert (clock.wall_ms(), recorder.notes) == (9_000_007, [("a", 10)])
        await task

    async def test_a_timeout_strikes_when_time_reaches_it_and_ends_the_work(self) -> None:
        clock = ManualClock()
        work = asyncio.create_task(forever())
        waiting = asyncio.create_task(clock.wait_for(work, 50))
        await clock.until_sleepers(1)

        await clock.advance_ms(49)
        assert not waiting.done()

        await clock.advance_ms(1)
        with pytest.raises(TimeoutError):
            await waiting
        assert work.cancelled()

    async def test_ended_waits_leave_no_sleeper_behind(self) -> None:
        clock = ManualClock()
        sleeping = asyncio.create_task(clock.sleep_ms(1000))
        cancelled = asyncio.create_task(clock.wait_for(forever(), 1000))
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answering = asyncio.create_task(clock.wait_for(answered, 1000))
        await clock.until_sleepers(3)

        sleeping.cancel()
        cancelled.cancel()
        answered.set_result(None)
        await asyncio.wait({sleeping, cancelled, answering})

        assert clock.sleepers == 0

    async def test_time_cannot_be_turned_back(self) -> None:
        with pytest.raises(ValueError, match="only moves forward"):
            await ManualClock().advance_ms(-1)
