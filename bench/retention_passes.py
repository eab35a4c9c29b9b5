"""Shared by the benchmarks of retention: a storage service, its jobs, and small warm passes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spark_batch.session import start_session
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.api.broker.v1.topic_pb2 import Topic as TopicProto
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.exchange_pb2 import Append as AppendProto
from tidemark.api.storage.v1.exchange_pb2 import Bind, ExchangeRequest, Operation
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import SystemClock
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel
from tidemark.rpc.topic_codec import settings_to_proto
from tidemark.settings import RetentionSettings
from tidemark.topics import TopicSettings

if TYPE_CHECKING:
    from spark_batch.passes.jobs import Jobs

WARM_TOPIC: Final = "warm"
LIVE_TOPIC: Final = "live"
LIMIT: Final = TopicSettings(retention_enabled=True, retention_seconds=1)
_COLD_PASSES: Final = 3
_WARM_PASSES: Final = 5
_BODY: Final = MessageBatch(messages=[Message(payload=bytes(100))]).SerializeToString()

Figures = dict[str, float]


class Storage(NamedTuple):
    """The service under test."""

    process: ServiceProcess
    stub: Any


@asynccontextmanager
async def running_storage(
    data: Path, directory: Path, partitions: int = 1
) -> AsyncIterator[Storage]:
    address = free_address()
    process = ServiceProcess(
        "storage",
        "storage_svc",
        address=address,
        environment={
            "TIDEMARK_CLUSTER_ID": "bench",
            "TIDEMARK_PARTITIONS": str(partitions),
            "TIDEMARK_STORAGE_LISTEN": address,
            "TIDEMARK_STORAGE_DATA_DIR": str(data),
            "TIDEMARK_STORAGE_AWAIT_SWEEP": "false",
        },
        log_file=directory / "storage.log",
    )
    await process.start()
    try:
        await process.wait_healthy()
        async with open_channel(address) as channel:
            yield Storage(process, StorageServiceStub(channel))
    finally:
        await process.stop()


def retention_settings(storage: Storage) -> RetentionSettings:
    return RetentionSettings(
        storage_addresses=(storage.process.address,),
        spark_master="local[1]",
        spark_options="spark.ui.showConsoleProgress=false",
    )


@asynccontextmanager
async def spark_jobs(storage: Storage) -> AsyncIterator["Jobs"]:
    settings = retention_settings(storage)
    spark = await asyncio.to_thread(start_session, settings)
    from spark_batch.passes.jobs import Jobs  # the other benchmarks need no PySpark

    try:
        yield Jobs(spark, settings, SystemClock())
    finally:
        await asyncio.to_thread(spark.stop)


async def warm_passes(storage: Storage, jobs: "Jobs") -> Figures:
    """Whole passes, each with one batch due: 100 runs of one message. The first ones warm Spark."""
    seconds = []
    async with Publisher(storage.stub) as publisher:
        for _ in range(_COLD_PASSES + _WARM_PASSES):
            await publisher.publish([f"{WARM_TOPIC}/{number}" for number in range(100)])
            await asyncio.sleep(1.1)  # until they are too old
            began = time.perf_counter()
            done = await asyncio.to_thread(jobs.retention)
            seconds.append(time.perf_counter() - began)
            assert done.counts["expired"] == 100, done.counts
    seconds = seconds[_COLD_PASSES:]
    return {"median_s": median(seconds), "worst_s": max(seconds), "passes": len(seconds)}


async def set_limit(storage: Storage, name: str, settings: TopicSettings = LIMIT) -> None:
    """Make all messages of a topic too old."""
    await asyncio.sleep(1)
    topic = TopicProto(name=name, settings=settings_to_proto(settings))
    await storage.stub.PutTopic(storage_pb2.PutTopicRequest(topic=topic))


class Publisher:
    """A broker's link to storage that publishes runs of one message."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._number = 0
        self._latencies_ns: list[int] = []

    async def __aenter__(self) -> "Publisher":
        claimed = await self._stub.ClaimPartition(
            storage_pb2.ClaimPartitionRequest(cluster_id="bench", broker_id="bench", incarnation=1)
        )
        self._broker_epoch = claimed.broker_epoch
        self._call = self._stub.Exchange()
        await self._call.write(ExchangeRequest(binds=[Bind(broker_epoch=self._broker_epoch)]))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()

    def taken(self) -> list[int]:
        latencies, self._latencies_ns = self._latencies_ns, []
        return latencies

    async def publish_on_and_on(self) -> None:
        """One message at a time, each after the response to the last."""
        while True:
            began_ns = time.perf_counter_ns()
            await self.publish([f"{LIVE_TOPIC}/{self._number % 100}"])
            self._latencies_ns.append(time.perf_counter_ns() - began_ns)

    async def publish(self, lmq_names: Sequence[str]) -> None:
        """A message to each queue, in one frame; returns once all are stored."""
        frame = ExchangeRequest()
        part = frame.parts.add(broker_epoch=self._broker_epoch)
        for lmq_name in lmq_names:
            self._number += 1
            append = AppendProto(lmq_name=lmq_name, count=1, body=_BODY)
            part.operations.append(Operation(request_id=self._number, append=append))
        await self._call.write(frame)
        waiting = {each.request_id for each in part.operations}
        while waiting:
            for response in (await self._call.read()).parts:
                for result in response.results:
                    assert not result.HasField("error"), result.error.message
                    waiting.discard(result.request_id)
