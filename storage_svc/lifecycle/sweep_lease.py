"""The sweep lease: one of several lifecycle replicas sweeps a partition while it renews it (L2).

Pure: monotonic time is an argument. The lease lives in memory only. It saves work and is not needed
for safety: an action that is planned twice is a no-op the second time (L8).
"""

from typing import NamedTuple


class Lease(NamedTuple):
    """The right to sweep, and its holder."""

    sweeper_id: str
    address: str
    expires_ms: int


class SweepLease:
    """The lease of one partition, and when lifecycle last asked for it."""

    __slots__ = ("_lease", "asked_ms")

    def __init__(self, now_ms: int) -> None:
        self.asked_ms = now_ms
        """When a replica last asked; the start counts as once."""
        self._lease: Lease | None = None

    def holder(self, now_ms: int) -> Lease | None:
        """The replica that may sweep now."""
        lease = self._lease
        return lease if lease is not None and lease.expires_ms > now_ms else None

    def is_held_by(self, sweeper_id: str, now_ms: int) -> bool:
        holder = self.holder(now_ms)
        return holder is not None and holder.sweeper_id == sweeper_id

    def ask(self, sweeper_id: str, address: str, lease_ms: int, now_ms: int) -> bool:
        """Take or renew the lease, or give it up with 0; returns whether the caller may sweep."""
        self.asked_ms = now_ms
        holder = self.holder(now_ms)
        if holder is not None and holder.sweeper_id != sweeper_id:
            return False
        self._lease = Lease(sweeper_id, address, now_ms + lease_ms) if lease_ms else None
        return lease_ms > 0
