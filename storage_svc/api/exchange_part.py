"""The part of one partition in an exchange: what is asked of it, and what it has to send.

Submits operations under the broker epoch of its bind, keeps their results until a frame takes them,
and adds the events of the partition. A part that is fenced ends alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from storage_svc.api import codec
from storage_svc.api.result_columns import ResultColumns
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
RESULT_BYTES: Final = 512
READY_BYTES: Final = 640
EXPIRED_BYTES: Final = 16
RUN_BYTES: Final = 32
HAND_OUT_BYTES: Final = 128
"""Generous sizes of a slice without its body, of an error, of any other result, of events, and of a
run and a hand-out in columns."""

_Answered = tuple[int, ExchangeResult | TidemarkError]
"""A request id and its result."""


class ExchangeLoad:
    """What the parts of one exchange have to do and to send, all together."""

    __slots__ = ("result_bytes", "results", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        """Requests that have no results yet."""
        self.results = 0
        self.result_bytes = 0
        """Results for the next frames."""


class ExchangePart:
    """One partition, bound under one broker epoch."""

    def __init__(
        self,
        partition: Partition,
        broker_epoch: int,
        load: ExchangeLoad,
        changed: "Callable[[ExchangePart], None]",
        answered: "Callable[[ExchangePart], None]",
    ) -> None:
        """Raises why the partition cannot be bound. `changed` is called with news to send, and
        `answered` when a request has its results and reading may go on."""
        partition.check_epoch(broker_epoch)
        self.number = partition.number
        self.broker_epoch = broker_epoch
        self.is_crowded = False
        """Whether the broker has sent more than it may leave unanswered."""
        self._partition = partition
        self._openings = 0
        """Those that the broker was first told of; 0 before that."""
        self._report_change, self._report_answer = changed, answered
        self._has_reported = False
        """Whether the exchange knows that there is something to send."""
        self._events = partition.connect(broker_epoch, self._changed, self._handed_out)
        self._load = load
        self._unsent: deque[tuple[int, ExchangeResult | TidemarkError, int]] = deque()
        """Request ids, results, and about how many bytes each takes in a frame."""
        self._unsent_bytes = 0
        self._is_plain = True
        """Whether all that is unsent fits in columns."""
        self._commit = partition.last_commit
        """One that contains all that is kept, or follows it. Not the present one of the partition:
        that may have been opened again without commits that are lost."""
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._closed = False
        self._changed()  # the health and the next deadline answer the bind

    def close(self) -> None:
        """The exchange carries the partition no longer: results that are not sent are dropped."""
        self._closed = True
        self._partition.disconnect(self._events)
        self._load.results -= len(self._unsent)
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
        asked = Asked(self)
        asked.size, asked.unanswered = request.ByteSize(), len(request.operations)
        callers: list[str] = []
        for each in request.operations:
            try:
                operation = codec.decode_operation(each)
            except TidemarkError as error:
                asked.refused.append((each.request_id, error))
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
        self._load.under_way += 1
        self._unanswered += asked.unanswered
        self._unanswered_bytes += asked.size
        if (
            self._unanswered > UNANSWERED_OPERATIONS_MAX
            or self._unanswered_bytes > UNANSWERED_BYTES_MAX
        ):
            self.is_crowded = True
        if self._openings in (0, self._partition.health.openings):
            self._partition.submit_frame(asked)
            return
        # A commit has failed, which the broker did not know when it sent these: they must not
        # overtake those of that commit, which are repeated. It claims and binds again.
        number = str(self.number)
        asked.fail(Unavailable(f"partition {number} was opened again", partition=number))

    def answered(self, asked: "Asked") -> None:
        """All operations of a request have their results."""
        load = self._load
        self._unanswered -= asked.unanswered
        self._unanswered_bytes -= asked.size
        load.under_way -= 1
        if self.is_crowded:
            self.is_crowded = (
                self._unanswered > UNANSWERED_OPERATIONS_MAX
                or self._unanswered_bytes > UNANSWERED_BYTES_MAX
            )
            self._report_answer(self)
        elif not load.under_way:
            self._report_answer(self)

    def take_results(self, results: Iterable[_Answered]) -> None:
        """Keep results for the next frame."""
        if self._closed:
            return
        kept = result_bytes = 0
        self._commit = self._partition.last_commit
        for request_id, result in results:
            size = _plain_bytes_of(result)
            if not size:
                self._is_plain = False
                size = _bytes_of(result)
            self._unsent.append((request_id, result, size))
            kept += 1
            result_bytes += size
        self._unsent_bytes += result_bytes
        self._load.results += kept
        self._load.result_bytes += result_bytes
        if not self._has_reported:
            self._has_reported = True
            self._report_change(self)

    def _handed_out(self, results: Sequence[Reserved | HandedOut]) -> None:
        """Results of standing reserves: in order with those of operations."""
        self.take_results([(0, each) for each in results])

    def _changed(self) -> None:
        self._has_reported = True
        self._report_change(self)

    # --- frames --------------------------------------------------------------------------------

    def move_to(self, columns: ResultColumns, bytes_max: int) -> int:
        """Move all that there is into columns, and return about how many bytes that takes; 0 if it
        does not fit in them, and nothing was moved."""
        events, used_bytes = self._events, self._unsent_bytes
        self._has_reported = False
        if (
            not self._partition.is_held_under(self.broker_epoch)
            or not self._is_plain
            or not 0 < used_bytes <= bytes_max
            or events.health_changed
            or events.next_deadline_changed
            or events.ready
            or events.expired
        ):
            return 0
        columns.add(self.number, self.broker_epoch, self._commit, self._unsent)
        self._load.results -= len(self._unsent)
        self._load.result_bytes -= used_bytes
        self._unsent.clear()
        self._unsent_bytes = 0
        return used_bytes

    def write_to(
        self, response: exchange_pb2.PartitionResponse, share_bytes: int, room_bytes: int
    ) -> int:
        """Move results, then events, into a frame; returns about how many bytes.

        They take at most `share_bytes`, or one result that fits `room_bytes`.
        """
        self._has_reported = False
        used_bytes = self._write_results(response, share_bytes, room_bytes)
        response.commit = self._commit
        events = self._events
        if events.expired and not self._unsent:  # after the results that handed them out
            count = _fitting(len(events.expired), EXPIRED_BYTES, share_bytes - used_bytes)
            response.expired_reservation_ids.extend(events.expired[:count])
            del events.expired[:count]
            used_bytes += count * EXPIRED_BYTES
        if events.ready:
            count = _fitting(len(events.ready), READY_BYTES, share_bytes - used_bytes)
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
        if events.health_changed and not response.results:
            # In a frame without results: a broker that reads of a reopening drops its callers, and
            # those whose results are in the frame have not seen them yet.
            events.health_changed = False
            self._openings = self._openings or self._partition.health.openings
            response.health.CopyFrom(codec.encode_health(self._partition.health))
        return used_bytes

    def _write_results(
        self, response: exchange_pb2.PartitionResponse, share_bytes: int, room_bytes: int
    ) -> int:
        used_bytes = moved = 0
        while self._unsent:
            request_id, result, result_bytes = self._unsent[0]
            if used_bytes + result_bytes > (share_bytes if used_bytes else room_bytes):
                break
            self._unsent.popleft()
            used_bytes += result_bytes
            moved += 1
            # Written in place: a result that is appended is copied, bodies and all.
            codec.write_result(response.results.add(request_id=request_id), result)
        self._unsent_bytes -= used_bytes
        if not self._unsent:
            self._is_plain = True
        self._load.results -= moved
        self._load.result_bytes -= used_bytes
        return used_bytes


class Asked(Frame):
    """Operations that one frame of the broker has for a partition, until all have their results."""

    __slots__ = ("_results", "part", "refused", "request_ids", "size", "unanswered")

    operations: list[Operation[ExchangeResult]]

    def __init__(self, part: ExchangePart) -> None:
        self.operations = []
        self.callers = ()
        self.broker_epoch = part.broker_epoch
        self.body_bytes = self.steps = 0
        self.is_answered = False
        self.part = part
        self.size = 0
        """In bytes, as the broker counts it or less."""
        self.unanswered = 0
        """How many operations it counts for: some are for many runs."""
        self.request_ids: list[int] = []
        self.refused: list[_Answered] = []
        """Operations that were malformed; their results follow those of the others."""
        self._results = 0

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
            self.refused.append((request_id, operation))
        else:
            self.operations.append(operation)
            self.request_ids.append(request_id)
            self.steps += steps
            self.body_bytes += size

    def answer(self, results: Sequence[ExchangeResult | TidemarkError]) -> None:
        """The results go into the next frame."""
        first, request_ids, part = self._results, self.request_ids, self.part
        end = self._results = first + len(results)
        if end == len(request_ids):
            self.is_answered = True
            part.answered(self)
        if len(results) < len(request_ids):  # the partition has cut the request
            request_ids = request_ids[first:end]
        answered = zip(request_ids, results, strict=True)
        if self.refused and self.is_answered:
            part.take_results([*answered, *self.refused])
        else:
            part.take_results(answered)

    def fail(self, error: TidemarkError) -> None:
        if not self.is_answered:
            self.answer([error] * (len(self.request_ids) - self._results))


def write_end(response: exchange_pb2.PartitionResponse, reason: TidemarkError) -> None:
    """Make a response the last one of its part."""
    response.end.CopyFrom(to_status(reason))


def _fitting(count: int, each_bytes: int, room_bytes: int) -> int:
    """How many events fit, at least one."""
    return min(count, max(1, room_bytes // each_bytes))


def _plain_bytes_of(result: ExchangeResult | TidemarkError) -> int:
    """A quick estimate of its size in columns; 0 if it does not fit in them."""
    size = RESULT_BYTES
    if isinstance(result, AppendedRuns):
        if result.repeats or result.refused:
            return 0
        return size + RUN_BYTES * (len(result.places) // 2)
    if isinstance(result, HandedOut):
        for _, _, _, _, _, _, body, *_ in result.hand_outs:
            size += HAND_OUT_BYTES + len(body)
        return size
    return size if isinstance(result, Acked) and not result.refused else 0


def _bytes_of(result: ExchangeResult | TidemarkError) -> int:
    """A quick estimate of its size in a frame."""
    size = RESULT_BYTES
    if isinstance(result, AppendedRuns):
        return size + RUN_BYTES * (len(result.places) // 2) + ERROR_BYTES * len(result.refused)
    if isinstance(result, Acked | Renewed):
        return size + ERROR_BYTES * len(result.refused) if result.refused else size
    if isinstance(result, Reserved):
        for each in result.slices:
            size += SLICE_BYTES + len(each.body)
        return size
    return ERROR_BYTES if isinstance(result, TidemarkError) else RESULT_BYTES
