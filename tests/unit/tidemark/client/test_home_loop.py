"""The event loop that a client belongs to (K3)."""

import asyncio
import subprocess
import sys

import pytest

from tidemark.client.home_loop import HomeLoop
from tidemark.errors import InvalidArgument

FORKED_IN_A_LOOP = """
import asyncio, os
from tidemark.client.home_loop import HomeLoop
from tidemark.errors import InvalidArgument

async def check(home_loop):
    home_loop.check()

async def main():
    home_loop = HomeLoop()
    child = os.fork()
    if child:
        home_loop.check()
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        asyncio.run(check(home_loop))
    except InvalidArgument:
        os._exit(0)
    os._exit(1)

asyncio.run(main())
"""


async def made() -> HomeLoop:
    home_loop = HomeLoop()
    home_loop.check()
    return home_loop


async def checked(home_loop: HomeLoop) -> None:
    home_loop.check()


def test_a_later_loop_of_the_same_thread_is_another_one() -> None:
    """Two calls of `asyncio.run`, one after the other."""
    home_loop = asyncio.run(made())

    with pytest.raises(InvalidArgument):
        asyncio.run(checked(home_loop))


def test_it_is_refused_outside_of_loops() -> None:
    home_loop = asyncio.run(made())

    with pytest.raises(InvalidArgument):
        home_loop.check()


def test_a_loop_of_a_forked_process_is_another_one() -> None:
    """In the child, the copy of the first loop looks as if it were running."""
    subprocess.run([sys.executable, "-c", FORKED_IN_A_LOOP], check=True, timeout=60)
