"""How long the event loop is held: CPU times of its turns, so that other processes do not count."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Turns:
    """CPU times of the turns of the event loop, and of the collections of garbage within them."""

    longest_ns: int = 0
    collected_ns: int = 0
    _began_ns: int = field(default_factory=time.thread_time_ns)
    _collection_ns: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def between_turns(timeout: float | None = None) -> Any:
            self._end_turn()
            events = select(timeout)
            self._began_ns = time.thread_time_ns()
            return events

        selector.select = between_turns
        gc.callbacks.append(self._collecting)
        self._began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self._end_turn()
            gc.callbacks.remove(self._collecting)
            del selector.select

    def _end_turn(self) -> None:
        self.longest_ns = max(self.longest_ns, time.thread_time_ns() - self._began_ns)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        now_ns = time.thread_time_ns()
        if phase == "start":
            self._collection_ns = now_ns
        else:
            self.collected_ns = max(self.collected_ns, now_ns - self._collection_ns)
