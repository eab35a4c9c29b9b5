"""Memory of a process: gives back to the system what the process no longer uses, on request.

For measuring what a service really holds: `install_memory_trim()` once at start, `kill -USR1 PID`
before reading. Nothing calls it by itself; a trim of a large heap takes a noticeable pause.
"""

import ctypes
import gc
import signal
import sys
from typing import Final

TRIM_SIGNAL: Final = signal.SIGUSR1


def install_memory_trim() -> None:
    """Trim on every SIGUSR1, which would end the process otherwise. Call it in the main thread.

    The handler runs there before anything that arrives later: whoever sends the signal and then
    gets an answer from the process knows that the trim is done.
    """
    signal.signal(TRIM_SIGNAL, lambda _number, _frame: trim_memory())


def calm_the_collector() -> None:
    """Let the garbage collector leave what the start has made alone, and run less often.

    A service holds hundreds of thousands of small objects and makes hardly a cycle; looking through
    all of them every few hundred allocations costs a third of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def trim_memory() -> None:
    """Free unreachable objects, then hand free pages of the C heap back to the system."""
    gc.collect()
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl not
        if malloc_trim is not None:
            malloc_trim(0)
