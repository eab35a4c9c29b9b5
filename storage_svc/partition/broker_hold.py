"""The broker hold: since when the present broker has held a partition, as this process has seen it.

Pure. Clients of a broker that restarted, or whose link broke, reconnect within their timeout. Until
that has passed, storage has no record of the queues that they use.
"""

CLIENT_TIMEOUT_DEFAULT_MS = 30_000


class BrokerHold:
    """Kept in memory, across a fault of the partition. The link that follows a claim begins it; a
    lost link ends it."""

    __slots__ = ("_client_timeout_ms", "_since_ms")

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._client_timeout_ms = CLIENT_TIMEOUT_DEFAULT_MS

    def claimed(self, client_timeout_ms: int) -> None:
        """A broker has claimed the partition. Its clients reach nothing before its link is up, and
        it may end before that."""
        self._since_ms = None
        self._client_timeout_ms = client_timeout_ms or CLIENT_TIMEOUT_DEFAULT_MS

    def begin(self, now_ms: int) -> None:
        """The broker is connected. The link of the one before it may have ended after its claim."""
        if self._since_ms is None:
            self._since_ms = now_ms

    def restart(self, now_ms: int) -> None:
        """Storage has forgotten which queues the broker tracks, and the broker loads them again."""
        if self._since_ms is not None:
            self._since_ms = now_ms

    def end(self) -> None:
        """No broker is connected."""
        self._since_ms = None

    def knows_clients(self, now_ms: int) -> bool:
        """Whether every client that is still there has reconnected and uses its queues again."""
        return self._since_ms is not None and now_ms - self._since_ms >= self._client_timeout_ms
