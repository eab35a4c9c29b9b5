"""Turns that many parts of a process share (C7)."""

import asyncio
from functools import partial

import pytest

from storage_svc.turns import STEP_END, CommonTurns, Step


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


def test_a_coroutine_stops_where_its_step_ends() -> None:
    """C7: what drives it sees the end of each step, and continues it."""

    async def work() -> str:
        await STEP_END
        await STEP_END
        return "done"

    steps = work()
    assert steps.send(None) is STEP_END
    assert steps.send(None) is STEP_END
    with pytest.raises(StopIteration) as ended:
        steps.send(None)
    assert ended.value.value == "done"
