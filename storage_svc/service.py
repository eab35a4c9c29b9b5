"""The storage API: translates between protos and the operations of a partition.

Owns the life of an exchange (bind, frames in, results and events out) and nothing that is stored.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from storage_svc.operations import (
    Ack,
    Append,
    Appended,
    Operation,
    Reserve,
    Reserved,
    Result,
    Settled,
    Slice,
)
from storage_svc.partition import Interest, Partition
from storage_svc.topics import Topics
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2, partition_pb2, storage_pb2, storage_pb2_grpc
from tidemark.errors import (
    ClusterMismatch,
    InvalidArgument,
    PartitionNotFound,
    TidemarkError,
    Unimplemented,
)
from tidemark.rpc.statuses import to_status

Context = grpc.aio.ServicerContext[Any, Any]

_FRAMES_IN_FLIGHT_MAX = 8
_SERVING = partition_pb2.PartitionHealth(state=topic_pb2.PARTITION_STATE_SERVING)


class StorageService(storage_pb2_grpc.StorageServiceServicer):
    """One storage process: the partitions it holds."""

    def __init__(
        self, cluster_id: str, partitions: Mapping[int, Partition], topics: Topics
    ) -> None:
        self._cluster_id = cluster_id
        self._partitions = partitions
        self._topics = topics

    async def DescribeStorage(
        self, request: storage_pb2.DescribeStorageRequest, context: Context
    ) -> storage_pb2.DescribeStorageResponse:
        held = [
            topic_pb2.PartitionInfo(
                partition=number, state=_SERVING.state, broker_epoch=partition.broker_epoch
            )
            for number, partition in self._partitions.items()
        ]
        return storage_pb2.DescribeStorageResponse(
            cluster_id=self._cluster_id, partitions=len(self._partitions), held=held
        )

    async def ClaimPartition(
        self, request: storage_pb2.ClaimPartitionRequest, context: Context
    ) -> storage_pb2.ClaimPartitionResponse:
        if request.cluster_id != self._cluster_id:
            raise ClusterMismatch(f"this is cluster {self._cluster_id}", cluster=self._cluster_id)
        epoch = await self._partition(request.partition).claim()
        return storage_pb2.ClaimPartitionResponse(broker_epoch=epoch, health=_SERVING)

    async def Exchange(
        self, request_iterator: AsyncIterator[exchange_pb2.ExchangeRequest], context: Context
    ) -> AsyncIterator[exchange_pb2.ExchangeResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("bind"):
            raise InvalidArgument("the first frame of an exchange carries `bind`", field="bind")
        partition = self._partition(first.bind.partition)
        partition.check_epoch(first.bind.broker_epoch)
        exchange = _Exchange(partition, first.bind.broker_epoch)
        async with aclosing(exchange.frames(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def PutTopic(
        self, request: storage_pb2.PutTopicRequest, context: Context
    ) -> storage_pb2.PutTopicResponse:
        if not request.create:
            raise Unimplemented("topics can not be changed yet", rpc="PutTopic")
        topic = await self._topics.create(request.topic)
        return storage_pb2.PutTopicResponse(topic=topic)

    async def GetTopic(
        self, request: storage_pb2.GetTopicRequest, context: Context
    ) -> storage_pb2.GetTopicResponse:
        return storage_pb2.GetTopicResponse(topic=await self._topics.get(request.name))

    def _partition(self, number: int) -> Partition:
        try:
            return self._partitions[number]
        except KeyError:
            raise PartitionNotFound(
                f"partition {number} is not held here", partition=str(number)
            ) from None


class _Exchange:
    """One stream of one broker, bound to one partition."""

    def __init__(self, partition: Partition, broker_epoch: int) -> None:
        self._partition = partition
        self._broker_epoch = broker_epoch
        self._out: asyncio.Queue[exchange_pb2.ExchangeResponse | TidemarkError | None]
        self._out = asyncio.Queue(_FRAMES_IN_FLIGHT_MAX)

    async def frames(
        self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]
    ) -> AsyncGenerator[exchange_pb2.ExchangeResponse, None]:
        interest = self._partition.watch()
        tasks = [
            asyncio.create_task(self._take(requests)),
            asyncio.create_task(self._tell(interest)),
        ]
        try:
            yield exchange_pb2.ExchangeResponse(health=_SERVING)
            while (frame := await self._out.get()) is not None:
                if isinstance(frame, TidemarkError):
                    raise frame
                yield frame
        finally:
            self._partition.unwatch(interest)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        """Submit frames as they come; several are under way at a time, answered in order."""
        answering: asyncio.Queue[tuple[list[int], asyncio.Future[list[Result]]] | None]
        answering = asyncio.Queue(_FRAMES_IN_FLIGHT_MAX)
        answers = asyncio.create_task(self._answer(answering))
        try:
            async for request in requests:
                self._partition.check_epoch(self._broker_epoch)
                known = [each for each in request.operations if _is_known(each)]
                await self._refuse(each for each in request.operations if not _is_known(each))
                operations = [_operation(each) for each in known]
                results = self._partition.submit(operations, [each.traceparent for each in known])
                await answering.put(([each.request_id for each in known], results))
            await answering.put(None)
            await answers
            await self._out.put(None)
        except TidemarkError as error:
            await self._out.put(error)
        finally:
            answers.cancel()

    async def _answer(
        self, answering: asyncio.Queue[tuple[list[int], asyncio.Future[list[Result]]] | None]
    ) -> None:
        while (entry := await answering.get()) is not None:
            request_ids, pending = entry
            try:
                results = await pending
            except TidemarkError as error:
                results = [error] * len(request_ids)
            await self._out.put(
                exchange_pb2.ExchangeResponse(results=map(_operation_result, request_ids, results))
            )

    async def _refuse(self, operations: Any) -> None:
        results = [
            exchange_pb2.OperationResult(
                request_id=each.request_id,
                error=to_status(Unimplemented("not implemented yet", rpc="Exchange")),
            )
            for each in operations
        ]
        if results:
            await self._out.put(exchange_pb2.ExchangeResponse(results=results))

    async def _tell(self, interest: Interest) -> None:
        while True:
            await interest.changed.wait()
            interest.changed.clear()
            ready, interest.ready = interest.ready, set()
            events = [exchange_pb2.QueueReady(lmq_name=name, group=group) for name, group in ready]
            await self._out.put(exchange_pb2.ExchangeResponse(ready=events))


def _is_known(operation: exchange_pb2.Operation) -> bool:
    match operation.WhichOneof("kind"):
        case "append":
            append = operation.append
            return not (append.delay_ms or append.ttl_ms or append.sequence)
        case "reserve":
            return operation.reserve.group == "default" and not operation.reserve.owner_epoch
        case "settle":
            settle = operation.settle
            return settle.action == exchange_pb2.SETTLE_ACTION_ACK and not settle.index_ranges
    return False


def _operation(operation: exchange_pb2.Operation) -> Operation:
    match operation.WhichOneof("kind"):
        case "append":
            append = operation.append
            return Append(
                append.lmq_name, append.count, append.body, append.fairness_key, append.traceparent
            )
        case "reserve":
            reserve = operation.reserve
            return Reserve(reserve.lmq_name, reserve.group, reserve.max_messages)
        case _:
            return Ack(operation.settle.receipt)


def _operation_result(request_id: int, result: Result) -> exchange_pb2.OperationResult:
    match result:
        case Appended():
            appended = exchange_pb2.AppendResult(
                queue_id=result.queue_id, first_offset=result.first_offset
            )
            return exchange_pb2.OperationResult(request_id=request_id, append=appended)
        case Reserved():
            reserved = exchange_pb2.ReserveResult(slices=map(_slice, result.slices))
            return exchange_pb2.OperationResult(request_id=request_id, reserve=reserved)
        case Settled():
            settled = exchange_pb2.SettleReservationResult(messages=result.messages)
            return exchange_pb2.OperationResult(request_id=request_id, settle=settled)
        case _:
            return exchange_pb2.OperationResult(request_id=request_id, error=to_status(result))


def _slice(slice_: Slice) -> exchange_pb2.ReservedSlice:
    return exchange_pb2.ReservedSlice(
        reservation_id=slice_.reservation_id,
        receipt=slice_.receipt,
        queue_id=slice_.queue_id,
        first_offset=slice_.first_offset,
        count=slice_.count,
        body=slice_.body,
        delivery_count=1,
        publish_time_ms=slice_.publish_time_ms,
        fairness_key=slice_.fairness_key,
        traceparent=slice_.traceparent,
    )
