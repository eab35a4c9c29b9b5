"""The storage nodes of the cluster, and which of them holds a partition, as this broker knows it.

Nodes answer which partitions they hold; this is never configured. An answer stays until its node
answers that it does not hold the partition, or on a store that nodes share also until it does not
answer: then another node holds it soon. A node that does not answer, or belongs to another cluster,
concerns its own partitions only (C1).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

from broker_svc.links.storage_node_link import StorageNodeLink
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import storage_pb2, storage_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import ClusterMismatch, PartitionNotFound, TidemarkError, Unavailable
from tidemark.registry.observation import Observation
from tidemark.rpc.witnesses import witness_of
from tidemark.settings import BrokerSettings

ANSWER_MS_MAX: Final = 5_000
_CALLS_MAX: Final = 3
"""Of a call that finds its partition gone: it may move while it is being looked for."""
_MOVING_MS: Final = 50
_LOOK_AGAIN_MS_MAX: Final = 2_000
_LOOK_AGAIN_SHARED_MS_MAX: Final = 250
"""Another node opens a partition of a shared store soon, and asking the nodes is cheap."""

_log = logging.getLogger(__name__)


class StorageNode:
    """One storage node: its calls, and the exchange with it."""

    def __init__(
        self,
        address: str,
        storage: storage_pb2_grpc.StorageServiceStub,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.storage = storage
        self.link = StorageNodeLink(storage, on_broken)
        self.asking: asyncio.Task[storage_pb2.DescribeStorageResponse] | None = None
        self.why_not = ""
        """Why it is not usable; "" if it is, or was not asked yet."""


class StorageNodes:
    """All nodes, by the partitions that they hold. The only node of a cluster holds all of them."""

    def __init__(
        self,
        nodes: Sequence[StorageNode],
        settings: BrokerSettings,
        clock: Clock,
        witnessed_commit: Callable[[int], int] = lambda _partition: 0,
    ) -> None:
        """`witnessed_commit` returns the last commit of a partition that this broker has seen."""
        self.nodes = nodes
        self.witnessed_commit = witnessed_commit
        self.members: Observation | None = None
        """The nodes in the registry, which assigns partitions of a shared store to them; None
        without a registry."""
        self._settings = settings
        self._clock = clock
        self._holders: dict[int, StorageNode] = {}
        self._epochs: dict[int, int] = {}
        """The storage epochs under which those nodes have partitions of a shared store open."""
        self._is_shared = False
        """Whether nodes share a store, so that partitions move between them."""
        self._conflicts: dict[int, str] = {}

    def located(self, partition: int) -> StorageNode | None:
        """The node that holds a partition, if that is known."""
        return self.nodes[0] if len(self.nodes) == 1 else self._holders.get(partition)

    @property
    def is_any_away(self) -> bool:
        """Whether a node was not usable when it was last asked."""
        return any(node.why_not for node in self.nodes)

    @property
    def look_again_ms_max(self) -> int:
        """The longest wait between two attempts to claim a partition that is down."""
        return _LOOK_AGAIN_SHARED_MS_MAX if self._is_shared else _LOOK_AGAIN_MS_MAX

    def set_nodes(self, nodes: Sequence[StorageNode]) -> None:
        """The nodes have changed. Partitions that were found at one that is gone are looked for."""
        self.nodes = nodes
        for partition, holder in list(self._holders.items()):
            if holder not in nodes:
                self.forget(partition)

    def forget(self, partition: int) -> None:
        """Its node has answered that it does not hold the partition."""
        self._holders.pop(partition, None)

    def lost(self, partition: int, error: TidemarkError) -> None:
        """A call to the node of a partition has failed, or its part of the exchange has ended."""
        if self._is_shared or isinstance(error, PartitionNotFound):
            self.forget(partition)

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
        """The unary calls of the node that holds a partition; raises Unavailable.

        A call that finds the partition gone is made again where it is then. It carries the last
        commit that this broker has seen, which may be lost there.
        """
        await self.locate(partition)
        calls = _HolderCalls(self, partition, self._clock)
        return cast(storage_pb2_grpc.StorageServiceStub, calls)

    async def describe(
        self,
    ) -> Mapping[StorageNode, storage_pb2.DescribeStorageResponse | TidemarkError]:
        """All nodes as they are now, or why they do not answer."""
        nodes = list(self.nodes)  # others may come and go while these answer
        outcomes = await asyncio.gather(*map(self._ask, nodes), return_exceptions=True)
        described: dict[StorageNode, storage_pb2.DescribeStorageResponse | TidemarkError] = {}
        for node, outcome in zip(nodes, outcomes, strict=True):
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
        self._is_shared = described.engine == "redis"
        for info in described.held:
            self._found(info, node)
        if self._is_shared:
            held = {info.partition for info in described.held}
            for partition in [k for k, v in self._holders.items() if v is node and k not in held]:
                self.forget(partition)
        return described

    def _found(self, info: topic_pb2.PartitionInfo, node: StorageNode) -> None:
        partition = info.partition
        holder = self._holders.setdefault(partition, node)
        if self._is_shared:
            if holder is node or info.storage_epoch > self._epochs.get(partition, 0):
                self._holders[partition] = node
                self._epochs[partition] = info.storage_epoch
        elif holder is not node and partition not in self._conflicts:
            # The data of one is a copy: neither may be preferred in silence.
            self._conflicts[partition] = (
                f"partition {partition} is held by {holder.address} and by {node.address}"
            )
            _log.error("two storage nodes hold a partition: %s", self._conflicts[partition])


class _HolderCalls:
    """The calls of whichever node holds a partition, in place of those of one node."""

    def __init__(self, nodes: StorageNodes, partition: int, clock: Clock) -> None:
        self._nodes = nodes
        self._partition = partition
        self._clock = clock

    def __getattr__(self, name: str) -> Callable[[Any], Awaitable[Any]]:
        async def call(request: Any) -> Any:
            witness = witness_of(self._nodes.witnessed_commit(self._partition))
            for _ in range(_CALLS_MAX):
                node = await self._nodes.locate(self._partition)
                try:
                    return await getattr(node.storage, name)(request, metadata=witness)
                except PartitionNotFound as error:  # nothing was done
                    self._nodes.lost(self._partition, error)
                except Unavailable as error:
                    self._nodes.lost(self._partition, error)
                    raise
                await self._clock.sleep_ms(_MOVING_MS)
            raise Unavailable(
                f"partition {self._partition} is moving between storage nodes",
                partition=str(self._partition),
            )

        return call


def _asked(node: StorageNode, task: "asyncio.Task[storage_pb2.DescribeStorageResponse]") -> None:
    node.asking = None
    if task.cancelled():
        return
    error = task.exception()
    why_not = error.detail if isinstance(error, TidemarkError) else ""
    if why_not and why_not != node.why_not:
        _log.warning("a storage node is away", extra={"address": node.address, "why": why_not})
    node.why_not = why_not
