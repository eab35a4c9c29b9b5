"""Eviction markers: "(client, group, lmq_name) was evicted", in broker memory (E2-E6).

Pure. A marker is written before the client is told and answers at the door without asking storage.
Markers go by exactly three paths: explicit resubscription removes one, a full resync keeps only
what is still reported, disconnect or timeout removes all of a client. No task watches over them.
"""

from collections.abc import Iterable


class EvictionMarkers:
    """The markers of one broker, nested so that no choice of ids can make two of them collide."""

    __slots__ = ("_by_client", "_count")

    def __init__(self) -> None:
        self._by_client: dict[str, dict[str, dict[str, int]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, client_id: str, group: str, lmq_name: str, epoch: int) -> None:
        """The client was evicted by the owner of `epoch`; a later eviction replaces an earlier."""
        names = self._by_client.setdefault(client_id, {}).setdefault(group, {})
        self._count += lmq_name not in names
        names[lmq_name] = epoch

    def epoch(self, client_id: str, group: str, lmq_name: str) -> int | None:
        """The epoch that evicted the client; None if it is not marked."""
        return self._by_client.get(client_id, {}).get(group, {}).get(lmq_name)

    def remove(self, client_id: str, group: str, lmq_name: str) -> None:
        """Explicit resubscription; harmless if there is none."""
        names = self._by_client.get(client_id, {}).get(group, {})
        if names.pop(lmq_name, None) is not None:
            self._count -= 1
            self._tidy(client_id, group)

    def keep_only(self, client_id: str, group: str, reported: Iterable[str]) -> None:
        """Full resync: names that the client does not report any more are forgotten."""
        names = self._by_client.get(client_id, {}).get(group, {})
        kept = set(reported)
        for lmq_name in [name for name in names if name not in kept]:
            del names[lmq_name]
            self._count -= 1
        self._tidy(client_id, group)

    def remove_client(self, client_id: str) -> None:
        """Disconnect or timeout."""
        groups = self._by_client.pop(client_id, {})
        self._count -= sum(len(names) for names in groups.values())

    def _tidy(self, client_id: str, group: str) -> None:
        groups = self._by_client.get(client_id)
        if groups is not None and not groups.get(group):
            groups.pop(group, None)
            if not groups:
                del self._by_client[client_id]
