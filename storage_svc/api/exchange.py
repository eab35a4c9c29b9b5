"""An exchange: the pipelined stream between one broker and this node, for all its partitions.

Takes frames of operations, passes them to the parts of their partitions, and sends results and
events back, each after the commit it was computed in. Whatever arrives from any partition while a
frame is being written goes into the next one. A partition that cannot continue ends its part; the
stream ends only when the broker or this service does.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeAlias

from storage_svc.api.exchange_part import Asked, ExchangeLoad, ExchangePart, write_end
from storage_svc.api.operation_columns import decode_columns
from storage_svc.api.result_columns import ResultColumns
from storage_svc.partition.partitions import Partitions
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, ShuttingDown, TidemarkError
from tidemark.field_checks import check_range
from tidemark.turns import NEXT_TURN

RESPONSE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Results beyond this go into a frame of their own, so that every frame fits gRPC's limit. While a
broker leaves more unread, no more frames are taken from it."""

PARTITION_MAX: Final = 2**32 - 1
"""The highest number that a response can name."""

UNSENT_ENDS_MAX: Final = 1024
"""Ends of parts that a broker may leave unread, likewise."""

OnLost: TypeAlias = Callable[[str, int], None]
"""Gets the id and the incarnation of a broker."""


def no_report(broker_id: str, incarnation: int) -> None:
    """Without a registry, no other broker would take over."""


class Exchange:
    """One stream. It carries the partitions that the broker has bound."""

    def __init__(self, partitions: Partitions, stopping: asyncio.Event, on_lost: OnLost) -> None:
        """`on_lost` gets a broker whose stream breaks while it holds partitions."""
        self._partitions = partitions
        self._stopping = stopping
        self._on_lost = on_lost
        self._parts: dict[int, ExchangePart] = {}
        self._changed: dict[ExchangePart, None] = {}
        """Parts with something to send in the long form, in the order in which they take their
        share of a frame."""
        self._ends: dict[tuple[int, int], TidemarkError] = {}
        """Partitions and epochs that the stream does not carry, and why."""
        self._wakeup = asyncio.Event()
        """Set while there is something to send, or the stream is to end."""
        self._load = ExchangeLoad(ResultColumns(self._wakeup.set))
        self._room = asyncio.Event()
        """Set while another frame may be taken."""
        self._frame_made = asyncio.Event()
        """Cleared to wait for the next frame."""
        self._ended = False
        self._failure: Exception | None = None
        self._make_room()

    async def frames(
        self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]
    ) -> AsyncGenerator[exchange_pb2.ExchangeResponse, None]:
        """The frames for the broker, until the stream ends."""
        taking = asyncio.create_task(self._or_fail(self._take(requests)))
        tasks = [
            taking,
            asyncio.create_task(self._or_fail(self._stop(taking))),
        ]
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                if frame := self._next_frame():
                    yield frame
                if self._changed or self._ends or self._load.columns:
                    self._wakeup.set()  # results are sent before the stream ends
                    continue
                if self._failure is not None:
                    raise self._failure
                if self._ended:
                    return
        finally:
            self._report_lost()
            for part in self._parts.values():
                part.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report_lost(self) -> None:
        if self._stopping.is_set():
            return  # this service ends the stream
        holders = {part.holder for part in self._parts.values()}
        for broker_id, incarnation in {(e.broker_id, e.incarnation) for e in holders if e}:
            self._on_lost(broker_id, incarnation)

    async def _or_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """An error in one half of the exchange ends all of it."""
        try:
            await work
        except Exception as error:
            self._failure = error
            self._wakeup.set()

    async def _stop(self, taking: asyncio.Task[None]) -> None:
        """The service is stopping: answer the frames that were taken, then end the stream."""
        await self._stopping.wait()
        taking.cancel()
        await self._until_answered()
        raise ShuttingDown("the storage service is stopping")

    # --- from the broker -----------------------------------------------------------------------

    async def _take(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        """Submit frames as they come."""
        async for request in requests:
            # First all are decoded, then all are submitted: see `CommonTurns`.
            for asked in self._decode(request):
                asked.part.submit(asked)
            self._make_room()
            # One turn applies them, the next one begins their sync. Only then another frame is
            # asked for.
            await NEXT_TURN
            await NEXT_TURN
            if not self._room.is_set():
                await self._room.wait()
        await self._until_answered()
        self._ended = True
        self._wakeup.set()

    def _bind(self, bind: exchange_pb2.Bind) -> None:
        try:
            partition = self._partitions.get(bind.partition)
            part = ExchangePart(partition, bind.broker_epoch, self._load, self._has_news)
        except TidemarkError as error:
            self._refuse(bind.partition, bind.broker_epoch, error)
            return
        before = self._parts.get(bind.partition)
        self._parts[bind.partition] = part
        if before is not None:  # closed last: the partition has a broker all the time
            self._close(before)

    def _unbind(self, unbind: exchange_pb2.Unbind) -> None:
        part = self._find(unbind.partition, unbind.broker_epoch)
        if part is not None:
            del self._parts[part.number]
            self._close(part)

    def _decode(self, request: exchange_pb2.ExchangeRequest) -> list[Asked]:
        """Unbind and bind; what is asked of the partitions that the stream carries then."""
        asked = []
        has_columns = request.HasField("columns")
        if len(request.ListFields()) > has_columns:  # else it has nothing but columns, as most
            for unbind in request.unbinds:
                self._unbind(unbind)
            for bind in request.binds:
                self._bind(bind)
            for operations in request.parts:
                part = self._bound(operations.partition, operations.broker_epoch)
                if part is not None:
                    asked.append(part.decode(operations))
        if has_columns:
            asked += decode_columns(request.columns, self._bound)
        return asked

    def _bound(self, partition: int, broker_epoch: int) -> ExchangePart | None:
        """None if the stream does not carry the partition, which is reported. Raises for a number
        that cannot be reported."""
        part = self._parts.get(partition)
        if part is None or part.broker_epoch != broker_epoch:
            check_range("partition", partition, 0, PARTITION_MAX)
            detail = f"partition {partition} is not bound under epoch {broker_epoch}"
            self._refuse(partition, broker_epoch, InvalidArgument(detail, field="parts"))
            return None
        return part

    async def _until_answered(self) -> None:
        """Return once all operations that were taken are answered."""
        while any(part.unanswered for part in self._parts.values()):
            self._frame_made.clear()
            await self._frame_made.wait()

    def _find(self, partition: int, broker_epoch: int) -> ExchangePart | None:
        part = self._parts.get(partition)
        return part if part is not None and part.broker_epoch == broker_epoch else None

    def _refuse(self, partition: int, broker_epoch: int, error: TidemarkError) -> None:
        self._ends[partition, broker_epoch] = error
        self._make_room()
        self._wakeup.set()

    def _close(self, part: ExchangePart) -> None:
        part.close()
        self._changed.pop(part, None)
        self._make_room()

    def _make_room(self) -> None:
        """Take frames while no part has too much under way and the broker reads its results."""
        load, room = self._load, self._room
        if load.crowded:
            load.crowded = {part for part in load.crowded if part.is_crowded}
        if (
            load.crowded
            or load.columns.bytes_approx + load.result_bytes > RESPONSE_BYTES_MAX
            or len(self._ends) > UNSENT_ENDS_MAX
        ):
            room.clear()
        elif not room.is_set():
            room.set()

    # --- to the broker -------------------------------------------------------------------------

    def _has_news(self, part: ExchangePart) -> None:
        if not self._changed:  # else it is set already, or will be with the frame under way
            self._wakeup.set()
        self._changed[part] = None

    def _next_frame(self) -> exchange_pb2.ExchangeResponse | None:
        """The columns, and the long form of all parts, each its share; parts with more come first
        next time."""
        frame = exchange_pb2.ExchangeResponse()
        columns = self._load.columns
        if columns:
            columns.write_to(frame.columns)
            self._load.columns = ResultColumns(self._wakeup.set)
        ends, self._ends = self._ends, {}
        for (partition, broker_epoch), error in ends.items():
            write_end(frame.parts.add(partition=partition, broker_epoch=broker_epoch), error)
        if self._changed:
            self._write_parts(frame, columns)
        self._make_room()
        if not self._frame_made.is_set():
            self._frame_made.set()
        return frame if columns or frame.parts else None

    def _write_parts(self, frame: exchange_pb2.ExchangeResponse, columns: ResultColumns) -> None:
        """Add what waits for the long form. The broker takes it after the columns of the frame."""
        changed, self._changed = self._changed, {}
        in_columns = columns.bound
        bytes_left = RESPONSE_BYTES_MAX - columns.bytes_approx
        share_bytes = bytes_left // len(changed)
        # The first of them takes any one result, whatever its size: it would wait without end.
        room_bytes = sys.maxsize
        for part in changed:
            failure = part.failure()
            response = None
            if failure is not None or part.has_news:
                response = frame.parts.add(partition=part.number, broker_epoch=part.broker_epoch)
                written_bytes = part.write_to(
                    response,
                    share_bytes,
                    room_bytes,
                    in_columns=(part.number, part.broker_epoch) in in_columns,
                )
                bytes_left -= written_bytes
                if written_bytes:
                    room_bytes = bytes_left
            if part.waits_on():
                self._changed[part] = None
            elif failure is not None:
                assert response is not None, "a failure is written"
                write_end(response, failure)
                del self._parts[part.number]
                part.close()
