"""The broker API in its unary form: publish, pull, settle.

Translates between clients and partition links, one operation per run; it keeps no state.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc

from broker_svc.partition_link import PartitionLink
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, broker_pb2_grpc, message_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    BatchTooLarge,
    InvalidArgument,
    PartitionNotFound,
    TidemarkError,
    Unimplemented,
)
from tidemark.names import LmqName, partition_of, validate_group
from tidemark.receipts import Receipt
from tidemark.rpc.statuses import to_status

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_GROUP = "default"
_PULL_MESSAGES_DEFAULT = 100


class BrokerService(broker_pb2_grpc.BrokerServiceServicer):
    """What plain gRPC clients call. Sessions are not built yet."""

    def __init__(self, links: Sequence[PartitionLink], clock: Clock) -> None:
        self._links = links
        self._clock = clock

    async def Publish(
        self, request: broker_pb2.PublishRequest, context: Context
    ) -> broker_pb2.PublishResponse:
        if not 1 <= len(request.runs) <= limits.FRAME_RUNS_MAX:
            raise InvalidArgument(f"1 to {limits.FRAME_RUNS_MAX} runs a call", field="runs")
        results = await asyncio.gather(*(self._publish(run) for run in request.runs))
        return broker_pb2.PublishResponse(results=results)

    async def Pull(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        LmqName.parse(request.lmq_name)
        group = request.group or _DEFAULT_GROUP
        validate_group(group)
        max_messages = request.max_messages or _PULL_MESSAGES_DEFAULT
        if max_messages > limits.PULL_MESSAGES_MAX:
            raise InvalidArgument(
                f"at most {limits.PULL_MESSAGES_MAX} messages a call", field="max_messages"
            )
        if request.wait_ms > limits.PULL_WAIT_MS_MAX:
            raise InvalidArgument(f"at most {limits.PULL_WAIT_MS_MAX} ms", field="wait_ms")
        link = self._links[partition_of(request.lmq_name, len(self._links))]
        reserve = exchange_pb2.Reserve(
            lmq_name=request.lmq_name, group=group, max_messages=max_messages
        )
        slices = await self._reserve(link, reserve, request.wait_ms)
        deliveries = [_delivery(each, request.lmq_name, group, link.partition) for each in slices]
        return broker_pb2.PullResponse(deliveries=deliveries)

    async def Settle(
        self, request: broker_pb2.SettleRequest, context: Context
    ) -> broker_pb2.SettleResponse:
        results = await asyncio.gather(*(self._settle(each) for each in request.settlements))
        return broker_pb2.SettleResponse(results=results)

    async def _publish(self, run: message_pb2.PublishRun) -> message_pb2.PublishResult:
        async def attempt() -> message_pb2.PublishResult:
            _check_run(run)
            link = self._links[partition_of(run.lmq_name, len(self._links))]
            append = exchange_pb2.Append(
                lmq_name=run.lmq_name,
                count=run.count,
                body=run.batch.SerializeToString(),
                fairness_key=run.fairness_key,
                delay_ms=run.delay_ms,
                ttl_ms=run.ttl_ms,
                sequence=run.sequence,
                traceparent=run.traceparent,
            )
            result = (await link.call(exchange_pb2.Operation(append=append))).append
            receipt = message_pb2.PublishReceipt(
                partition=link.partition,
                queue_id=result.queue_id,
                first_offset=result.first_offset,
            )
            return message_pb2.PublishResult(request_id=run.request_id, receipt=receipt)

        try:
            return await attempt()
        except TidemarkError as error:
            return message_pb2.PublishResult(request_id=run.request_id, error=to_status(error))

    async def _settle(self, settlement: message_pb2.Settlement) -> message_pb2.SettleResult:
        request_id = settlement.request_id
        try:
            if not settlement.HasField("ack") or settlement.ranges:
                raise Unimplemented("only whole deliveries can be acknowledged yet", rpc="Settle")
            partition = Receipt.decode(settlement.receipt).partition
            if partition >= len(self._links):
                raise PartitionNotFound("there is no such partition", partition=str(partition))
            settle = exchange_pb2.SettleReservation(
                receipt=settlement.receipt, action=exchange_pb2.SETTLE_ACTION_ACK
            )
            result = await self._links[partition].call(exchange_pb2.Operation(settle=settle))
            return message_pb2.SettleResult(request_id=request_id, messages=result.settle.messages)
        except TidemarkError as error:
            return message_pb2.SettleResult(request_id=request_id, error=to_status(error))

    async def _reserve(
        self, link: PartitionLink, reserve: exchange_pb2.Reserve, wait_ms: int
    ) -> Sequence[exchange_pb2.ReservedSlice]:
        until_ms = self._clock.monotonic_ms() + wait_ms
        key = (reserve.lmq_name, reserve.group)
        while True:
            ready = link.when_ready(key)
            slices = (await link.call(exchange_pb2.Operation(reserve=reserve))).reserve.slices
            if slices or not await self._in_time(ready.wait(), until_ms):
                return slices
            link.forget_ready(key)

    async def _in_time(self, event: Awaitable[bool], until_ms: int) -> bool:
        try:
            return await self._clock.wait_for(event, max(until_ms - self._clock.monotonic_ms(), 0))
        except TimeoutError:
            return False


def _check_run(run: message_pb2.PublishRun) -> None:
    LmqName.parse(run.lmq_name)
    if run.count != len(run.batch.messages) or not run.count:
        raise InvalidArgument(
            f"count says {run.count}, the batch has {len(run.batch.messages)}", field="count"
        )
    if run.count > limits.RUN_MESSAGES_MAX or run.batch.ByteSize() > limits.RUN_BYTES_MAX:
        raise BatchTooLarge(
            f"a run has at most {limits.RUN_MESSAGES_MAX} messages and {limits.RUN_BYTES_MAX} bytes"
        )


def _delivery(
    slice_: exchange_pb2.ReservedSlice, lmq_name: str, group: str, partition: int
) -> message_pb2.Delivery:
    return message_pb2.Delivery(
        receipt=slice_.receipt,
        lmq_name=lmq_name,
        group=group,
        first_offset=slice_.first_offset,
        count=slice_.count,
        batch=message_pb2.MessageBatch.FromString(slice_.body),
        attempt_count=slice_.attempt_count,
        delivery_count=slice_.delivery_count,
        publish_time_ms=slice_.publish_time_ms,
        fairness_key=slice_.fairness_key,
        traceparent=slice_.traceparent,
        partition=partition,
    )
