"""A storage process, and the exchanges with its partitions, as a broker has them.

Sends frames and matches results.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness.usage import trim, unshared_bytes
from tidemark.api.broker.v1.topic_pb2 import Topic
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.api.storage.v1.exchange_pb2 import ExchangeRequest, Operation, OperationResult
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.names import partition_of
from tidemark.rpc import open_channel

TOPIC: Final = "bench"
PARTITIONS: Final = 4
"""The default number of partitions."""

_CLUSTER_ID = "bench"


@dataclass(slots=True)
class _Frame:
    """Results by request id, until all operations of a frame have one."""

    operations: int
    results: dict[int, OperationResult]
    answered: asyncio.Future[None]


class StorageLink:
    """The exchange with one partition."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._sending = asyncio.Lock()  # gRPC allows one write at a time
        self._last_request_id = 0
        self._frames: dict[int, _Frame] = {}

    async def ask(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """The results of one frame, in the order of its operations; raises if one is an error."""
        request_ids = range(self._last_request_id + 1, self._last_request_id + 1 + len(operations))
        self._last_request_id = request_ids[-1]
        for request_id, operation in zip(request_ids, operations, strict=True):
            operation.request_id = request_id
        frame = _Frame(len(operations), {}, asyncio.get_running_loop().create_future())
        self._frames |= dict.fromkeys(request_ids, frame)
        async with self._sending:
            await self._stream.write(ExchangeRequest(operations=operations))
        await frame.answered
        return [frame.results[request_id] for request_id in request_ids]

    async def read(self) -> None:
        """Pass results to their waiters until the stream ends. Events are ignored."""
        async for response in self._stream:
            for result in response.results:
                frame = self._frames.pop(result.request_id)
                frame.results[result.request_id] = result
                if result.HasField("error"):
                    _fail(frame, RuntimeError(f"storage refused: {result.error.message}"))
                elif len(frame.results) == frame.operations:
                    frame.answered.set_result(None)

    def end(self, reason: BaseException | None) -> None:
        """The stream ended: fail all waiters."""
        for frame in self._frames.values():
            _fail(frame, reason or RuntimeError("storage ended the exchange"))


def _fail(frame: _Frame, error: BaseException) -> None:
    if not frame.answered.done():
        frame.answered.set_exception(error)


class Storage:
    """A running storage process with one link per partition."""

    def __init__(self, process: ServiceProcess, links: Sequence[StorageLink]) -> None:
        self._process = process
        self._links = links

    async def settled_bytes(self) -> int:
        """Unshared memory, after the process has returned unused memory."""
        await trim(self._process.pid, self._process.address)
        return self.unshared_bytes()

    def unshared_bytes(self) -> int:
        return unshared_bytes(self._process.pid)

    async def ask(
        self, lmq_names: Sequence[str], operation: Callable[[int], Operation]
    ) -> list[OperationResult]:
        """Send one operation per queue, by its index, to the partition of the queue."""
        places: list[list[int]] = [[] for _ in self._links]
        for place, lmq_name in enumerate(lmq_names):
            places[partition_of(lmq_name, PARTITIONS)].append(place)
        answers = await asyncio.gather(
            *(
                link.ask([operation(place) for place in mine])
                for link, mine in zip(self._links, places, strict=True)
                if mine
            )
        )
        results = [OperationResult()] * len(lmq_names)
        for mine, answer in zip(filter(None, places), answers, strict=True):
            for place, result in zip(mine, answer, strict=True):
                results[place] = result
        return results


@asynccontextmanager
async def running_storage(directory: Path) -> AsyncIterator[Storage]:
    """A claimed storage process with default settings and one topic in all partitions."""
    address = free_address()
    process = ServiceProcess(
        "storage",
        "storage_svc",
        address=address,
        health_service="tidemark.api.storage.v1.StorageService",
        environment={
            "TIDEMARK_CLUSTER_ID": _CLUSTER_ID,
            "TIDEMARK_PARTITIONS": str(PARTITIONS),
            "TIDEMARK_STORAGE_AWAIT_SWEEP": "false",
            "TIDEMARK_STORAGE_LISTEN": address,
            "TIDEMARK_STORAGE_DATA_DIR": str(directory / "data"),
        },
        log_file=directory / "storage.log",
    )
    try:
        await process.start()
        await process.wait_healthy()
        async with AsyncExitStack() as opened:
            stub = StorageServiceStub(await opened.enter_async_context(open_channel(address)))
            request = storage_pb2.PutTopicRequest(topic=Topic(name=TOPIC), create=True)
            topic = (await stub.PutTopic(request)).topic
            links = [
                await opened.enter_async_context(_link(stub, partition))
                for partition in range(PARTITIONS)
            ]
            for link in links:
                await link.ask([Operation(apply_topic=exchange_pb2.ApplyTopic(topic=topic))])
            yield Storage(process, links)
    finally:
        if process.running:
            await process.stop()


@asynccontextmanager
async def _link(stub: Any, partition: int) -> AsyncIterator[StorageLink]:
    claim = storage_pb2.ClaimPartitionRequest(
        partition=partition, cluster_id=_CLUSTER_ID, broker_id="bench", incarnation=1
    )
    claimed = await stub.ClaimPartition(claim)
    stream = stub.Exchange()
    bind = exchange_pb2.Bind(partition=partition, broker_epoch=claimed.broker_epoch)
    await stream.write(ExchangeRequest(bind=bind))
    link = StorageLink(stream)
    reading = asyncio.create_task(link.read())
    reading.add_done_callback(
        lambda ended: link.end(None if ended.cancelled() else ended.exception())
    )
    try:
        yield link
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        stream.cancel()
