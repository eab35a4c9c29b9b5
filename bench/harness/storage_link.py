"""A storage process, and the exchange with its partitions, as a broker has it.

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
    """The exchange with the storage node, which carries all partitions."""

    def __init__(self, stream: Any, epochs: Sequence[int]) -> None:
        """`epochs` are the broker epochs of the partitions, in their order."""
        self._stream = stream
        self._epochs = epochs
        self._sending = asyncio.Lock()  # gRPC allows one write at a time
        self._last_request_id = 0
        self._frames: dict[int, _Frame] = {}

    async def bind(self) -> None:
        frame = ExchangeRequest()
        for partition, broker_epoch in enumerate(self._epochs):
            frame.binds.add(partition=partition, broker_epoch=broker_epoch)
        await self._stream.write(frame)

    async def ask(self, operations: Sequence[tuple[int, Operation]]) -> list[OperationResult]:
        """The results of one frame of operations, each with its partition, in their order.

        Raises if one is an error.
        """
        request_ids = range(self._last_request_id + 1, self._last_request_id + 1 + len(operations))
        self._last_request_id = request_ids[-1]
        parts: dict[int, list[Operation]] = {}
        for request_id, (partition, operation) in zip(request_ids, operations, strict=True):
            operation.request_id = request_id
            parts.setdefault(partition, []).append(operation)
        request = ExchangeRequest()
        for partition, mine in parts.items():
            epoch = self._epochs[partition]
            request.parts.add(partition=partition, broker_epoch=epoch, operations=mine)
        frame = _Frame(len(operations), {}, asyncio.get_running_loop().create_future())
        self._frames |= dict.fromkeys(request_ids, frame)
        async with self._sending:
            await self._stream.write(request)
        await frame.answered
        return [frame.results[request_id] for request_id in request_ids]

    async def read(self) -> None:
        """Pass results to their waiters until the stream ends. Events are ignored."""
        async for response in self._stream:
            for part in response.parts:
                if part.HasField("end"):
                    raise RuntimeError(f"storage ended a part: {part.end.message}")
                for result in part.results:
                    self._take(result)

    def _take(self, result: OperationResult) -> None:
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
    """A running storage process, and the link to it."""

    def __init__(self, process: ServiceProcess, link: StorageLink) -> None:
        self._process = process
        self._link = link

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
        return await self._link.ask(
            [
                (partition_of(lmq_name, PARTITIONS), operation(place))
                for place, lmq_name in enumerate(lmq_names)
            ]
        )


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
            link = await opened.enter_async_context(_link(stub))
            await link.ask(
                [
                    (partition, Operation(apply_topic=exchange_pb2.ApplyTopic(topic=topic)))
                    for partition in range(PARTITIONS)
                ]
            )
            yield Storage(process, link)
    finally:
        if process.running:
            await process.stop()


@asynccontextmanager
async def _link(stub: Any) -> AsyncIterator[StorageLink]:
    epochs: list[int] = []
    for partition in range(PARTITIONS):
        claim = storage_pb2.ClaimPartitionRequest(
            partition=partition, cluster_id=_CLUSTER_ID, broker_id="bench", incarnation=1
        )
        epochs.append((await stub.ClaimPartition(claim)).broker_epoch)
    stream = stub.Exchange()
    link = StorageLink(stream, epochs)
    await link.bind()
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
