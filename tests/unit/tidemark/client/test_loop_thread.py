"""The event loop of the blocking client, in a process that was forked."""

import subprocess
import sys

FORKS = """
import asyncio, os
from tidemark.client.loop_thread import LoopThread
from tidemark.errors import ClientClosed

loop = LoopThread()
loop.start()
child = os.fork()
if not child:
    try:
        loop.run(asyncio.sleep(0))
    except ClientClosed as error:
        print(error.detail, flush=True)
    loop.stop()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(loop.run(asyncio.sleep(0, "the parent goes on")))
loop.stop()
"""


def test_a_call_in_a_forked_process_is_refused_and_does_not_wait() -> None:
    """K3: the thread that would run it exists in the parent only."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True
    )

    assert ended.stdout.splitlines() == [
        "the process was forked: connect in the child, after the fork",
        "7",
        "the parent goes on",
    ]
