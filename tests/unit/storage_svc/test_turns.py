"""Turns that many parts of a process share (C7)."""

import asyncio
from functools import partial

from storage_svc.turns import CommonTurns, Step, give_way
from tidemark.clock import ManualClock


async def test_all_do_a_step_before_any_does_the_next() -> None:
    """C7: the cost of the same step for many is that of code which is repeated."""
    turns, done, ended = CommonTurns(), list[tuple[str, int]](), asyncio.Event()

    def step(name: str, number: int, last: int) -> "Step | None":
        done.append((name, number))
        if len(done) == 6:
            ended.set()
        return None if number == last else partial(step, name, number + 1, last)

    turns.ask(partial(step, "a", 1, 3))
    turns.ask(partial(step, "b", 1, 1))
    turns.ask(partial(step, "c", 1, 2))
    await asyncio.wait_for(ended.wait(), 60)

    assert done == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2), ("a", 3)]


async def test_what_is_asked_in_a_turn_is_done_in_the_next() -> None:
    """C7: a step that asks for a turn again and again does not keep the event loop."""
    turns, done, ended = CommonTurns(), list[str](), asyncio.Event()

    def second() -> None:
        done.append("second")
        ended.set()

    def first() -> None:
        asyncio.get_running_loop().call_soon(done.append, "beside")
        turns.ask(second)
        done.append("first")

    turns.ask(first)
    await asyncio.wait_for(ended.wait(), 60)

    assert done == ["first", "beside", "second"]


async def test_all_that_share_a_turn_read_one_time() -> None:
    """C7: the clock is read once for all partitions, and again in the next turn."""
    turns, clock, ended = CommonTurns(), ManualClock(wall_ms=1000), asyncio.Event()
    read: list[int] = []

    def step() -> None:
        read.append(turns.read(clock).wall_ms)
        clock.set_wall_ms(clock.wall_ms() + 1)
        if len(read) == 3:
            ended.set()

    turns.ask(step)
    turns.ask(step)
    await give_way()
    turns.ask(step)
    await asyncio.wait_for(ended.wait(), 60)

    assert read == [1000, 1000, 1002]
    assert turns.read(clock).wall_ms == 1003, "outside of turns it is now"
