"""The storage nodes of a shared store, as the registry knows them: connected to as they come.

Without such members, as with RocksDB, the nodes are those of the settings. A node whose exchange
breaks is suspected, so that its partitions are open elsewhere before its time to live is over.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import grpc

from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.registry.observation import Observation
from tidemark.registry.protocol import View
from tidemark.rpc.channel import open_channel

KIND: Final = "storages"
"""The kind of members in the registry."""


class _Connected(NamedTuple):
    """A node that is not in the settings, with what belongs to it."""

    node: StorageNode
    channel: grpc.aio.Channel
    exchanging: asyncio.Task[None]

    async def close(self) -> None:
        self.exchanging.cancel()
        await asyncio.gather(self.exchanging, return_exceptions=True)
        await self.channel.close()


class StorageMembers:
    """Keeps the nodes of a broker those of the registry. `run` does so until cancelled."""

    def __init__(
        self, observation: Observation, nodes: StorageNodes, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when nodes or their assignment have changed."""
        self._observation = observation
        self._nodes = nodes
        self._configured = list(nodes.nodes)
        self._changed = changed
        self._connected: dict[str, _Connected] = {}

    @property
    def view(self) -> View:
        return self._observation.view

    async def run(self) -> None:
        observing = asyncio.create_task(self._observation.run())
        try:
            while True:
                self._observation.changed.clear()
                await self.follow()
                await self._observation.changed.wait()
        finally:
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in self._connected.values()))

    async def follow(self) -> None:
        """Take over the present view."""
        addresses = {each.address for each in self.view.members.values()}
        nodes = {node.address: node for node in self._configured if node.address in addresses}
        for address in addresses - nodes.keys():
            if address not in self._connected:
                self._connected[address] = self._connect(address)
            nodes[address] = self._connected[address].node
        self._nodes.set_nodes([nodes[each] for each in sorted(nodes)] or self._configured)
        self._changed()
        for address in self._connected.keys() - addresses:
            if not self._connected[address].node.link.is_used:
                await self._connected.pop(address).close()

    def _connect(self, address: str) -> _Connected:
        channel = open_channel(address)
        suspect = partial(self._observation.suspect, address)
        node = StorageNode(address, StorageServiceStub(channel), suspect)
        return _Connected(node, channel, asyncio.create_task(node.link.run()))
