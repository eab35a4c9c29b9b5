"""Storage nodes on a shared store: nodes and servers of the store fail one after the other."""

import asyncio
from typing import Final

from bench.failover.publishing import PARTITIONS, Publishing, until
from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.layout import mark_key
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.local.cluster import LocalCluster

STORAGES: Final = 3
MASTERS: Final = 3
"""Servers of the store, each with a replica."""

_CLUSTER_ID = "tidemark"


class Storages:
    """The storage nodes of a cluster and their store, and a client that publishes to it."""

    def __init__(self, cluster: LocalCluster, store: ValkeyCluster, publishing: Publishing) -> None:
        self._cluster = cluster
        self._store = store
        self._publishing = publishing
        self._admin = publishing.client.admin
        self._names = cluster.services_of("storage")
        self._turn = 0

    async def kill_node(self) -> float:
        """Kill the next storage node, and start it again; the longest wait of a publish, in ms."""
        name = self._names[self._turn % len(self._names)]
        address = self._cluster.address(name)
        self._turn += 1
        await until(self._is_shared)
        partition = next(number for number, at in (await self._held()).items() if at == address)

        async def is_elsewhere() -> bool:
            return (await self._held())[partition] not in (address, "")

        longest_ms = await self._publishing.longest_ms(
            partition, lambda: self._cluster.kill(name), is_elsewhere
        )
        await self._cluster.restart(name)
        return longest_ms

    async def kill_master(self) -> float:
        """Kill the server of the next partition, and start it again; the longest wait of a
        publish, in ms."""
        partition = self._turn % PARTITIONS
        self._turn += 1
        await until(self._is_shared)
        key = mark_key(Identity(_CLUSTER_ID, partition, PARTITIONS))
        killed = await asyncio.to_thread(self._store.master_of, key)

        async def fail() -> None:
            await asyncio.to_thread(self._store.kill, killed)

        async def is_promoted() -> bool:
            return await asyncio.to_thread(self._store.master_of, key) is not killed

        longest_ms = await self._publishing.longest_ms(partition, fail, is_promoted)
        await asyncio.to_thread(self._store.start, killed)
        await asyncio.to_thread(self._store.until_whole)
        return longest_ms

    async def _is_shared(self) -> bool:
        """Every partition serves, and every node has some."""
        partitions = await self._admin.list_partitions()
        nodes = {each.storage_address for each in partitions}
        serving = all(each.state == "SERVING" for each in partitions)
        return serving and nodes == set(map(self._cluster.address, self._names))

    async def _held(self) -> dict[int, str]:
        """The address of the storage node of each partition that is open; "" of the others."""
        partitions = await self._admin.list_partitions()
        return {each.partition: each.storage_address for each in partitions}
