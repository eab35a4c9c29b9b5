"""Routes: which connection leads to which partition, and which one carries which group.

Requests for a partition go to the home connection (any broker that the user named) until a broker
names the holder of the partition (S8); when the connection to the holder is lost, they go home
again. A holder that cannot be reached from here keeps its connection, which tries again, and home
forwards to it in the meantime.
"""

from collections.abc import Callable, Sequence

from tidemark.api.broker.v1.broker_pb2 import GoAway
from tidemark.client.transport.connection import Connection, Identity, SessionPart


class Routes:
    """All connections of a client."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        self._identity = identity
        self._addresses = addresses
        self.home = Connection(addresses, identity, home=True)
        self._others: list[Connection] = []
        self._moved: dict[int, Connection] = {}
        self._carried: Callable[[Connection], SessionPart] | None = None

    def start(self) -> None:
        self.home.start()

    async def close(self) -> None:
        """Close every connection; when cancelled, end them at once."""
        try:
            for connection in (*self._others, self.home):
                await connection.close()
        finally:
            self.end()

    def end(self) -> None:
        """End every connection at once, without waiting."""
        for connection in (*self._others, self.home):
            connection.end()

    def carry(self, part_of: Callable[[Connection], SessionPart]) -> None:
        """Attach a separate part to every connection, now and later."""
        self._carried = part_of
        self.home.attach(part_of(self.home))

    def to_partition(self, partition: int) -> Connection:
        return self._moved.get(partition, self.home)

    def forwards(self, partition: int) -> bool:
        """Whether the holder cannot be reached from here: home forwards unary calls to it."""
        holder = self._moved.get(partition)
        return holder is not None and holder.is_unreachable

    def to_calls(self, partition: int) -> Connection:
        """The connection to the broker that takes unary calls for a partition."""
        return self.home if self.forwards(partition) else self.to_partition(partition)

    def follow(self, partition: int, holder: str) -> None:
        """A broker named the holder of a partition; without a name, requests go home again."""
        before = self._moved.pop(partition, None)
        if holder and holder != self.home.address:
            self._moved[partition] = self._at(holder)
        if before is not None and before.is_unreachable:
            self._end_unused(before)
        go_away = GoAway(partition=partition, address=holder)
        for connection in (self.home, *self._others):
            if holder and connection.address != holder:
                connection.notify_moved(go_away)

    def lost(self, connection: Connection) -> None:
        """The partitions of a lost holder are requested from home again.

        A connection to a broker that cannot be reached, and that carries nothing, is closed.
        """
        if connection.home:
            return
        self._moved = {k: v for k, v in self._moved.items() if v is not connection}
        self._end_unused(connection)

    def for_group(self, group: str, holder: str = "") -> Connection:
        """A connection without a subscription of that group: a sync covers its whole group."""
        candidates = [self.home] if not holder else self._all_at(holder)
        for connection in candidates:
            if group not in connection.groups:
                connection.groups.add(group)
                return connection
        addresses = [holder] if holder else self._addresses
        connection = self._open(addresses, home=not holder)
        connection.groups.add(group)
        return connection

    async def leave_group(self, connection: Connection, group: str) -> None:
        """A subscription has ended; a connection that was opened for it is closed."""
        connection.groups.discard(group)
        if connection in self._others and not connection.has_consumers:
            if connection in self._moved.values():
                return
            self._others.remove(connection)
            await connection.close()

    def _end_unused(self, connection: Connection) -> None:
        unused = connection in self._others and not connection.has_consumers
        if unused and connection.session is None and connection not in self._moved.values():
            self._others.remove(connection)
            connection.end()

    def _at(self, address: str) -> Connection:
        found = self._all_at(address)
        return found[0] if found else self._open([address], home=False)

    def _all_at(self, address: str) -> list[Connection]:
        return [each for each in (self.home, *self._others) if each.address == address]

    def _open(self, addresses: Sequence[str], *, home: bool) -> Connection:
        connection = Connection(addresses, self._identity, home=home)
        self._others.append(connection)
        if self._carried is not None:
            connection.attach(self._carried(connection))
        connection.start()
        return connection
