"""The thread in which a node waits for its disk."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from storage_svc.engines.disk_thread import DiskThread, WorkEnded
from tidemark.clock import SystemClock


def collect(outcomes: list[BaseException | None], count: int) -> tuple[WorkEnded, asyncio.Event]:
    """A callback that keeps outcomes, and an event that is set once it has so many."""
    complete = asyncio.Event()

    def ended(outcome: BaseException | None) -> None:
        outcomes.append(outcome)
        if len(outcomes) == count:
            complete.set()

    return ended, complete


@pytest.mark.timeout(60)
async def test_the_event_loop_runs_while_the_disk_hangs() -> None:
    """L1: a stalled disk leaves everything else responsive."""
    disk, resumed = DiskThread(), threading.Event()
    outcomes: list[BaseException | None] = []
    ended, complete = collect(outcomes, 1)

    disk.begin(resumed.wait, ended)
    turns = 0
    for _ in range(100):
        await SystemClock().sleep_ms(0)
        turns += 1

    assert (turns, outcomes) == (100, [])
    resumed.set()
    await complete.wait()
    assert outcomes == [None]
    disk.close()


@pytest.mark.timeout(60)
async def test_work_is_done_in_order_and_its_outcome_comes_back_to_the_event_loop() -> None:
    """S2: a failed sync reaches the commits in it, and only those before it have succeeded."""
    disk, failure = DiskThread(), OSError("Input/output error")
    done: list[int] = []
    threads: set[int] = set()
    outcomes: list[BaseException | None] = []
    keep, complete = collect(outcomes, 4)

    def work(number: int) -> Callable[[], None]:
        def do() -> None:
            done.append(number)
            if number == 2:
                raise failure

        return do

    def ended(outcome: BaseException | None) -> None:
        threads.add(threading.get_ident())
        keep(outcome)

    for number in range(4):
        disk.begin(work(number), ended)
    disk.close()
    await complete.wait()

    assert done == [0, 1, 2, 3]
    assert outcomes == [None, None, failure, None]
    assert threads == {threading.get_ident()}


@pytest.mark.timeout(60)
async def test_the_thread_keeps_nothing_of_work_that_is_done() -> None:
    """A reference to the database would keep its directory locked."""

    class Database:
        def flush(self) -> None:
            pass

    disk, database = DiskThread(), Database()
    outcomes: list[BaseException | None] = []
    ended, complete = collect(outcomes, 2)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(database, loop.call_soon_threadsafe, gone.set)

    disk.begin(database.flush, ended)
    del database
    disk.begin(lambda: None, ended)
    await complete.wait()
    gc.collect()
    await gone.wait()

    disk.close()


def test_work_that_ends_after_its_event_loop_is_closed_ends_the_thread_as_usual() -> None:
    """A killed or cancelled node: nothing waits for the outcome any more."""
    resumed, ended = threading.Event(), threading.Event()

    async def begin() -> DiskThread:
        disk = DiskThread()
        disk.begin(resumed.wait, lambda _: None)
        return disk

    disk = asyncio.run(begin())
    disk.begin(ended.set, lambda _: None)
    disk.close()
    resumed.set()

    assert ended.wait(60)
