"""Watching: what the exchange of a broker wants to hear of its partition once it is durable.

The partition writes it down after each commit; the exchange reads it, sends it and clears it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from storage_svc.partition.journal import QueueGroup


@dataclass(slots=True, eq=False)
class Watcher:
    """What one exchange has not told its broker yet."""

    broker_epoch: int
    ready: dict[QueueGroup, None] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)
    next_deadline_changed: bool = True
    told_deadline_ms: int | None = None
    health_changed: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def committed(
        self,
        ready: Iterable[QueueGroup],
        expired: Iterable[int],
        earliest_ms: int | None,
        now_ms: int,
    ) -> None:
        """A commit is durable: what became ready, what expired, the next deadline since."""
        self.ready.update(dict.fromkeys(ready))
        self.expired += expired
        moved = self._deadline_moved(earliest_ms, now_ms)
        self.next_deadline_changed = self.next_deadline_changed or moved
        if self.ready or self.expired or moved:
            self.changed.set()

    def _deadline_moved(self, earliest_ms: int | None, now_ms: int) -> bool:
        """Whether the broker must hear of it: it would wake too late, or for nothing again.

        That the earliest deadline went away is told when it would have come: messages are settled
        all the time, and none of that is news.
        """
        told_ms = self.told_deadline_ms
        if told_ms is None or told_ms <= now_ms:
            return earliest_ms != told_ms
        return earliest_ms is not None and earliest_ms < told_ms
