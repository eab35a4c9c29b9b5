"""The storage nodes of the cluster, and which of them holds a partition, as this broker knows it.

Where a partition is, the nodes are asked and never configured. What was found stays until its node
answers that it does not hold the partition. A node that does not answer, or belongs to another
cluster, concerns its own partitions only (C1).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from broker_svc.links.storage_node_link import StorageNodeLink
from tidemark.api.storage.v1 import storage_pb2, storage_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import ClusterMismatch, PartitionNotFound, TidemarkError, Unavailable
from tidemark.settings import BrokerSettings

ANSWER_MS_MAX: Final = 5_000

_log = logging.getLogger(__name__)


class StorageNode:
    """One storage node: its calls, and the exchange with it."""

    def __init__(self, address: str, storage: storage_pb2_grpc.StorageServiceStub) -> None:
        self.address = address
        self.storage = storage
        self.link = StorageNodeLink(storage)
        self.asking: asyncio.Task[storage_pb2.DescribeStorageResponse] | None = None
        self.why_not = ""
        """Why it is not usable; "" if it is, or was not asked yet."""


class StorageNodes:
    """All nodes, by the partitions that they hold. The only node of a cluster holds all of them."""

    def __init__(
        self, nodes: Sequence[StorageNode], settings: BrokerSettings, clock: Clock
    ) -> None:
        self.nodes = nodes
        self._settings = settings
        self._clock = clock
        self._holders: dict[int, StorageNode] = {}
        self._conflicts: dict[int, str] = {}

    def located(self, partition: int) -> StorageNode | None:
        """The node that holds a partition, if that is known."""
        return self.nodes[0] if len(self.nodes) == 1 else self._holders.get(partition)

    @property
    def is_any_away(self) -> bool:
        """Whether a node was not usable when it was last asked."""
        return any(node.why_not for node in self.nodes)

    def forget(self, partition: int) -> None:
        """Its node has answered that it does not hold the partition."""
        self._holders.pop(partition, None)

    async def locate(self, partition: int) -> StorageNode:
        """The node that holds a partition; raises Unavailable if no node answers that it does, and
        PartitionNotFound for a partition that the cluster does not have."""
        if partition >= self._settings.partitions:
            raise PartitionNotFound(f"there is no partition {partition}", partition=str(partition))
        asked: set[asyncio.Task[storage_pb2.DescribeStorageResponse]] | None = None
        while partition not in self._conflicts:
            found = self.located(partition)
            if found is not None:
                return found
            if asked is None:
                asked = {self._ask(node) for node in self.nodes}
            elif not asked:
                break
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        away = [f"{node.address}: {node.why_not}" for node in self.nodes if node.why_not]
        reasons = [self._conflicts.get(partition, f"no storage node holds partition {partition}")]
        raise Unavailable("; ".join(reasons + away), partition=str(partition))

    async def storage(self, partition: int) -> storage_pb2_grpc.StorageServiceStub:
        """The calls of the node that holds a partition; raises Unavailable."""
        return (await self.locate(partition)).storage

    async def describe(
        self,
    ) -> Mapping[StorageNode, storage_pb2.DescribeStorageResponse | TidemarkError]:
        """All nodes as they are now, or why they do not answer."""
        outcomes = await asyncio.gather(
            *(self._ask(node) for node in self.nodes), return_exceptions=True
        )
        described: dict[StorageNode, storage_pb2.DescribeStorageResponse | TidemarkError] = {}
        for node, outcome in zip(self.nodes, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, TidemarkError):
                raise outcome
            described[node] = outcome
        return described

    def _ask(self, node: StorageNode) -> "asyncio.Task[storage_pb2.DescribeStorageResponse]":
        """All who ask while an answer is awaited share it."""
        if node.asking is None:
            node.asking = asyncio.create_task(self._describe(node))
            node.asking.add_done_callback(lambda task: _asked(node, task))
        return node.asking

    async def _describe(self, node: StorageNode) -> storage_pb2.DescribeStorageResponse:
        call = node.storage.DescribeStorage(storage_pb2.DescribeStorageRequest())
        try:
            described = await self._clock.wait_for(call, ANSWER_MS_MAX)
        except TimeoutError:
            raise Unavailable(f"{node.address} did not answer in {ANSWER_MS_MAX} ms") from None
        mine = self._settings
        if (described.cluster_id, described.partitions) != (mine.cluster_id, mine.partitions):
            raise ClusterMismatch(
                f"it belongs to cluster {described.cluster_id!r} with {described.partitions} "
                f"partitions, not to cluster {mine.cluster_id!r} with {mine.partitions}"
            )
        for info in described.held:
            self._found(info.partition, node)
        return described

    def _found(self, partition: int, node: StorageNode) -> None:
        holder = self._holders.setdefault(partition, node)
        if holder is not node and partition not in self._conflicts:
            # The data of one is a copy: neither may be preferred in silence.
            self._conflicts[partition] = (
                f"partition {partition} is held by {holder.address} and by {node.address}"
            )
            _log.error("two storage nodes hold a partition: %s", self._conflicts[partition])


def _asked(node: StorageNode, task: "asyncio.Task[storage_pb2.DescribeStorageResponse]") -> None:
    node.asking = None
    if task.cancelled():
        return
    error = task.exception()
    why_not = error.detail if isinstance(error, TidemarkError) else ""
    if why_not and why_not != node.why_not:
        _log.warning("a storage node is away", extra={"address": node.address, "why": why_not})
    node.why_not = why_not
