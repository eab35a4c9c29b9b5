"""A real broker on a real storage service, with gates between them.

Both can be stopped and started again at the same address over the same data. The gates hold back
or lose what passes between them, so that a test decides who comes first.
"""

from tests.support.exclusive_clients import SessionClient, UnaryClient
from tests.support.gated_storage import GatedLink, GatedStorage, gated_storage
from tests.support.local_broker import LocalBroker
from tidemark.names import partition_of

PARTITIONS = 2
QUEUE = "own/a"
OTHER_QUEUE = "own/b"


class ExclusiveBroker(LocalBroker):
    """A broker that reaches its storage through gates."""

    gates: GatedStorage

    async def start_gates(self) -> None:
        gates = gated_storage(self.storage_address, self.partitions)
        self.gates = await self._clients.enter_async_context(gates)

    async def start_broker(self, storage_address: str = "") -> None:
        await super().start_broker(storage_address or self.gates.address)

    @property
    def link(self) -> GatedLink:
        """The way to the partition of `QUEUE`."""
        return self.gates.links[partition_of(QUEUE, self.partitions)]

    async def restart_broker(self) -> None:
        await self.stop_broker()
        await self.start_broker()

    async def session_client(
        self, client_id: str, group: str = "", credit: int = 100
    ) -> SessionClient:
        return SessionClient(await self.session(client_id), client_id, group, credit)

    def unary_client(self, client_id: str, group: str = "") -> UnaryClient:
        return UnaryClient(self, client_id, group)
