"""The link to one partition: its claim, and one exchange that carries everything asked of it.

Operations that arrive while a frame is being written go into the next one. Whoever waits for an
answer gets one: a link that breaks answers all of them with UNAVAILABLE and connects again.
"""

import asyncio
import logging
import random

import grpc

from tidemark.api.storage.v1 import exchange_pb2, storage_pb2, storage_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import TidemarkError, Unavailable
from tidemark.rpc.statuses import from_status
from tidemark.settings import BrokerSettings
from tidemark.telemetry import current_traceparent

_RECONNECT_AFTER_MS = 200

_log = logging.getLogger(__name__)

Stream = grpc.aio.StreamStreamCall[exchange_pb2.ExchangeRequest, exchange_pb2.ExchangeResponse]

QueueKey = tuple[str, str]
"""lmq_name and group."""


class PartitionLink:
    """One partition as this broker sees it. `run` keeps it connected until cancelled."""

    def __init__(
        self,
        partition: int,
        settings: BrokerSettings,
        storage: storage_pb2_grpc.StorageServiceStub,
        clock: Clock,
    ) -> None:
        self.partition = partition
        self.connected = asyncio.Event()
        self._settings = settings
        self._storage = storage
        self._clock = clock
        self._incarnation = random.getrandbits(63)
        self._request_ids = 0
        self._gathered: list[exchange_pb2.Operation] = []
        self._something = asyncio.Event()
        self._answers: dict[int, asyncio.Future[exchange_pb2.OperationResult]] = {}
        self._ready: dict[QueueKey, asyncio.Event] = {}

    async def call(self, operation: exchange_pb2.Operation) -> exchange_pb2.OperationResult:
        """Send one operation; raises what storage answered, or UNAVAILABLE."""
        if not self.connected.is_set():
            raise self._broken()
        self._request_ids += 1
        operation.request_id = self._request_ids
        operation.traceparent = current_traceparent()
        answer: asyncio.Future[exchange_pb2.OperationResult]
        answer = asyncio.get_running_loop().create_future()
        self._answers[operation.request_id] = answer
        self._gathered.append(operation)
        self._something.set()
        try:
            result = await answer
        finally:
            self._answers.pop(operation.request_id, None)
        if result.HasField("error"):
            raise from_status(result.error)
        return result

    def when_ready(self, key: QueueKey) -> asyncio.Event:
        """Set when storage tells that the queue has ready messages. Take it before reserving."""
        return self._ready.setdefault(key, asyncio.Event())

    def forget_ready(self, key: QueueKey) -> None:
        self._ready.pop(key, None)

    async def run(self) -> None:
        """Claim, exchange, and again after every fault."""
        while True:
            try:
                await self._exchange(await self._claim())
            except TidemarkError as error:
                _log.warning(
                    "link lost", extra={"partition": self.partition, "reason": error.reason}
                )
            finally:
                self._drop_callers()
            await self._clock.sleep_ms(_RECONNECT_AFTER_MS)

    async def _claim(self) -> int:
        claim = storage_pb2.ClaimPartitionRequest(
            partition=self.partition,
            cluster_id=self._settings.cluster_id,
            broker_id=self._settings.broker_id,
            incarnation=self._incarnation,
        )
        return (await self._storage.ClaimPartition(claim)).broker_epoch

    async def _exchange(self, broker_epoch: int) -> None:
        stream = self._storage.Exchange()
        bind = exchange_pb2.Bind(partition=self.partition, broker_epoch=broker_epoch)
        await stream.write(exchange_pb2.ExchangeRequest(bind=bind))
        writer = asyncio.create_task(self._write(stream))
        try:
            async for frame in stream:
                self.connected.set()
                self._take(frame)
        finally:
            writer.cancel()
            stream.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        raise self._broken()

    async def _write(self, stream: Stream) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            operations, self._gathered = self._gathered, []
            await stream.write(exchange_pb2.ExchangeRequest(operations=operations))

    def _take(self, frame: exchange_pb2.ExchangeResponse) -> None:
        for result in frame.results:
            answer = self._answers.get(result.request_id)
            if answer is not None and not answer.done():
                answer.set_result(result)
        for event in frame.ready:
            ready = self._ready.get((event.lmq_name, event.group))
            if ready is not None:
                ready.set()

    def _drop_callers(self) -> None:
        self.connected.clear()
        self._gathered.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._broken())

    def _broken(self) -> Unavailable:
        return Unavailable(
            f"the link to partition {self.partition} is broken", partition=str(self.partition)
        )
