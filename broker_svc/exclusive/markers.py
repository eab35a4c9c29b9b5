"""Eviction markers: "(client, group, lmq_name) was evicted", in broker memory (E2-E6).

Pure. A marker is written before the client is notified, and rejects its pulls without asking
storage. Exactly three paths remove markers: explicit resubscription removes one, a full resync
keeps only the names that are still reported, disconnect or timeout removes all of a client. No task
is involved.
"""

from collections.abc import Iterable
from typing import Final

from tidemark import limits

MARKERS_PER_CLIENT_MAX: Final = limits.SUBSCRIPTIONS_PER_SESSION_MAX
"""As many as one resync can report. A client at the limit cannot subscribe to more queues."""


class EvictionMarkers:
    """The markers of one broker, nested so that no choice of ids makes two of them collide."""

    __slots__ = ("_by_client", "_count")

    def __init__(self) -> None:
        self._by_client: dict[str, dict[tuple[str, str], int]] = {}
        """The epochs of each client by group and lmq_name."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, client_id: str, group: str, lmq_name: str, epoch: int) -> None:
        """The client was evicted by the owner of `epoch`; a later eviction replaces an earlier."""
        marked = self._by_client.setdefault(client_id, {})
        self._count += (group, lmq_name) not in marked
        marked[group, lmq_name] = epoch

    def may_add(self, client_id: str, group: str, lmq_name: str) -> bool:
        """Whether the client is below the limit, or has this marker already."""
        marked = self._by_client.get(client_id, {})
        return len(marked) < MARKERS_PER_CLIENT_MAX or (group, lmq_name) in marked

    def epoch(self, client_id: str, group: str, lmq_name: str) -> int | None:
        """The epoch that evicted the client; None if it is not marked."""
        return self._by_client.get(client_id, {}).get((group, lmq_name))

    def remove(self, client_id: str, group: str, lmq_name: str) -> None:
        """Explicit resubscription; harmless if there is none."""
        marked = self._by_client.get(client_id, {})
        if marked.pop((group, lmq_name), None) is not None:
            self._count -= 1
            if not marked:
                del self._by_client[client_id]

    def keep_only(self, client_id: str, group: str, reported: Iterable[str]) -> None:
        """Full resync: remove the names that the client no longer reports."""
        kept = set(reported)
        for each, lmq_name in list(self._by_client.get(client_id, ())):
            if each == group and lmq_name not in kept:
                self.remove(client_id, group, lmq_name)

    def remove_client(self, client_id: str) -> None:
        """Disconnect or timeout."""
        self._count -= len(self._by_client.pop(client_id, {}))
