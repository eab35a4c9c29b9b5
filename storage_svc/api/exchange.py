"""An exchange: the pipelined stream between one broker and one partition.

Takes frames of operations, keeps a bounded number of them under way, and sends results and events
back, each after the commit it was computed in. Results that arrive while a frame is being written
go into the next one. It ends when the broker is fenced.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from functools import partial
from typing import Any

from storage_svc.api import codec
from storage_svc.operations.operation import ExchangeResult, Operation
from storage_svc.operations.reserve import Reserved
from storage_svc.partition.exchange_events import ExchangeEvents
from storage_svc.partition.partition import Partition
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import ShuttingDown, TidemarkError

FRAMES_IN_FLIGHT_MAX = 16
"""Frames whose results are not yet computed; further frames wait."""

RESPONSE_BYTES_MAX = 8 * 1024 * 1024
"""Results beyond this go into a frame of their own, so that every frame fits gRPC's limit."""

SLICE_BYTES = 512
ERROR_BYTES = 2048
RESULT_BYTES = 512
"""Generous sizes of a slice without its body, of an error, and of any other result."""

UNSENT_RESULTS_MAX = 20_000
"""Results that a broker may leave unread before no more frames are taken from it."""

_Answered = tuple[int, ExchangeResult | TidemarkError]
"""A request id and its result."""


class Exchange:
    """One stream, bound to one partition under one broker epoch."""

    def __init__(self, partition: Partition, broker_epoch: int, stopping: asyncio.Event) -> None:
        self._partition = partition
        self._broker_epoch = broker_epoch
        self._stopping = stopping
        self._under_way = 0
        self._room = asyncio.Event()
        """Set while another frame may be taken."""
        self._answered_all = asyncio.Event()
        self._unsent = _Unsent()
        self._ended = False
        self._failure: Exception | None = None
        self._events: ExchangeEvents
        self._make_room()

    async def frames(
        self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]
    ) -> AsyncGenerator[exchange_pb2.ExchangeResponse, None]:
        """The frames for the broker, until the stream ends."""
        events = self._events = self._partition.connect(self._broker_epoch)
        taking = asyncio.create_task(self._or_fail(self._take(requests)))
        tasks = [
            taking,
            asyncio.create_task(self._or_fail(self._stop(taking))),
        ]
        try:
            while True:
                await events.changed.wait()
                events.changed.clear()
                if frame := self._next_frame():
                    yield frame
                if len(self._unsent):  # results are sent before anything ends the stream
                    events.changed.set()
                    continue
                if self._failure is not None:
                    raise self._failure
                if self._ended:
                    return
                self._check_fence()
        finally:
            self._partition.disconnect(events)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _or_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """An error in one part of the exchange ends all of it."""
        try:
            await work
        except Exception as error:
            self._failure = error
            self._events.changed.set()

    async def _stop(self, taking: asyncio.Task[None]) -> None:
        """The service is stopping: answer the frames that were taken, then end the stream."""
        await self._stopping.wait()
        taking.cancel()
        await self._answered_all.wait()
        raise ShuttingDown("the storage service is stopping")

    async def _take(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        """Submit frames as they come."""
        async for request in requests:
            self._check_fence()
            await self._room.wait()
            self._submit(request)
        await self._answered_all.wait()
        self._ended = True
        self._events.changed.set()

    def _check_fence(self) -> None:
        """Not while the partition reopens: operations get its faults as errors then."""
        if self._partition.is_open:
            self._partition.check_epoch(self._broker_epoch)

    def _submit(self, request: exchange_pb2.ExchangeRequest) -> None:
        """Submit the valid operations and refuse the others at once."""
        request_ids: list[int] = []
        operations: list[Operation[ExchangeResult]] = []
        callers: list[str] = []
        refused: list[_Answered] = []
        for each in request.operations:
            try:
                operations.append(codec.decode_operation(each))
            except TidemarkError as error:
                refused.append((each.request_id, error))
                continue
            request_ids.append(each.request_id)
            callers.append(each.traceparent)
        self._under_way += 1
        self._make_room()
        results = self._partition.submit(operations, callers, self._broker_epoch)
        results.add_done_callback(partial(self._answered, request_ids, refused))

    def _answered(
        self,
        request_ids: list[int],
        refused: list[_Answered],
        pending: asyncio.Future[list[ExchangeResult | TidemarkError]],
    ) -> None:
        """The commit of a frame is durable or has failed: its results go into the next frame."""
        error = pending.exception()
        if error is None:
            self._unsent.add(zip(request_ids, pending.result(), strict=True))
        else:
            assert isinstance(error, TidemarkError), "a partition fails with errors of ours"
            self._unsent.add((request_id, error) for request_id in request_ids)
        self._unsent.add(refused)
        self._under_way -= 1
        self._make_room()
        self._events.changed.set()

    def _make_room(self) -> None:
        """Take frames while few are under way and the broker reads its results."""
        _set_if(self._room, self._under_way < FRAMES_IN_FLIGHT_MAX and not self._unsent.full)
        _set_if(self._answered_all, not self._under_way)

    def _next_frame(self) -> exchange_pb2.ExchangeResponse | None:
        """Results, queues that became ready, the next deadline and the health of the partition."""
        events = self._events
        frame = exchange_pb2.ExchangeResponse()
        self._unsent.move_to(frame)
        self._make_room()
        if not len(self._unsent):  # after the results that handed them out
            frame.expired_reservation_ids.extend(events.expired)
            events.expired.clear()
        ready, events.ready = events.ready, {}
        for lmq_name, group in ready:
            frame.ready.add(lmq_name=lmq_name, group=group)
        if events.next_deadline_changed:
            events.next_deadline_changed = False
            frame.next_deadline.SetInParent()
            next_ms = events.sent_deadline_ms = self._partition.next_deadline_ms
            if next_ms is not None:
                frame.next_deadline.in_ms = max(0, next_ms - self._partition.now_ms())
        if events.health_changed and frame.results:
            # In a frame of its own: a broker that reads of a reopening drops its callers, and those
            # whose results are in this frame have not seen them yet.
            events.changed.set()
        elif events.health_changed:
            events.health_changed = False
            frame.health.CopyFrom(codec.encode_health(self._partition.health))
        return frame if frame.ListFields() else None


class _Unsent:
    """Results that wait for the next frame, bounded in number and bytes."""

    def __init__(self) -> None:
        self._results: deque[_Answered] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    @property
    def full(self) -> bool:
        """Whether the broker must read results before more frames are taken."""
        return self._bytes > RESPONSE_BYTES_MAX or len(self._results) > UNSENT_RESULTS_MAX

    def add(self, results: Iterable[_Answered]) -> None:
        for each in results:
            self._results.append(each)
            self._bytes += _bytes_of(each[1])

    def move_to(self, frame: exchange_pb2.ExchangeResponse) -> None:
        """As many as fit a frame, at least one if there is one."""
        frame_bytes = 0
        while self._results:
            request_id, result = self._results[0]
            result_bytes = _bytes_of(result)
            if frame_bytes and frame_bytes + result_bytes > RESPONSE_BYTES_MAX:
                break
            self._results.popleft()
            frame_bytes += result_bytes
            # Written in place: a result that is appended is copied, bodies and all.
            codec.write_result(frame.results.add(request_id=request_id), result)
        self._bytes -= frame_bytes


def _set_if(event: asyncio.Event, condition: bool) -> None:
    if condition:
        event.set()
    else:
        event.clear()


def _bytes_of(result: ExchangeResult | TidemarkError) -> int:
    """A quick estimate of its size in a frame."""
    if isinstance(result, Reserved):
        return RESULT_BYTES + sum(SLICE_BYTES + len(each.body) for each in result.slices)
    return ERROR_BYTES if isinstance(result, TidemarkError) else RESULT_BYTES
