"""A cluster of processes whose storage is on six real Valkeys, all of which fail now and then."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import grpc

from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.layout import mark_key
from tests.model.histories.scenario import TOPIC, Disturb
from tests.support.session import Session
from tests.support.valkey import valkey
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.local.cluster import LocalCluster
from tidemark.rpc import open_channel

CLUSTER_ID: Final = "rounds"
FAULTS_MAX: Final = 2
"""In one history: a failover takes seconds."""
DOWN_MS_MAX: Final = 500
PAUSES_MS: Final = (500, 7_000)
"""Shorter and longer than it takes until a replica is promoted."""
LAG_MS_MAX: Final = 1_500


class RedisProcesses:
    """One broker and several storage nodes over three masters and three replicas."""

    def __init__(
        self,
        processes: LocalCluster,
        valkeys: ValkeyCluster,
        channel: grpc.aio.Channel,
        partitions: int,
    ) -> None:
        self.clock = SystemClock()
        self.partitions = partitions
        self.processes = processes
        self.valkeys = valkeys
        self.channel = channel
        self.faults: Counter[str] = Counter()
        self._faults_left = 0
        self._stub = BrokerServiceStub(channel)
        self._hurting = asyncio.Lock()
        self._kinds: dict[str, Callable[[random.Random, bytes], Awaitable[None]]] = {
            "storage is killed": self._kill_storage,
            "storage is paused": self._pause_storage,
            "a master is killed": self._kill_master,
            "a master is paused": self._pause_master,
            "a lagging replica is promoted": self._promote_lagging,
            "a slot is migrated": self._migrate,
        }

    def mark_key(self, partition: int) -> bytes:
        return mark_key(Identity(CLUSTER_ID, partition, self.partitions))

    # --- what clients need ---------------------------------------------------------------------

    def place(self, queue: str) -> str:
        """There is one broker."""
        return ""

    async def connect(self, client_id: str, place: str) -> Session:
        return await Session.open(self.processes.address("broker"), client_id)

    def stub(self, place: str) -> BrokerServiceStub:
        return self._stub

    # --- faults --------------------------------------------------------------------------------

    def new_round(self) -> None:
        self._faults_left = FAULTS_MAX
        self.faults.clear()

    async def hurt(self, chance: random.Random, disturbed: Disturb) -> None:
        async with self._hurting:
            if not self._faults_left:
                return
            self._faults_left -= 1
            what = chance.choice(list(self._kinds))
            key = self.mark_key(chance.randrange(self.partitions))
            self.faults[what] += 1
            disturbed(what)
            await self._kinds[what](chance, key)
            disturbed(f"{what}: mended")

    async def ready(self) -> None:
        async with self._hurting:
            await asyncio.to_thread(self.valkeys.until_whole)
            await self.processes.wait_healthy()

    async def _kill_storage(self, chance: random.Random, key: bytes) -> None:
        name = chance.choice(self.processes.services_of("storage"))
        await self.processes.kill(name)
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        await self.processes.restart(name)

    async def _pause_storage(self, chance: random.Random, key: bytes) -> None:
        name = chance.choice(self.processes.services_of("storage"))
        pid = self.processes.pid(name)
        os.kill(pid, signal.SIGSTOP)
        await self.clock.sleep_ms(chance.randint(*PAUSES_MS))
        os.kill(pid, signal.SIGCONT)

    async def _kill_master(self, chance: random.Random, key: bytes) -> None:
        """The others promote its replica; it comes back as the replica of that."""
        master = await asyncio.to_thread(self.valkeys.master_of, key)
        await asyncio.to_thread(self.valkeys.kill, master)
        await asyncio.to_thread(self.valkeys.master_of, key)
        await asyncio.to_thread(self.valkeys.start, master)
        await asyncio.to_thread(self.valkeys.until_whole)

    async def _pause_master(self, chance: random.Random, key: bytes) -> None:
        master = await asyncio.to_thread(self.valkeys.master_of, key)
        self.valkeys.pause(master)
        await self.clock.sleep_ms(chance.randint(*PAUSES_MS))
        self.valkeys.resume(master)
        await asyncio.to_thread(self.valkeys.until_whole)

    async def _promote_lagging(self, chance: random.Random, key: bytes) -> None:
        replica = await asyncio.to_thread(self.valkeys.replica_of, key)
        await asyncio.to_thread(self.valkeys.cut_off, replica)
        await self.clock.sleep_ms(chance.randint(0, LAG_MS_MAX))
        await asyncio.to_thread(self.valkeys.promote, replica)
        await asyncio.to_thread(self.valkeys.until_whole)

    async def _migrate(self, chance: random.Random, key: bytes) -> None:
        await asyncio.to_thread(self.valkeys.migrate, key)


@asynccontextmanager
async def redis_processes(
    directory: Path, durability: str, partitions: int, storages: int
) -> AsyncIterator[RedisProcesses]:
    async with AsyncExitStack() as opened:
        registry = opened.enter_context(valkey(directory / "registry"))
        valkeys = opened.enter_context(
            ValkeyCluster.running(directory / "valkeys", masters=3, replicas=3)
        )
        cluster_id = {"TIDEMARK_CLUSTER_ID": CLUSTER_ID}
        engine = {
            "TIDEMARK_STORAGE_ENGINE": "redis",
            "TIDEMARK_REDIS_URL": valkeys.url,
            "TIDEMARK_REDIS_DURABILITY": durability,
        }
        processes = LocalCluster(
            directory / "data",
            partitions=partitions,
            storages=storages,
            registry_url=registry.connection_url,
            log_dir=directory / "logs",
            environment={
                "storage": {**cluster_id, **engine},
                "broker": cluster_id,
                "lifecycle": cluster_id,
            },
        )
        await opened.enter_async_context(processes)
        channel = await opened.enter_async_context(open_channel(processes.address("broker")))
        settings = topic_pb2.TopicSettings(subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
        await TopicServiceStub(channel).CreateTopic(
            topic_pb2.CreateTopicRequest(name=TOPIC, settings=settings)
        )
        yield RedisProcesses(processes, valkeys, channel, partitions)
