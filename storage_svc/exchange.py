"""An exchange: the pipelined stream between one broker and one partition.

Takes frames of operations, keeps a bounded number of them under way, and sends results and events
back, each after the commit it was computed in. It ends when the broker is fenced.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any

from storage_svc import wire
from storage_svc.operations import Operation, Reserved, Result
from storage_svc.partition import Partition, Watcher
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import ShuttingDown, TidemarkError
from tidemark.rpc.statuses import to_status

FRAMES_IN_FLIGHT_MAX = 16
"""Frames whose results are not yet sent: a broker that does not read stops being read from."""

RESPONSE_BYTES_MAX = 8 * 1024 * 1024
"""Results beyond this go into a frame of their own, so that every frame fits gRPC's limit."""

_Answer = tuple[list[int], asyncio.Future[list[Result]], list[exchange_pb2.OperationResult]]


class Exchange:
    """One stream, bound to one partition under one broker epoch."""

    def __init__(self, partition: Partition, broker_epoch: int, stopping: asyncio.Event) -> None:
        self._partition = partition
        self._broker_epoch = broker_epoch
        self._stopping = stopping
        self._out: asyncio.Queue[exchange_pb2.ExchangeResponse | Exception | None]
        self._out = asyncio.Queue(FRAMES_IN_FLIGHT_MAX)
        self._answering: asyncio.Queue[_Answer | None] = asyncio.Queue(FRAMES_IN_FLIGHT_MAX)

    async def frames(
        self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]
    ) -> AsyncGenerator[exchange_pb2.ExchangeResponse, None]:
        """What goes back to the broker, until the stream ends."""
        watcher = self._partition.watch(self._broker_epoch)
        taking = asyncio.create_task(self._or_fail(self._take(requests)))
        tasks = [
            taking,
            asyncio.create_task(self._or_fail(self._answer())),
            asyncio.create_task(self._or_fail(self._tell(watcher))),
            asyncio.create_task(self._or_fail(self._stop(taking))),
        ]
        try:
            while (frame := await self._out.get()) is not None:
                if isinstance(frame, Exception):
                    raise frame
                yield frame
        finally:
            self._partition.unwatch(watcher)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _or_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong in a part of the exchange ends the whole of it."""
        try:
            await work
        except Exception as error:
            await self._out.put(error)

    async def _stop(self, taking: asyncio.Task[None]) -> None:
        """The service is stopping: answer what was taken, then end the stream."""
        await self._stopping.wait()
        taking.cancel()
        await self._answering.join()
        raise ShuttingDown("the storage service is stopping")

    async def _take(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        """Submit frames as they come."""
        async for request in requests:
            self._check_fence()
            await self._answering.put(self._submit(request))
        await self._answering.put(None)

    def _check_fence(self) -> None:
        """A partition that is closed for the moment fences nobody: its answers say how it is."""
        if self._partition.is_open:
            self._partition.check_epoch(self._broker_epoch)

    def _submit(self, request: exchange_pb2.ExchangeRequest) -> _Answer:
        """Submit what can be done, refuse the rest at once; one bad operation spoils no other."""
        request_ids: list[int] = []
        operations: list[Operation] = []
        callers: list[str] = []
        refused: list[exchange_pb2.OperationResult] = []
        for each in request.operations:
            try:
                operations.append(wire.operation_of(each))
            except TidemarkError as error:
                status = to_status(error)
                refused.append(
                    exchange_pb2.OperationResult(request_id=each.request_id, error=status)
                )
                continue
            request_ids.append(each.request_id)
            callers.append(each.traceparent)
        results = self._partition.submit(operations, callers, self._broker_epoch)
        return request_ids, results, refused

    async def _answer(self) -> None:
        """Send results in the order of their frames, each once its commit is durable."""
        while (answer := await self._answering.get()) is not None:
            request_ids, pending, refused = answer
            try:
                results = await pending
            except TidemarkError as error:
                results = [error] * len(request_ids)
            for frame in _frames(request_ids, results, refused):
                await self._out.put(frame)
            self._answering.task_done()
        await self._out.put(None)

    async def _tell(self, watcher: Watcher) -> None:
        """Send events: what became ready, when the next deadline is, how the partition is."""
        while True:
            await watcher.changed.wait()
            watcher.changed.clear()
            self._check_fence()
            frame = exchange_pb2.ExchangeResponse()
            ready, watcher.ready = watcher.ready, {}
            for lmq_name, group in ready:
                frame.ready.add(lmq_name=lmq_name, group=group)
            if watcher.next_deadline_changed:
                watcher.next_deadline_changed = False
                next_deadline = exchange_pb2.NextDeadline()
                in_ms = self._partition.next_deadline_in_ms()
                if in_ms is not None:
                    next_deadline.in_ms = in_ms
                frame.next_deadline.CopyFrom(next_deadline)
            if watcher.health_changed:
                watcher.health_changed = False
                frame.health.CopyFrom(wire.health_to(self._partition.health))
            await self._out.put(frame)


def _frames(
    request_ids: list[int],
    results: list[Result],
    refused: list[exchange_pb2.OperationResult],
) -> Iterator[exchange_pb2.ExchangeResponse]:
    """The answers to one frame, in as few frames as their bodies allow."""
    frame = exchange_pb2.ExchangeResponse()
    frame_bytes = 0
    for request_id, result in zip(request_ids, results, strict=True):
        if isinstance(result, Reserved):
            body_bytes = sum(len(each.body) for each in result.slices)
            if frame_bytes and frame_bytes + body_bytes > RESPONSE_BYTES_MAX:
                yield frame
                frame, frame_bytes = exchange_pb2.ExchangeResponse(), 0
            frame_bytes += body_bytes
        frame.results.append(wire.result_to(request_id, result))
    frame.results.extend(refused)
    yield frame
