"""The operations of one partition that storage has not answered: waiting, or in a frame.

Operations that arrive while others are in flight wait for the next frame, which takes them when
those are answered, or at once above a size that is worth its cost. Every operation gets exactly one
answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from broker_svc.links.frame_columns import AnyOperation, PlainOperation, PlainResult, pass_to
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.limits import UNANSWERED_BYTES_MAX, UNANSWERED_OPERATIONS_MAX
from tidemark.rpc.callbacks import Done, pass_on

FRAMES_IN_FLIGHT_MAX: Final = 8
WORTHWHILE_BYTES: Final = 64 * 1024
WORTHWHILE_OPERATIONS: Final = 32
"""Above either, a frame is sent without waiting for the previous one: its overhead is small."""

_log = logging.getLogger(__name__)

Answer = asyncio.Future[exchange_pb2.OperationResult]

_Size = tuple[int, int]
"""Bytes, and for how many operations one counts."""

_NOTHING: Final[_Size] = (0, 0)


class UnansweredOperations:
    """Operations of one partition that storage has not answered over the present link."""

    def __init__(self) -> None:
        self._request_ids = 0
        self.gathered: deque[tuple[AnyOperation, _Size]] = deque()
        """Operations for the next frames, with their sizes."""
        self._gathered_bytes = self._gathered_steps = 0
        self._frame_ends: set[int] = set()
        """The last request of each frame that is under way."""
        self._callers: dict[int, Done[exchange_pb2.OperationResult]] = {}
        self._none_left = asyncio.Event()
        """Set when the last operation is answered, once that was waited for."""
        self._is_awaited = False
        self._sent: dict[int, _Size] = {}
        """The sizes of operations that were sent and are not answered."""
        self._unanswered_bytes = self._unanswered_steps = 0

    def __len__(self) -> int:
        return len(self._callers)

    def put(
        self,
        operation: AnyOperation,
        done: Done[exchange_pb2.OperationResult],
        steps: int,
    ) -> None:
        """Queue one operation; `done` gets its answer. One for many runs counts for each."""
        self._request_ids += 1
        request_id = operation.request_id = self._request_ids
        self._callers[request_id] = done
        size = operation.size if isinstance(operation, PlainOperation) else operation.ByteSize()
        self.gathered.append((operation, (size, steps)))
        self._gathered_bytes += size
        self._gathered_steps += steps

    def move(self, share_bytes: int, room_bytes: int) -> tuple[Sequence[AnyOperation], int]:
        """All waiting operations, as far as they fit and storage may owe answers; and their size.
        They are under way from now on."""
        frame: list[AnyOperation] = []
        frame_bytes = 0
        while self.gathered and self._may_owe():
            operation, (size, steps) = self.gathered[0]
            if frame_bytes + size > (share_bytes if frame else room_bytes):
                break
            self.gathered.popleft()
            frame_bytes += size
            self._sent[operation.request_id] = size, steps
            self._gathered_steps -= steps
            self._unanswered_steps += steps
            frame.append(operation)
        if frame:
            self._gathered_bytes -= frame_bytes
            self._unanswered_bytes += frame_bytes
            self._frame_ends.add(frame[-1].request_id)
        return frame, frame_bytes

    @property
    def may_leave(self) -> bool:
        """Whether the next operations leave now; asked again whenever something has changed.

        Storage commits what gathers there while it commits, so a small frame that waits for the one
        before it loses little time, and what joins it meanwhile saves the cost of a frame each.
        """
        if not self.gathered:
            return False
        under_way = len(self._frame_ends)
        worthwhile = (
            self._gathered_steps >= WORTHWHILE_OPERATIONS
            or self._gathered_bytes >= WORTHWHILE_BYTES
        )
        prompt = not under_way or (worthwhile and under_way < FRAMES_IN_FLIGHT_MAX)
        return prompt and self._may_owe()

    def take(self, request_id: int, result: exchange_pb2.OperationResult) -> None:
        """Storage has answered an operation."""
        done = self._pop(request_id)
        if done is not None:
            pass_on(done, result)
            if self._is_awaited and not self._callers:
                self._none_left.set()

    def take_plain(self, result: PlainResult) -> None:
        """The same in columns."""
        operation = self._pop(result[0])
        if isinstance(operation, PlainOperation):
            try:
                pass_to(operation, result)
            except Exception:  # as `pass_on` does
                _log.exception("a result was not taken")
            if self._is_awaited and not self._callers:
                self._none_left.set()

    def _pop(self, request_id: int) -> Done[exchange_pb2.OperationResult] | None:
        self._frame_ends.discard(request_id)
        size, steps = self._sent.pop(request_id, _NOTHING)
        self._unanswered_bytes -= size
        self._unanswered_steps -= steps
        return self._callers.pop(request_id, None)

    async def until_none(self) -> None:
        """Return once everything is answered, including what callers ask for with an answer."""
        self._is_awaited = True
        while self._callers:
            self._none_left.clear()
            await self._none_left.wait()

    def drop(self) -> Iterable[Done[exchange_pb2.OperationResult]]:
        """The link is broken: returns the callers that storage will not answer."""
        self.gathered.clear()
        self._gathered_bytes = self._gathered_steps = 0
        self._frame_ends.clear()
        self._sent.clear()
        self._unanswered_bytes = self._unanswered_steps = 0
        callers, self._callers = self._callers, {}
        self._none_left.set()
        return callers.values()

    def _may_owe(self) -> bool:
        """Whether one more operation may be unanswered: beyond that, storage would stop reading,
        also what other partitions have to send."""
        if not self._sent:
            return True
        size, steps = self.gathered[0][1]
        return (
            self._unanswered_steps + steps <= UNANSWERED_OPERATIONS_MAX
            and self._unanswered_bytes + size <= UNANSWERED_BYTES_MAX
        )
