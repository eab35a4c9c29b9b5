"""One exchange with storage as a test drives it: operations, one stream, and the parts of it.

`ExchangeStream` is one pipelined stream, and `ExchangeClient` one partition on it. Nothing here
knows what a right answer is.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.api.broker.v1.topic_pb2 import Topic
from tidemark.api.storage.v1.action_pb2 import OffsetRange
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    Append,
    ApplyTopic,
    Bind,
    ExchangeRequest,
    HandOuts,
    Operation,
    OperationColumns,
    OperationResult,
    PartitionOperations,
    PartitionResponse,
    Reserve,
    ReservedSlice,
    ReserveResult,
    ResultColumns,
    SettleAction,
    SettleReservation,
    Unbind,
)
from tidemark.api.storage.v1.partition_pb2 import PartitionHealth
from tidemark.errors import TidemarkError, Unavailable
from tidemark.number_rows import rows_of
from tidemark.rpc.statuses import from_status

# --- operations -----------------------------------------------------------------------------------


def body(*payloads: bytes) -> bytes:
    """A run's body."""
    return MessageBatch(messages=[Message(payload=each) for each in payloads]).SerializeToString()


def payloads(body: bytes) -> list[bytes]:
    """What was published, back from a run's body."""
    return [message.payload for message in MessageBatch.FromString(body).messages]


def append(lmq_name: str, *messages: bytes, **fields: Any) -> Operation:
    run = Append(lmq_name=lmq_name, count=len(messages), body=body(*messages))
    run.MergeFrom(Append(**fields))
    return Operation(append=run)


def published(sequence: int, payload: bytes = b"x", **fields: Any) -> Operation:
    """A run of a producer that numbers what it publishes."""
    return append("jobs", payload, producer_id="p", sequence=sequence, **fields)


def reserve(lmq_name: str, max_messages: int = 1000, **fields: Any) -> Operation:
    fields = {"group": "default", **fields}
    return Operation(reserve=Reserve(lmq_name=lmq_name, max_messages=max_messages, **fields))


def settle(
    receipt: bytes,
    action: SettleAction.ValueType = SETTLE_ACTION_ACK,
    *index_ranges: tuple[int, int],
    **fields: Any,
) -> Operation:
    ranges = [OffsetRange(start=start, end=end) for start, end in index_ranges]
    return Operation(
        settle=SettleReservation(receipt=receipt, action=action, index_ranges=ranges, **fields)
    )


def operation(**kind: Any) -> Operation:
    """Any other one: `operation(purge=Purge(lmq_name="a"))`."""
    return Operation(**kind)


# --- one stream -----------------------------------------------------------------------------------


def bind_frame(broker_epoch: int, partition: int = 0) -> ExchangeRequest:
    return ExchangeRequest(binds=[Bind(partition=partition, broker_epoch=broker_epoch)])


def frame_of(broker_epoch: int, *operations: Operation, partition: int = 0) -> ExchangeRequest:
    """A frame with operations for one partition."""
    part = PartitionOperations(
        partition=partition, broker_epoch=broker_epoch, operations=operations
    )
    return ExchangeRequest(parts=[part])


class ExchangeStream:
    """One stream, which carries any number of partitions: an `ExchangeClient` for each."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._writing = asyncio.Lock()
        self._parts: dict[tuple[int, int], ExchangeClient] = {}
        self._reading = asyncio.create_task(self._read())
        self.frames = 0
        """Frames that have arrived."""
        self.frame_bytes_max = 0
        """The size of the largest."""
        self.in_columns: set[int] = set()
        """Partitions of which results have arrived in columns."""

    async def bind(self, partition: int, broker_epoch: int) -> "ExchangeClient":
        (part,) = await self.bind_all((partition, broker_epoch))
        return part

    async def bind_all(self, *claims: tuple[int, int]) -> "list[ExchangeClient]":
        """Bind partitions, each with its epoch, in one frame."""
        parts = [ExchangeClient(self, partition, epoch) for partition, epoch in claims]
        for part in parts:
            self.watch(part)
        binds = [Bind(partition=partition, broker_epoch=epoch) for partition, epoch in claims]
        await self.write(ExchangeRequest(binds=binds))
        return parts

    def watch(self, part: "ExchangeClient") -> None:
        """Pass on what arrives under the epoch of a part."""
        self._parts[part.partition, part.broker_epoch] = part

    async def write(self, frame: ExchangeRequest) -> None:
        async with self._writing:  # gRPC takes one write at a time
            with suppress(TidemarkError):  # the end of the stream has the reason
                await self._call.write(frame)

    async def ask_all(self, asked: "dict[ExchangeClient, list[Operation]]") -> list[list[Any]]:
        """The outcomes of one frame with operations for several partitions."""
        frame = ExchangeRequest()
        waiting = [part.add_to(frame, operations) for part, operations in asked.items()]
        await self.write(frame)
        return [[outcome_of(await each) for each in results] for results in waiting]

    async def ask_in_columns(
        self, asked: "dict[ExchangeClient, list[Operation]]"
    ) -> list[list[Any]]:
        """The same for appends and acks in arrays, sent in columns."""
        frame = ExchangeRequest()
        waiting = [
            [part.add_to_columns(frame.columns, each) for each in operations]
            for part, operations in asked.items()
        ]
        await self.write(frame)
        return [[outcome_of(await each) for each in results] for results in waiting]

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        reason: TidemarkError = Unavailable("the exchange has ended")
        try:
            async for frame in self._call:
                self.frames += 1
                self.frame_bytes_max = max(self.frame_bytes_max, frame.ByteSize())
                self.in_columns.update(frame.columns.partitions[::5])
                for response in [*_single_responses(frame.columns), *frame.parts]:
                    part = self._parts.get((response.partition, response.broker_epoch))
                    if part is not None:
                        part.take(response)
        except TidemarkError as error:
            reason = error
        finally:
            for part in self._parts.values():
                part.end(reason)


class ExchangeClient:
    """One partition on an exchange. Operations may be sent without waiting; events are kept in the
    order they came.

    When its part or the stream ends, whatever was not answered fails with the reason, which `ended`
    gives.
    """

    def __init__(self, stream: ExchangeStream, partition: int, broker_epoch: int) -> None:
        self.stream = stream
        self.partition = partition
        self.broker_epoch = broker_epoch
        self._last_request_id = 0
        self._waiting: dict[int, asyncio.Future[OperationResult]] = {}
        self.ready: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.handed_out: asyncio.Queue[ReserveResult] = asyncio.Queue()
        """Results of standing reserves."""
        self.expired: asyncio.Queue[int] = asyncio.Queue()
        self.deadlines: asyncio.Queue[int | None] = asyncio.Queue()
        self.healths: asyncio.Queue[PartitionHealth] = asyncio.Queue()
        self.ended: asyncio.Future[TidemarkError] = asyncio.get_running_loop().create_future()
        self.bind_answered = asyncio.Event()
        """Set once storage has answered the bind, also with the end of the part."""
        self.frames = 0
        """Frames that carried results of this partition."""
        self.commit = 0
        """The number of the last commit that a frame named."""

    async def send(self, *operations: Operation) -> list[asyncio.Future[OperationResult]]:
        """One frame; gives what its results will arrive in, in the order of the operations."""
        frame = ExchangeRequest()
        results = self.add_to(frame, operations)
        if self.ended.done():
            self._fail(self.ended.result())
            return results
        await self.stream.write(frame)
        return results

    def add_to(
        self, frame: ExchangeRequest, operations: Iterable[Operation]
    ) -> list[asyncio.Future[OperationResult]]:
        """Add operations to a frame."""
        part = frame.parts.add(partition=self.partition, broker_epoch=self.broker_epoch)
        part.operations.extend(operations)
        return [self._expect(each) for each in part.operations]

    def add_to_columns(
        self, columns: OperationColumns, operation: Operation
    ) -> asyncio.Future[OperationResult]:
        """Add appends or acks in an array to the columns of a frame."""
        result = self._expect(operation)
        appends, acks = operation.appends, operation.acks
        columns.operations.extend(
            (
                self.partition,
                self.broker_epoch,
                operation.request_id,
                len(columns.sources),
                appends.topic_version,
                len(appends.lmq_names),
                len(acks.receipts),
            )
        )
        columns.sources.append(appends.producer_id or acks.client_id)
        columns.lmq_names.extend(appends.lmq_names)
        columns.bodies.extend(appends.bodies)
        for each in zip(appends.counts, appends.sequences, strict=True):
            columns.runs.extend(each)
        columns.receipts.extend(acks.receipts)
        return result

    async def ask_all(self, *operations: Operation) -> list[Any]:
        """The outcomes of one frame: each a result, or the error itself."""
        return [outcome_of(await each) for each in await self.send(*operations)]

    async def ask(self, operation: Operation) -> Any:
        """The result of one operation; raises its error."""
        (outcome,) = await self.ask_all(operation)
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    async def unbind(self) -> None:
        unbind = Unbind(partition=self.partition, broker_epoch=self.broker_epoch)
        await self.stream.write(ExchangeRequest(unbinds=[unbind]))

    async def done_writing(self) -> None:
        await self.stream.done_writing()

    def _expect(self, operation: Operation) -> asyncio.Future[OperationResult]:
        self._last_request_id += 1
        operation.request_id = self._last_request_id
        result: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        self._waiting[operation.request_id] = result
        return result

    def take(self, response: PartitionResponse) -> None:
        self.bind_answered.set()
        self.frames += bool(response.results)
        self.commit = response.commit or self.commit
        for result in response.results:
            if result.request_id:
                self._waiting.pop(result.request_id).set_result(result)
            elif result.HasField("hand_outs"):
                for reserve in _single_results(result.hand_outs):
                    self.handed_out.put_nowait(reserve)
            else:
                self.handed_out.put_nowait(result.reserve)
        for reservation_id in response.expired_reservation_ids:
            self.expired.put_nowait(reservation_id)
        for each in response.ready:
            self.ready.put_nowait((each.lmq_name, each.group))
        if response.HasField("next_deadline"):
            deadline = response.next_deadline
            self.deadlines.put_nowait(deadline.in_ms if deadline.HasField("in_ms") else None)
        if response.HasField("health"):
            self.healths.put_nowait(response.health)
        if response.HasField("end"):
            self.end(from_status(response.end))

    def end(self, reason: TidemarkError) -> None:
        self.bind_answered.set()
        if not self.ended.done():
            self.ended.set_result(reason)
        self._fail(reason)

    def _fail(self, reason: TidemarkError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(reason)
                waiting.exception()  # looked at: it need not be awaited
        self._waiting.clear()


def _single_responses(columns: ResultColumns) -> Iterator[PartitionResponse]:
    """Results that came in columns, as responses of single partitions."""
    stored = rows_of(columns.runs, 2)
    messages, handed_out = iter(columns.messages), _single_results(columns.hand_outs)
    results = rows_of(columns.results, 3)
    for partition, epoch, commit, count, hand_outs in rows_of(columns.partitions, 5):
        response = PartitionResponse(partition=partition, broker_epoch=epoch, commit=commit)
        for request_id, runs, receipts in islice(results, count):
            result = response.results.add(request_id=request_id)
            if runs:
                for queue_id, first_offset in islice(stored, runs):
                    result.appends.queue_ids.append(queue_id)
                    result.appends.first_offsets.append(first_offset)
            else:
                result.acks.messages.extend(islice(messages, receipts))
        for reserve in islice(handed_out, hand_outs):
            response.results.add(reserve=reserve)
        yield response


def _single_results(hand_outs: HandOuts) -> Iterator[ReserveResult]:
    """Hand-outs that came in columns, as results of single reserves."""
    for standing_id, left, *rest in zip(
        hand_outs.standing_ids,
        hand_outs.standing_messages,
        hand_outs.reservation_ids,
        hand_outs.receipts,
        hand_outs.first_offsets,
        hand_outs.counts,
        hand_outs.bodies,
        hand_outs.visibility_ms,
        hand_outs.publish_times_ms,
        hand_outs.owner_epochs,
        strict=True,
    ):
        reservation_id, receipt, offset, count, body, visible_ms, time_ms, owner_epoch = rest
        slice_ = ReservedSlice(
            reservation_id=reservation_id,
            receipt=receipt,
            first_offset=offset,
            count=count,
            body=body,
            delivery_count=1,
            visibility_ms=visible_ms,
            publish_time_ms=time_ms,
            owner_epoch=owner_epoch,
        )
        yield ReserveResult(slices=[slice_], standing_messages=left, standing_id=standing_id)


def outcome_of(result: OperationResult) -> Any:
    kind = result.WhichOneof("outcome")
    assert kind is not None, "a result has an outcome"
    outcome = getattr(result, kind)
    return from_status(outcome) if kind == "error" else outcome


async def reserved(exchange: ExchangeClient, lmq_name: str, *asked: Any, **fields: Any) -> Any:
    """Reserve what is expected to be one slice."""
    (got,) = (await exchange.ask(reserve(lmq_name, *asked, **fields))).slices
    return got


async def apply_topic(exchange: ExchangeClient, topic: Topic, *, deleted: bool = False) -> int:
    """Bring a topic to the partition of the exchange; gives the version it has then."""
    applied = await exchange.ask(operation(apply_topic=ApplyTopic(topic=topic, deleted=deleted)))
    version: int = applied.version
    return version
