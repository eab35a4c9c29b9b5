"""The sweepers of this replica: one per known partition, each in its own task.

The replica asks every storage node for its partitions at startup; after that, storage announces
each partition that it opens, to one replica. Where nodes share a store, the replica also asks where
partitions are that it cannot sweep any more.
"""

import asyncio
import logging
from collections.abc import Iterator

from lifecycle_svc.holders import Holders
from lifecycle_svc.sweeper import Replica, Sweeper, SweeperState
from tidemark.api.storage.v1.storage_pb2 import DescribeStorageRequest, DescribeStorageResponse
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import (
    InvalidArgument,
    PartitionNotFound,
    TidemarkError,
    Unavailable,
)
from tidemark.limits import PARTITIONS_MAX
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import LifecycleSettings
from tidemark.settings.variables import Address

DISCOVER_AGAIN_MS = 500
LOOK_AGAIN_MS = 500

_log = logging.getLogger(__name__)


class Sweepers:
    """Starts sweepers, finds them by partition, and stops them all."""

    def __init__(self, channels: ChannelPool, settings: LifecycleSettings, clock: Clock) -> None:
        self.replica: Replica | None = None
        """Set once this replica listens."""
        self._channels = channels
        self._settings = settings
        self._partitions = settings.partitions
        """The number of partitions of the cluster; 0 until a storage node has answered."""
        self._clock = clock
        self._holders = Holders(channels, clock, settings.sweep_timeout_ms)
        self._sweepers: dict[int, Sweeper] = {}
        self._addresses: dict[int, str] = {}
        self._openings: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._nodes = set(settings.storage_addresses)
        """Addresses at which storage nodes can be asked."""
        self._discoveries: set[asyncio.Task[None]] = set()
        self._replaced: set[asyncio.Task[None]] = set()
        """Cancelled, and about to end."""

    def __iter__(self) -> Iterator[Sweeper]:
        return iter([self._sweepers[partition] for partition in sorted(self._sweepers)])

    def get(self, partition: int) -> Sweeper:
        """Raises PartitionNotFound if the partition was never announced."""
        try:
            return self._sweepers[partition]
        except KeyError:
            raise PartitionNotFound(
                f"partition {partition} was not announced to this replica", partition=str(partition)
            ) from None

    def announce(self, partition: int, storage_address: str, opening_id: str = "") -> Sweeper:
        """A partition was opened: sweep it now and from now on. Repeats have no effect."""
        if partition >= (self._partitions or PARTITIONS_MAX):
            raise InvalidArgument(
                f"the cluster has {self._partitions or f'at most {PARTITIONS_MAX}'} partitions",
                field="partition",
            )
        try:
            Address().parse(storage_address)
        except ValueError:
            raise InvalidArgument("not an address", field="storage_address") from None
        if self._addresses.get(partition) != storage_address:
            self._start_sweeper(partition, storage_address)
        sweeper = self._sweepers[partition]
        if not opening_id or self._openings.get(partition) != opening_id:
            self._openings[partition] = opening_id
            sweeper.opened()
        return sweeper

    async def discover(self) -> None:
        """Ask every storage node for its partitions; returns once one of them has answered, and
        each of the others has answered or failed once. It repeats calls to those."""
        addresses = self._settings.storage_addresses
        asked = [asyncio.Event() for _ in addresses]
        for address, tried in zip(addresses, asked, strict=True):
            self._start_discovery(address, tried)
        await asyncio.wait(set(self._discoveries), return_when=asyncio.FIRST_COMPLETED)
        for tried in asked:
            await tried.wait()
        _log.info("partitions are swept", extra={"partitions": len(self._sweepers)})

    async def _discover(self, address: str, tried: asyncio.Event) -> None:
        described = await self._describe(address, tried)
        others = set(described.node_addresses) - self._nodes
        self._nodes |= others
        for held in described.held:
            if held.partition not in self._sweepers:  # else it was announced in the meantime
                self.announce(held.partition, _address_of(described, address))
        for other in others:
            self._start_discovery(other, asyncio.Event())
        tried.set()

    def _start_discovery(self, address: str, tried: asyncio.Event) -> None:
        task = asyncio.create_task(self._discover(address, tried))
        self._discoveries.add(task)
        task.add_done_callback(self._discoveries.discard)

    async def follow_moves(self) -> None:
        """Until cancelled: look for partitions that another node holds by now."""
        while True:
            await self._clock.sleep_ms(LOOK_AGAIN_MS)
            await self.look_for_moved()

    async def look_for_moved(self) -> None:
        """Ask all nodes for the partitions with a failed last sweep."""
        lost = {each.partition for each in self if each.state is SweeperState.BACKING_OFF}
        for address in sorted(self._nodes) if lost else ():
            try:
                described = await self._ask(address)
            except (TidemarkError, TimeoutError):
                continue
            if self._why_not(described):
                continue
            self._nodes.update(described.node_addresses)
            holder = _address_of(described, address)
            for held in described.held:
                # Without an epoch it is not open there, or does not move.
                moved = held.storage_epoch and self._addresses.get(held.partition) != holder
                if held.partition in lost and moved:
                    self._start_sweeper(held.partition, holder)

    async def attempted(self) -> None:
        """Return once every partition was tried by the sweeper that it then has."""
        while waiting := [each for each in self if not each.attempted.is_set()]:
            await waiting[0].attempted.wait()

    async def _describe(self, address: str, tried: asyncio.Event) -> DescribeStorageResponse:
        logged = ""
        while True:
            try:
                described = await self._ask(address)
                why = self._why_not(described)
                if not why:
                    self._partitions = described.partitions
                    return described
            except (TidemarkError, TimeoutError) as error:
                why = str(error) or "no answer"
            if why != logged:
                _log.warning("storage is not usable yet", extra={"address": address, "why": why})
            logged = why
            tried.set()
            await self._clock.sleep_ms(DISCOVER_AGAIN_MS)

    async def _ask(self, address: str) -> DescribeStorageResponse:
        storage = StorageServiceStub(await self._channels.to(address))
        return await self._clock.wait_for(
            storage.DescribeStorage(DescribeStorageRequest()), self._settings.sweep_timeout_ms
        )

    def _why_not(self, described: DescribeStorageResponse) -> str:
        """Why a storage node is not usable; empty if it is."""
        if described.cluster_id != self._settings.cluster_id:
            return f"it belongs to cluster {described.cluster_id}"
        if not described.partitions:
            return "it does not know the number of partitions yet"
        if described.partitions != (self._partitions or described.partitions):
            return f"it has {described.partitions} partitions, not {self._partitions}"
        return ""

    async def stop(self) -> None:
        """Stop all sweepers and give up their leases, so that other replicas take over at once."""
        for task in (*self._tasks.values(), *self._discoveries):
            task.cancel()
        tasks = {*self._tasks.values(), *self._discoveries, *self._replaced}
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(sweeper.stop() for sweeper in self._sweepers.values()))

    def _start_sweeper(self, partition: int, storage_address: str) -> None:
        """Start the sweeper of a partition, replacing the one at its previous address."""
        if self.replica is None:
            raise Unavailable("this replica is still starting")
        self._end_sweeper(partition)
        self._addresses[partition] = storage_address
        self._holders.set_storage(partition, storage_address)
        sweeper = Sweeper(
            partition,
            self.replica,
            storage_address,
            self._channels,
            self._holders,
            self._settings,
            self._clock,
        )
        self._sweepers[partition] = sweeper
        self._tasks[partition] = asyncio.create_task(sweeper.run())

    def _end_sweeper(self, partition: int) -> None:
        """End the sweeper of a partition that gets another one."""
        task = self._tasks.pop(partition, None)
        if task is not None:
            task.cancel()
            self._replaced.add(task)
            task.add_done_callback(self._replaced.discard)
            self._sweepers[partition].attempted.set()  # its successor is waited for instead


def _address_of(described: DescribeStorageResponse, asked: str) -> str:
    """The address of the node that has answered, which may be behind a load balancer."""
    return described.node_id if described.node_addresses else asked
