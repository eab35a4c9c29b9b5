"""An event loop in a separate thread, on which other threads run coroutines.

The blocking client runs on it. It is independent of the coroutines that it runs.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from tidemark.errors import ClientClosed, InvalidArgument

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tidemark", daemon=True)
        self._lock = threading.Lock()
        self._open = False
        self._process_id = os.getpid()

    def start(self) -> None:
        self._open = True
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work and return its result; an interrupted caller cancels the work."""
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument(
                "a callback must not call the blocking client: it would wait for itself"
            )
        if os.getpid() != self._process_id:
            work.close()  # only the thread that forked lives on in the child
            raise ClientClosed("the process was forked: connect in the child, after the fork")
        with self._lock:  # nothing starts once `stop` was called
            if not self._open:
                work.close()
                raise ClientClosed("the client is closed, or not entered yet")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start the work after everything started before it, and do not wait for it."""
        with self._lock:
            if self._open:
                asyncio.run_coroutine_threadsafe(work, self._loop)
            else:
                work.close()

    def stop(self) -> None:
        """Cancel the work that still runs, and end the thread."""
        if os.getpid() != self._process_id:
            return  # the loop and the lock are those of the parent
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
