"""A partition: one writer that turns whatever gathered into one durable commit, then answers.

It owns the engine, the order of operations and the broker epoch. Nothing is answered before the
commit of the batch it was computed in, and a commit that fails answers nobody with success.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Link

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import read_u64, u64
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
from storage_svc.queues import Queues, Run
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    Fenced,
    PartitionFaulty,
    ReservationNotFound,
    ShuttingDown,
    TidemarkError,
)
from tidemark.receipts import Receipt
from tidemark.telemetry import (
    context_from_traceparent,
    link_from_traceparent,
    span,
    tracer,
    tracing_enabled,
)

_BROKER_EPOCH = b"broker_epoch"

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)


@dataclass(slots=True)
class _Frame:
    """Operations that arrived together, and who waits for their results."""

    operations: Sequence[Operation]
    callers: Sequence[str]  # trace contexts, one per operation
    results: asyncio.Future[list[Result]]


@dataclass(slots=True)
class Interest:
    """What one exchange wants to hear: queues that a reserve came back empty from."""

    waiting: set[tuple[str, str]] = field(default_factory=set)
    ready: set[tuple[str, str]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Partition:
    """The single writer of one partition. Start it with `open`, end it with `close`."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.number = engine.identity.partition
        self.broker_epoch = 0
        self._engine = engine
        self._clock = clock
        self._queues = Queues(engine)
        self._reservation_ids = 0
        self._frames: list[_Frame] = []
        self._arrived = asyncio.Event()
        self._interests: list[Interest] = []
        self._closing: TidemarkError | None = None
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        (epoch,) = await self._engine.load(Table.META, [_BROKER_EPOCH])
        self.broker_epoch = 0 if epoch is None else read_u64(epoch)
        # Receipts of an earlier life of this process must not match new reservations.
        self._reservation_ids = self._clock.wall_ms() << 20
        await self._queues.recover()
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Finish what was submitted, then release the engine."""
        self._closing = self._closing or ShuttingDown("the storage service is stopping")
        self._arrived.set()
        if self._writer is not None:
            await self._writer
        await self._engine.close()

    async def claim(self) -> int:
        """Raise the broker epoch durably: whoever held a lower one is fenced from now on."""
        self.broker_epoch += 1
        batch = Batch()
        batch.put(Table.META, _BROKER_EPOCH, u64(self.broker_epoch))
        await self._engine.commit(batch)
        return self.broker_epoch

    def check_epoch(self, broker_epoch: int) -> None:
        if broker_epoch != self.broker_epoch:
            raise Fenced(
                f"partition {self.number} is owned under epoch {self.broker_epoch}",
                epoch=str(self.broker_epoch),
            )

    def submit(
        self, operations: Sequence[Operation], callers: Sequence[str]
    ) -> asyncio.Future[list[Result]]:
        """Queue operations for the next commit; their results come in the same order."""
        results: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        if self._closing is not None:
            results.set_exception(self._closing)
            return results
        self._frames.append(_Frame(operations, callers, results))
        self._arrived.set()
        return results

    def watch(self) -> Interest:
        interest = Interest()
        self._interests.append(interest)
        return interest

    def unwatch(self, interest: Interest) -> None:
        self._interests.remove(interest)

    async def _write(self) -> None:
        while self._frames or self._closing is None:
            if not self._frames:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            frames, self._frames = self._frames, []
            try:
                await self._commit(frames)
            except Exception as error:
                self._fail(frames, error)

    async def _commit(self, frames: list[_Frame]) -> None:
        batch = Batch()
        with span(_tracer, "storage commit", links=_links(frames)) as commit:
            results = [
                [
                    await self._apply(operation, caller, batch)
                    for operation, caller in zip(frame.operations, frame.callers, strict=True)
                ]
                for frame in frames
            ]
            if len(batch):
                await self._engine.commit(batch)
            commit.set_attribute("tidemark.commit.bytes", batch.bytes_approx)
        for frame, answer in zip(frames, results, strict=True):
            if not frame.results.done():
                frame.results.set_result(answer)
        for interest in self._interests:
            if interest.ready:
                interest.changed.set()

    def _fail(self, frames: list[_Frame], error: Exception) -> None:
        """Nobody knows what is on disk now: answer so, and take nothing more until a restart."""
        _log.error("partition %d: commit failed", self.number, exc_info=error)
        self._closing = PartitionFaulty(f"a commit of partition {self.number} failed")
        for frame in [*frames, *self._frames]:
            if not frame.results.done():
                frame.results.set_exception(CommitOutcomeUnknown("the commit failed"))
        self._frames = []

    async def _apply(self, operation: Operation, caller: str, batch: Batch) -> Result:
        name = f"storage {type(operation).__name__.lower()}"
        context = context_from_traceparent(caller) if caller else None
        try:
            with span(_tracer, name, context=context):
                match operation:
                    case Append():
                        return self._append(operation, batch)
                    case Reserve():
                        return await self._reserve(operation)
                    case Ack():
                        return self._ack(operation, batch)
        except TidemarkError as error:
            return error

    def _append(self, operation: Append, batch: Batch) -> Appended:
        queue = self._queues.get_or_create(operation.lmq_name, batch)
        run = Run(
            queue.next_offset,
            operation.count,
            self._clock.wall_ms(),
            operation.fairness_key,
            operation.traceparent,
        )
        self._queues.append(queue, run, operation.body, batch)
        for interest in self._interests:
            for key in [each for each in interest.waiting if each[0] == operation.lmq_name]:
                interest.waiting.discard(key)
                interest.ready.add(key)
        return Appended(queue.queue_id, run.first_offset)

    async def _reserve(self, operation: Reserve) -> Reserved:
        queue = self._queues.find(operation.lmq_name)
        slices: list[Slice] = []
        room = operation.max_messages
        while queue is not None and queue.ready and queue.ready[0].count <= room:
            run = queue.ready.popleft()
            room -= run.count
            self._reservation_ids += 1
            queue.reserved[self._reservation_ids] = run
            receipt = Receipt(self.number, queue.queue_id, self._reservation_ids)
            body = await self._queues.body(queue, run)
            slices.append(
                Slice(
                    self._reservation_ids,
                    receipt.encode(),
                    queue.queue_id,
                    run.first_offset,
                    run.count,
                    body,
                    run.publish_time_ms,
                    run.fairness_key,
                    run.traceparent,
                )
            )
        if not slices:
            for interest in self._interests:
                interest.waiting.add((operation.lmq_name, operation.group))
        return Reserved(tuple(slices))

    def _ack(self, operation: Ack, batch: Batch) -> Settled:
        receipt = Receipt.decode(operation.receipt)
        queue = self._queues.by_id(receipt.queue_id)
        run = None if queue is None else queue.reserved.pop(receipt.reservation_id, None)
        if queue is None or run is None:
            raise ReservationNotFound("there is no such reservation")
        self._queues.delete(queue, run, batch)
        return Settled(run.count)


def _links(frames: list[_Frame]) -> Iterator[Link | None]:
    """A commit belongs to many traces: it is linked to each operation in it."""
    if tracing_enabled():
        for frame in frames:
            for caller in frame.callers:
                yield link_from_traceparent(caller)
