"""Unary clients: clients without a session, by client id, with the time of their last call.

Messages that a unary client has pulled and not settled are returned once it has been silent for too
long (V6).
"""

from broker_svc.consume.deliveries import Deliveries, DeliveryDirectory
from broker_svc.consume.settlements import Settlements
from broker_svc.exclusive.registry import Subscriber
from broker_svc.exclusive.subscriptions import Subscriptions


class UnaryClient:
    """One client without a session."""

    __slots__ = ("calls", "deliveries", "last_call_ms", "subscriber")

    def __init__(self, client_id: str, directory: DeliveryDirectory, now_ms: int) -> None:
        self.deliveries = Deliveries(directory)
        self.last_call_ms = now_ms
        self.calls = 0
        """Calls in progress: a client that waits for an answer is not silent."""
        # It cannot be notified: the answers to its heartbeats and pulls carry the state.
        self.subscriber = Subscriber(client_id, lambda _notice: None)


class UnaryClients:
    """The unary clients that hold something or called recently."""

    def __init__(
        self, directory: DeliveryDirectory, settlements: Settlements, subscriptions: Subscriptions
    ) -> None:
        self._directory = directory
        self._settlements = settlements
        self._subscriptions = subscriptions
        self._clients: dict[str, UnaryClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def touch(self, client_id: str, now_ms: int) -> UnaryClient:
        """The client has called; returns its record."""
        client = self._clients.get(client_id)
        if client is None:
            client = UnaryClient(client_id, self._directory, now_ms)
            self._clients[client_id] = client
            self._subscriptions.attach(client.subscriber)
        client.last_call_ms = now_ms
        return client

    def expire(self, now_ms: int, timeout_ms: int) -> int:
        """Give back messages of silent clients, and forget the clients; returns their number."""
        silent = [
            client_id
            for client_id, client in self._clients.items()
            if not client.calls and now_ms - client.last_call_ms > timeout_ms
        ]
        for client_id in silent:
            client = self._clients.pop(client_id)
            self._subscriptions.detach(client.subscriber)
            self._settlements.give_back(client.deliveries.take_all(), failed=True)
        return len(silent)
