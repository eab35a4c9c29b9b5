"""Memory of a service process: garbage collector settings, caches of names, trimming on request.

For measuring the memory that a service really uses: `kill -USR1 PID` makes it return unused memory
to the system. It happens only on request, because trimming a large heap pauses the process.
"""

import ctypes
import gc
import signal
import sys
from typing import Final

from tidemark.clock import Clock
from tidemark.name_caches import empty_name_caches

TRIM_SIGNAL: Final = signal.SIGUSR1

NAMES_KEPT_MS: Final = 60_000
"""How long caches of names fill before they are emptied."""


def install_memory_trim() -> None:
    """Trim on every SIGUSR1. Call it in the main thread.

    The handler runs before anything that arrives later, so a response to a call made after the
    signal means that the trim is done.
    """
    signal.signal(TRIM_SIGNAL, lambda _number, _frame: trim_memory())


def tune_garbage_collector() -> None:
    """Exclude the objects made at startup from garbage collection, and collect less often.

    A service holds hundreds of thousands of small objects and creates hardly any cycles; scanning
    all of them every few hundred allocations costs a third of its time. A collection also stops the
    process for a tenth of a microsecond per object, so the younger ones see at most some 25 000
    objects, and the full one is rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 4, 50_000)


async def keep_name_caches_young(clock: Clock) -> None:
    """Empty the caches of names every minute, so that they keep no memory of an earlier burst."""
    while True:
        await clock.sleep_ms(NAMES_KEPT_MS)
        empty_name_caches()


def trim_memory() -> None:
    """Free unreachable objects, then return free pages of the C heap to the system."""
    empty_name_caches()
    gc.collect()
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc, not in musl
        if malloc_trim is not None:
            malloc_trim(0)
