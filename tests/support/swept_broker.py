"""Storage, broker and lifecycle in the process of the test, over real gRPC and a real RocksDB.

All three share a manual clock, so that nothing is due before the test moves it. What happens over
gRPC is waited for by asking the sweepers how they are.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from lifecycle_svc.app import lifecycle
from tests.support.local_broker import SERVES_WITHIN_MS, LocalBroker, until
from tidemark.api.broker.v1.message_pb2 import Delivery
from tidemark.api.lifecycle.v1.lifecycle_pb2 import ListSweepersRequest, SweeperStatus
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.clock import ManualClock
from tidemark.errors import Unavailable
from tidemark.local.ports import free_address
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import LifecycleSettings

LIFECYCLE_SERVICE = "tidemark.api.lifecycle.v1.LifecycleService"
STEP_MS = 20


class Replica:
    """One lifecycle service, which can be stopped and started again."""

    def __init__(self, address: str, clock: ManualClock, **settings: Any) -> None:
        self.address = address
        self._clock = clock
        self._settings = settings
        self._running: AsyncExitStack | None = None
        self.api: LifecycleServiceStub

    async def start(self) -> None:
        self._running = AsyncExitStack()
        settings = LifecycleSettings(listen=self.address, **self._settings)
        await self._running.enter_async_context(lifecycle(settings, self._clock))
        channel = await self._running.enter_async_context(open_channel(self.address))
        self.api = LifecycleServiceStub(channel)
        await wait_until_serving(channel, LIFECYCLE_SERVICE, SERVES_WITHIN_MS)

    async def stop(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            await running.aclose()

    async def statuses(self) -> list[SweeperStatus]:
        return list((await self.api.ListSweepers(ListSweepersRequest())).sweepers)

    async def status(self, partition: int = 0) -> SweeperStatus:
        return next(each for each in await self.statuses() if each.partition == partition)

    async def expects(self, in_ms: int, partition: int = 0) -> None:
        """Wait, without letting time pass, until a sweeper knows that something is due so soon."""

        async def ask() -> bool:
            return (await self.status(partition)).next_in_ms <= in_ms

        await until(ask)


class SweptBroker(LocalBroker):
    """A broker whose partitions are swept."""

    def __init__(
        self, data_dir: Path, clock: ManualClock, partitions: int, **settings: Any
    ) -> None:
        address = free_address()
        storage = {"await_sweep": True, "lifecycle_address": address, **settings.pop("storage", {})}
        self._lifecycle_settings = settings.pop("lifecycle", {})
        super().__init__(data_dir, clock, partitions, storage=storage, **settings)
        self.clock = clock
        self.lifecycle = self.replica(address)

    async def passing(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Let time pass, in the steps of the shortest interval of a sweeper, until it is so."""

        async def ask() -> bool:
            if await condition():
                return True
            await self.clock.advance_ms(STEP_MS)
            return False

        await until(ask)

    async def pulled(self, lmq_name: str, **fields: Any) -> Delivery:
        """The next delivery of a queue, as time passes."""
        got: list[Delivery] = []

        async def pull() -> bool:
            with suppress(Unavailable):  # a link that is being mended
                got.extend(await self.pull(lmq_name, **fields))
            return bool(got)

        await self.passing(pull)
        (delivery,) = got
        return delivery

    def replica(self, address: str | None = None) -> Replica:
        """Another lifecycle service of the same cluster, not yet started."""
        return Replica(
            address or free_address(),
            self.clock,
            partitions=self.partitions,
            storage_addresses=(self.storage_address,),
            **self._lifecycle_settings,
        )


@asynccontextmanager
async def swept_broker(
    data_dir: Path, clock: ManualClock, *, partitions: int = 1, **settings: Any
) -> AsyncIterator[SweptBroker]:
    """All three services, serving."""
    wrap = settings.pop("wrap", None)
    swept = SweptBroker(data_dir, clock, partitions, **settings)
    swept.wrap = wrap or swept.wrap
    try:
        await swept.start_storage()
        swept.lifecycle = swept.replica(swept.lifecycle.address)
        await swept.lifecycle.start()
        await swept.start_broker()
        yield swept
    finally:
        await swept.lifecycle.stop()
        await swept.close()
