"""The part of one partition in an exchange: what is asked of it, and what it has to send.

Submits operations under the broker epoch of its bind, and puts their results into the columns of
the next frame. What has only the long form waits in the part until a frame takes it, and so do
results that follow it. A part that is fenced ends alone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from storage_svc.api import codec
from storage_svc.api.result_columns import (
    RESULT_BYTES,
    RUN_BYTES,
    ResultColumns,
    hand_outs_bytes,
)
from storage_svc.empty_containers import NO_LIST
from storage_svc.operations.acks import Acked
from storage_svc.operations.operation import ExchangeResult, Operation
from storage_svc.operations.publish import AppendedRuns, AppendRuns
from storage_svc.operations.renew import Renewed
from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import HandedOut
from storage_svc.partition.counters import Claim
from storage_svc.partition.frames import Frame, measured, sampled
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import not_held_here
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError, Unavailable
from tidemark.limits import UNANSWERED_BYTES_MAX, UNANSWERED_OPERATIONS_MAX
from tidemark.rpc.statuses import to_status

SLICE_BYTES: Final = 512
ERROR_BYTES: Final = 2048
READY_BYTES: Final = 640
EXPIRED_BYTES: Final = 16
"""Generous sizes of a slice without its body, of an error, and of events."""

_Result = ExchangeResult | TidemarkError


class ExchangeLoad:
    """What the parts of one exchange have to do and to send, all together."""

    __slots__ = ("columns", "crowded", "result_bytes")

    def __init__(self, columns: ResultColumns) -> None:
        self.columns = columns
        """Those of the next frame."""
        self.result_bytes = 0
        """Of results that wait in their parts for the long form."""
        self.crowded: set[ExchangePart] = set()
        """Parts whose broker has sent more than it may leave unanswered, or has until now."""


class ExchangePart:
    """One partition, bound under one broker epoch."""

    def __init__(
        self,
        partition: Partition,
        broker_epoch: int,
        load: ExchangeLoad,
        changed: "Callable[[ExchangePart], None]",
    ) -> None:
        """Raises why the partition cannot be bound. `changed` is called with the first news that
        have to be sent in the long form."""
        partition.check_epoch(broker_epoch)
        self.number = partition.number
        self.broker_epoch = broker_epoch
        self.unanswered = 0
        self.unanswered_bytes = 0
        """How many operations the broker waits for, and their size, as `Asked` counts them."""
        self._partition = partition
        self._openings = 0
        """Those that the broker was first told of; 0 before that."""
        self._report_change = changed
        self._is_waiting = False
        """Whether something waits for the long form, which the exchange knows. What follows waits
        behind it, so that everything is sent in order."""
        self._events = partition.connect(broker_epoch, self._changed, self._handed_out)
        self._load = load
        self._unsent: deque[tuple[int, _Result, int]] = deque()
        """Request ids, results, and about how many bytes each takes in a frame."""
        self._unsent_bytes = 0
        self._before_health: int | None = None
        """How many unsent results precede a health that waits; None if none waits."""
        self._health_openings = 0
        """Openings of the partition when these were counted."""
        self._commit = partition.last_commit
        """One that contains all that is kept, or follows it. Not the present one of the partition:
        that may have been opened again without commits that are lost."""
        self._closed = False
        self._changed()  # the health and the next deadline answer the bind

    def close(self) -> None:
        """The exchange carries the partition no longer: results that wait are dropped. The broker
        drops those that are in columns already, as it does with any frame that is on its way."""
        self._closed = self._is_waiting = True
        self._partition.disconnect(self._events)
        self._load.result_bytes -= self._unsent_bytes
        self._unsent.clear()
        self._unsent_bytes = 0

    @property
    def holder(self) -> Claim | None:
        """The broker that has bound it, while that one holds the partition."""
        if not self._partition.is_open or self.failure() is not None:
            return None
        return self._partition.state.claim

    @property
    def has_news(self) -> bool:
        """Whether there is anything for the next frame."""
        events = self._events
        return bool(
            self._unsent
            or events.ready
            or events.expired
            or events.next_deadline_changed
            or events.health_changed
        )

    def failure(self) -> TidemarkError | None:
        """Why the part cannot continue: it is fenced, or another node is to hold the partition; or
        runs of it were refused, and the partition serves again.

        Not asked while the partition reopens: operations get its faults as errors then.
        """
        if self._partition.is_held_under(self.broker_epoch):  # as nearly always
            return self._partition.refused_before()
        if self._partition.has_left:
            return not_held_here(self.number)
        if self._partition.is_open:
            try:
                self._partition.check_epoch(self.broker_epoch)
            except TidemarkError as error:
                return error
        return None

    # --- operations ----------------------------------------------------------------------------

    def decode(self, request: exchange_pb2.PartitionOperations) -> "Asked":
        """The valid operations of a request, and why the others are refused."""
        asked = Asked(self, [], [], len(request.operations), 0, request.ByteSize())
        callers: list[str] = []
        for each in request.operations:
            try:
                operation = codec.decode_operation(each)
            except TidemarkError as error:
                asked.refuse(each.request_id, error)
                continue
            if each.traceparent or callers:
                callers += [""] * (len(asked.operations) - len(callers))
                callers.append(each.traceparent)
            asked.operations.append(operation)
            asked.request_ids.append(each.request_id)
            if isinstance(operation, AppendRuns):
                asked.unanswered += len(operation.runs) - 1
        asked.callers = sampled(callers)
        asked.body_bytes, asked.steps = measured(asked.operations)
        return asked

    def submit(self, asked: "Asked") -> None:
        """Submit what was decoded."""
        self.unanswered += asked.unanswered
        self.unanswered_bytes += asked.size
        if self.is_crowded:
            self._load.crowded.add(self)
        if self._openings == self._partition.health.openings or not self._openings:
            self._partition.submit_frame(asked)
            return
        # A commit has failed, which the broker did not know when it sent these: they must not
        # overtake those of that commit, which are repeated. It claims and binds again.
        number = str(self.number)
        asked.fail(Unavailable(f"partition {number} was opened again", partition=number))

    @property
    def is_crowded(self) -> bool:
        """Whether the broker has sent more than it may leave unanswered."""
        return (
            self.unanswered > UNANSWERED_OPERATIONS_MAX
            or self.unanswered_bytes > UNANSWERED_BYTES_MAX
        ) and not self._closed

    def take_results(self, request_ids: Sequence[int], results: Sequence[_Result]) -> None:
        """Put results into the next frame, or keep those that cannot be in columns."""
        if self._is_waiting:
            self._keep(request_ids, results)
            return
        added = self._load.columns.add(
            self.number, self.broker_epoch, self._partition.last_commit, request_ids, results
        )
        if added < len(results):
            self._keep(request_ids[added:], results[added:])

    def _handed_out(self, results: Sequence[Reserved | HandedOut]) -> None:
        """Results of standing reserves: in order with those of operations."""
        for result in results:
            if (
                self._is_waiting
                or not isinstance(result, HandedOut)
                or not self._load.columns.add_hand_outs(
                    self.number, self.broker_epoch, self._partition.last_commit, result
                )
            ):
                self._keep((0,), (result,))

    def _keep(self, request_ids: Sequence[int], results: Sequence[_Result]) -> None:
        """Results that wait for the long form."""
        if self._closed:
            return
        self._commit = self._partition.last_commit
        kept_bytes = 0
        for request_id, result in zip(request_ids, results, strict=True):
            size = _bytes_of(result)
            self._unsent.append((request_id, result, size))
            kept_bytes += size
        self._unsent_bytes += kept_bytes
        self._load.result_bytes += kept_bytes
        self._changed()

    def _changed(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._report_change(self)

    # --- frames --------------------------------------------------------------------------------

    def waits_on(self) -> bool:
        """Whether something still waits for a frame. If not, results go into columns again."""
        self._is_waiting = self.has_news
        return self._is_waiting

    def write_to(
        self,
        response: exchange_pb2.PartitionResponse,
        share_bytes: int,
        room_bytes: int,
        *,
        in_columns: bool = False,
    ) -> int:
        """Move results, then events, into a frame; returns about how many bytes. `in_columns` if
        the frame has earlier results of the part in its columns.

        They take at most `share_bytes`, or one result that fits `room_bytes`; and one event of each
        kind.
        """
        events = self._events
        if events.health_changed:
            self._count_before_health()
        used_bytes = 0
        if self._before_health != 0:  # else it is the turn of the health
            used_bytes = self._write_results(response, share_bytes, room_bytes)
        response.commit = self._commit
        events_bytes = min(share_bytes, room_bytes)
        if events.expired and not self._unsent:  # after the results that handed them out
            count = _fitting(len(events.expired), EXPIRED_BYTES, events_bytes - used_bytes)
            response.expired_reservation_ids.extend(events.expired[:count])
            del events.expired[:count]
            used_bytes += count * EXPIRED_BYTES
        if events.ready:
            count = _fitting(len(events.ready), READY_BYTES, events_bytes - used_bytes)
            for lmq_name, group in list(islice(events.ready, count)):
                response.ready.add(lmq_name=lmq_name, group=group)
                del events.ready[lmq_name, group]
            used_bytes += count * READY_BYTES
        if events.next_deadline_changed:
            events.next_deadline_changed = False
            response.next_deadline.SetInParent()
            next_ms = events.sent_deadline_ms = self._partition.next_deadline_ms
            if next_ms is not None:
                response.next_deadline.in_ms = max(0, next_ms - self._partition.now_ms())
        if self._before_health is not None:
            # Behind the results that were there, in a frame without any: a broker that reads of a
            # reopening drops its callers, and those whose results are in the frame have not seen
            # them yet. Before later ones, of which each frame to a busy broker has some.
            if self._before_health or in_columns:
                self._before_health = max(0, self._before_health - len(response.results))
            else:
                self._before_health, events.health_changed = None, False
                self._openings = self._openings or self._partition.health.openings
                response.health.CopyFrom(codec.encode_health(self._partition.health))
        return used_bytes

    def _count_before_health(self) -> None:
        """Note which results a health has to follow: those of now, and again if the partition was
        opened again while it waits."""
        openings = self._partition.health.openings
        if self._before_health is None or self._health_openings != openings:
            self._before_health, self._health_openings = len(self._unsent), openings

    def _write_results(
        self, response: exchange_pb2.PartitionResponse, share_bytes: int, room_bytes: int
    ) -> int:
        used_bytes = 0
        while self._unsent:
            request_id, result, result_bytes = self._unsent[0]
            if used_bytes + result_bytes > (share_bytes if used_bytes else room_bytes):
                break
            self._unsent.popleft()
            used_bytes += result_bytes
            # Written in place: a result that is appended is copied, bodies and all.
            codec.write_result(response.results.add(request_id=request_id), result)
        self._unsent_bytes -= used_bytes
        self._load.result_bytes -= used_bytes
        return used_bytes


class Asked(Frame):
    """Operations that one frame of the broker has for a partition, until all have their results."""

    __slots__ = ("part", "refused", "request_ids", "size", "unanswered")

    operations: list[Operation[ExchangeResult]]

    def __init__(
        self,
        part: ExchangePart,
        operations: list[Operation[ExchangeResult]],
        request_ids: list[int],
        unanswered: int,
        steps: int,
        size: int,
    ) -> None:
        self.operations = operations
        self.callers = ()
        self.broker_epoch = part.broker_epoch
        self.body_bytes = size
        self.steps = steps
        self.is_answered = False
        self.part = part
        self.request_ids = request_ids
        """Of operations that have no results yet."""
        self.unanswered = unanswered
        """How many operations it counts for: some are for many runs."""
        self.size = size
        """In bytes, as the broker counts it or less."""
        self.refused: list[tuple[int, TidemarkError]] = NO_LIST
        """Operations that were malformed; their results follow those of the others."""

    def add(
        self,
        request_id: int,
        operation: Operation[ExchangeResult] | TidemarkError,
        unanswered: int,
        steps: int,
        size: int,
    ) -> None:
        """One more operation, or why it is refused."""
        self.unanswered += unanswered
        self.size += size
        if isinstance(operation, TidemarkError):
            self.refuse(request_id, operation)
        else:
            self.operations.append(operation)
            self.request_ids.append(request_id)
            self.steps += steps
            self.body_bytes += size

    def refuse(self, request_id: int, error: TidemarkError) -> None:
        """One more operation, which is malformed."""
        self.refused = self.refused or []
        self.refused.append((request_id, error))

    def answer(self, results: Sequence[_Result]) -> None:
        """The results go into the next frame."""
        part, request_ids, count = self.part, self.request_ids, len(results)
        if count < len(request_ids):  # the partition has cut the request
            self.request_ids = request_ids[count:]
            part.take_results(request_ids[:count], results)
            return
        self.is_answered = True
        part.unanswered -= self.unanswered
        part.unanswered_bytes -= self.size
        part.take_results(request_ids, results)
        if self.refused:
            part.take_results(*zip(*self.refused, strict=True))

    def fail(self, error: TidemarkError) -> None:
        if not self.is_answered:
            self.answer([error] * len(self.request_ids))


def write_end(response: exchange_pb2.PartitionResponse, reason: TidemarkError) -> None:
    """Make a response the last one of its part."""
    response.end.CopyFrom(to_status(reason))


def _fitting(count: int, each_bytes: int, room_bytes: int) -> int:
    """How many events fit, at least one."""
    return min(count, max(1, room_bytes // each_bytes))


def _bytes_of(result: ExchangeResult | TidemarkError) -> int:
    """A quick estimate of its size in a frame."""
    size = RESULT_BYTES
    if isinstance(result, AppendedRuns):
        return size + RUN_BYTES * (len(result.places) // 2) + ERROR_BYTES * len(result.refused)
    if isinstance(result, HandedOut):
        return size + hand_outs_bytes(result.hand_outs)
    if isinstance(result, Acked | Renewed):
        return size + ERROR_BYTES * len(result.refused) if result.refused else size
    if isinstance(result, Reserved):
        for each in result.slices:
            size += SLICE_BYTES + len(each.body)
        return size
    return ERROR_BYTES if isinstance(result, TidemarkError) else RESULT_BYTES
