"""The operations of one partition that storage has not answered: waiting, or in a frame.

Operations that arrive while others are in flight wait for the next frame, which takes them when
those are answered, or at once above a size that is worth its cost. Every operation gets exactly one
answer. The stream that carries the partition uses it directly: a partition with a single operation
in a frame costs little more than what is done here.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from broker_svc.links.frame_columns import AskedOperation, PlainResult, WrongResult
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError, Unavailable
from tidemark.limits import UNANSWERED_BYTES_MAX, UNANSWERED_OPERATIONS_MAX
from tidemark.rpc.callbacks import Done, pass_on

FRAMES_IN_FLIGHT_MAX: Final = 8
WORTHWHILE_BYTES: Final = 64 * 1024
WORTHWHILE_OPERATIONS: Final = 32
"""Above either, a frame is sent without waiting for the previous one: its overhead is small."""

_REQUEST_ID_BYTES: Final = 11
"""What a request id takes at most: it is added when the size is known."""

_log = logging.getLogger(__name__)

Answer = asyncio.Future[exchange_pb2.OperationResult]


OUTCOMES: Final = {
    "take_ownership": "ownership",
    "confirm_ownership": "ownership",
    "drop_ownership": "ownership",
    "remove_group": "removed",
    "remove_queue": "removed",
    "purge": "removed",
    "unschedule": "removed",
    "redrive": "removed",
    "remove_dead_letters": "removed",
    "drop_outbox": "removed",
}
"""The outcomes of operations, where they are not named like them."""


class LongOperation(AskedOperation):
    """An operation in the long form, and who gets its answer."""

    __slots__ = ("_done", "_operation")

    def __init__(
        self, operation: exchange_pb2.Operation, done: Done[exchange_pb2.OperationResult]
    ) -> None:
        self.size = operation.ByteSize() + _REQUEST_ID_BYTES
        self.steps = 1
        self._operation = operation
        self._done = done

    def __call__(self, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        if not isinstance(result, TidemarkError):
            kind, outcome = str(self._operation.WhichOneof("kind")), result.WhichOneof("outcome")
            if outcome not in ("error", OUTCOMES.get(kind, kind)):
                raise WrongResult(f"{outcome} for {kind}")
        self._done(result)

    def long_form(self) -> exchange_pb2.Operation:
        return self._operation


class Carrier(Protocol):
    """A stream that carries partitions."""

    def may_leave(self, partition: int) -> None:
        """The partition has operations that need not wait; they are moved into the next frame."""


class UnansweredOperations:
    """Operations of one partition that storage has not answered over the present link."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.carrier: Carrier | None = None
        """None while no stream carries the partition."""
        self.witnessed_commit = 0
        """The highest that storage has answered: it must not go back behind it."""
        self._last_request_id = 0
        self._gathered: list[AskedOperation] = []
        """Operations for the next frames, in their order."""
        self._gathered_bytes = self._gathered_steps = 0
        self._leaves = False
        """Whether the carrier knows that operations may leave."""
        self._sent: dict[int, AskedOperation] = {}
        """Operations that are under way, by their request ids."""
        self._sent_bytes = self._sent_steps = 0
        self._frames_under_way = 0
        """Frames whose last operation is not answered."""
        self._none_left = asyncio.Event()
        """Set when the last operation is answered, once that was waited for."""
        self._is_awaited = False

    def __len__(self) -> int:
        return len(self._gathered) + len(self._sent)

    def put(self, operation: AskedOperation) -> None:
        """Queue one operation."""
        operation.request_id = self._last_request_id = self._last_request_id + 1
        operation.ends_frame = False
        self._gathered.append(operation)
        self._gathered_bytes += operation.size
        self._gathered_steps += operation.steps
        if not self._leaves:  # one more does not keep the others
            self._let_leave()

    def _let_leave(self) -> None:
        """Have the next operations moved if they may leave. Asked again whenever more of them have
        gathered or some were answered, until they are moved.

        Storage commits what gathers there while it commits, so a small frame that waits for the one
        before it loses little time, and what joins it meanwhile saves the cost of a frame each.
        """
        if self._frames_under_way and (
            self._frames_under_way >= FRAMES_IN_FLIGHT_MAX
            or (
                self._gathered_steps < WORTHWHILE_OPERATIONS
                and self._gathered_bytes < WORTHWHILE_BYTES
            )
        ):
            return
        if self.carrier is not None and (not self._sent or self._may_owe(self._gathered[0])):
            self._leaves = True
            self.carrier.may_leave(self.partition)

    def move(self, share_bytes: int, room_bytes: int) -> tuple[Sequence[AskedOperation], int]:
        """Operations for a frame, and their size: all that wait, as far as storage may owe answers
        and they fit `share_bytes`; or one that fits `room_bytes`. They are under way from now on.
        """
        self._leaves = False
        moved, moved_bytes, moved_steps = self._gathered, self._gathered_bytes, self._gathered_steps
        if (
            moved_bytes <= share_bytes
            and moved_bytes <= room_bytes
            and self._sent_bytes + moved_bytes <= UNANSWERED_BYTES_MAX
            and self._sent_steps + moved_steps <= UNANSWERED_OPERATIONS_MAX
        ):  # all of them, as a rule
            self._gathered = []
            self._gathered_bytes = self._gathered_steps = 0
            self._sent_bytes += moved_bytes
            self._sent_steps += moved_steps
            for each in moved:
                self._sent[each.request_id] = each
        else:
            moved, moved_bytes = self._move_some(share_bytes, room_bytes)
        if moved:
            moved[-1].ends_frame = True
            self._frames_under_way += 1
        if self._gathered:
            self._let_leave()
        return moved, moved_bytes

    def _move_some(self, share_bytes: int, room_bytes: int) -> tuple[list[AskedOperation], int]:
        """The first of those that wait, as far as they may leave."""
        share_bytes = min(share_bytes, room_bytes)
        moved: list[AskedOperation] = []
        moved_bytes = 0
        for each in self._gathered:
            if moved_bytes + each.size > (share_bytes if moved else room_bytes):
                break
            if self._sent and not self._may_owe(each):
                break
            moved_bytes += each.size
            self._gathered_steps -= each.steps
            self._sent_bytes += each.size
            self._sent_steps += each.steps
            self._sent[each.request_id] = each
            moved.append(each)
        self._gathered_bytes -= moved_bytes
        del self._gathered[: len(moved)]
        return moved, moved_bytes

    def _may_owe(self, operation: AskedOperation) -> bool:
        """Whether one more operation may be unanswered: beyond that, storage would stop reading,
        also what other partitions have to send."""
        return (
            self._sent_steps + operation.steps <= UNANSWERED_OPERATIONS_MAX
            and self._sent_bytes + operation.size <= UNANSWERED_BYTES_MAX
        )

    def saw_commit(self, commit: int) -> None:
        """Storage has answered with it."""
        if commit > self.witnessed_commit:
            self.witnessed_commit = commit

    def take(self, request_id: int, result: exchange_pb2.OperationResult) -> None:
        """Storage has answered an operation. `results_taken` follows. Raises Unavailable for a
        result of another operation."""
        operation = self._answered(request_id)
        if operation is None:
            return
        try:
            operation(result)
        except WrongResult as error:
            raise self._refused(operation, error) from None
        except Exception:  # as `pass_on` does
            _log.exception("a result was not taken")

    def take_plain(self, commit: int, results: Sequence[PlainResult]) -> None:
        """Storage has answered operations in columns. Raises Unavailable as `take` does."""
        if commit > self.witnessed_commit:
            self.witnessed_commit = commit
        for request_id, places, messages in results:
            operation = self._answered(request_id)
            if operation is None:
                continue
            try:
                if places:
                    operation.stored(places)
                else:
                    operation.acked(messages)
            except WrongResult as error:
                raise self._refused(operation, error) from None
            except Exception:  # as `pass_on` does
                _log.exception("a result was not taken")
        if self._gathered or self._is_awaited:
            self.results_taken()

    def _answered(self, request_id: int) -> AskedOperation | None:
        operation = self._sent.pop(request_id, None)
        if operation is not None:
            self._sent_bytes -= operation.size
            self._sent_steps -= operation.steps
            if operation.ends_frame:
                self._frames_under_way -= 1
        return operation

    def _refused(self, operation: AskedOperation, error: WrongResult) -> Unavailable:
        """Nothing more of the partition is to be relied on: whether this operation was carried out
        is not known either. Returns why the link must break."""
        number = str(self.partition)
        detail = f"storage has sent a wrong result of partition {number}: {error}"
        reason = Unavailable(detail, partition=number)
        pass_on(operation, reason)
        return reason

    def results_taken(self) -> None:
        """What waits may leave now."""
        if self._gathered and not self._leaves:
            self._let_leave()
        if self._is_awaited and not len(self):
            self._none_left.set()

    async def until_none(self) -> None:
        """Return once everything is answered, including what callers ask for with an answer."""
        self._is_awaited = True
        while len(self):
            self._none_left.clear()
            await self._none_left.wait()

    def drop(self) -> Collection[AskedOperation]:
        """The link is broken: returns the operations that storage will not answer."""
        dropped = [*self._sent.values(), *self._gathered]
        self._gathered = []
        self._gathered_bytes = self._gathered_steps = 0
        self._leaves = False
        self._sent.clear()
        self._sent_bytes = self._sent_steps = 0
        self._frames_under_way = 0
        self._none_left.set()
        return dropped
