"""The link to one partition: its claim, and its part of the exchange with its storage node.

Operations that arrive while others are in flight wait for the next frame, which takes them when
those are answered, or at once above a size that is worth its cost. Every operation gets exactly one
answer. When a link breaks, pending operations fail with UNAVAILABLE, and the broker claims the
partition again and reports the reservations that it still holds. A fenced broker does not retry;
only a newer assignment brings the partition back.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Final, Protocol

from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2, partition_pb2, storage_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    DataCorrupt,
    Fenced,
    NotOwner,
    PartitionFaulty,
    PartitionNotFound,
    TidemarkError,
    Unavailable,
)
from tidemark.limits import UNANSWERED_BYTES_MAX, UNANSWERED_OPERATIONS_MAX
from tidemark.rpc.statuses import from_status
from tidemark.settings import BrokerSettings
from tidemark.telemetry import counter, current_traceparent

FRAMES_IN_FLIGHT_MAX: Final = 8
WORTHWHILE_BYTES: Final = 64 * 1024
WORTHWHILE_OPERATIONS: Final = 32
"""A frame of so much does not wait for the one before it: its own cost is small beside its work."""

_HELD_PER_PAGE: Final = 10_000
_RECONNECT_MS_MIN: Final = 50
_RECONNECT_MS_MAX: Final = 2_000
_FAULTY: Final = (DataCorrupt, PartitionFaulty)

Answer = asyncio.Future[exchange_pb2.OperationResult]

_log = logging.getLogger(__name__)
_reconnects = counter("tidemark.broker.link_reconnects", description="Claims after a link was lost")


def refusal_of(result: exchange_pb2.OperationResult) -> str:
    """The reason for which storage refused an operation; empty if it did it."""
    return from_status(result.error).reason if result.HasField("error") else ""


class LinkState(Enum):
    """Whether the broker can use a partition."""

    UP = "up"
    DOWN = "down"
    """Storage does not answer, or the link is being made again."""
    FAULTY = "faulty"
    """Storage answers that the partition cannot be claimed."""
    MOVED = "moved"
    """Another broker holds it."""


class Listener(Protocol):
    """Receives the events of a link."""

    def before_frame_sent(self, partition: int) -> None: ...
    def queue_ready(self, partition: int, lmq_name: str, group: str) -> None: ...
    def handed_out(self, partition: int, reserved: exchange_pb2.ReserveResult) -> None: ...
    def next_deadline(self, partition: int, in_ms: int | None) -> None: ...
    def expired(self, partition: int, reservation_ids: Iterable[int]) -> None: ...
    def link_up(self, partition: int) -> None: ...
    def link_down(self, partition: int) -> None: ...
    def held_receipts(self, partition: int) -> Iterable[bytes]: ...


class PartitionLink:
    """One partition as this broker sees it. `run` keeps it connected until cancelled."""

    def __init__(
        self,
        partition: int,
        settings: BrokerSettings,
        incarnation: int,
        nodes: StorageNodes,
        clock: Clock,
        state_changed: Callable[[], None],
    ) -> None:
        self.partition = partition
        self.connected = asyncio.Event()
        self._state = LinkState.DOWN
        self._detail = "not connected yet"
        self._state_changed = state_changed
        self.owner_address = ""
        self.address = settings.listen
        """The address of this broker, as storage and other brokers get it."""
        self._settings = settings
        self._incarnation = incarnation
        self._nodes = nodes
        self.node: StorageNode | None = nodes.located(partition)
        """The node that the partition was last found at."""
        self.is_away = False
        """Whether the last claim did not reach the node: it may be gone for long."""
        self._clock = clock
        self._listener: Listener | None = None
        self.fenced = False
        """Whether another broker has taken the partition."""
        self._health = partition_pb2.PartitionHealth()
        self._request_ids = 0
        self._gathered: deque[tuple[exchange_pb2.Operation, int]] = deque()
        """Operations for the next frames, with their sizes."""
        self._gathered_bytes = 0
        self._frame_ends: set[int] = set()
        """The last request of each frame that is under way."""
        self._answers: dict[int, Answer] = {}
        self._sent_bytes: dict[int, int] = {}
        """The sizes of operations that were sent and are not answered."""
        self._unanswered_bytes = 0
        self._held_epoch = 0
        self._ended: asyncio.Future[None] | None = None
        """The end of the part that is bound, which is always an error."""

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def assign_to(self, broker_id: str, address: str) -> None:
        """Another broker holds the partition by the assignment: this one never claims it."""
        self.fenced, self.owner_address = True, address
        self._state, self._detail = LinkState.MOVED, f"assigned to {broker_id} at {address}"

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def detail(self) -> str:
        """Why the link is not up; "" while it is."""
        return self._detail

    @property
    def serving(self) -> bool:
        """Whether the partition takes its share of requests (L4)."""
        serving = self._health.state == topic_pb2.PARTITION_STATE_SERVING
        return self.connected.is_set() and serving

    @property
    def waiting(self) -> int:
        """Operations that are not answered yet."""
        return len(self._answers)

    # --- asking --------------------------------------------------------------------------------

    def send(self, operation: exchange_pb2.Operation) -> Answer:
        """Queue one operation; its answer may hold an error. Never blocks, never raises."""
        answer: Answer = asyncio.get_running_loop().create_future()
        if not self.connected.is_set():
            answer.set_exception(self.refusal())
            return answer
        self._request_ids += 1
        operation.request_id = self._request_ids
        if not operation.traceparent:
            operation.traceparent = current_traceparent()
        self._answers[operation.request_id] = answer
        size = operation.ByteSize()
        self._gathered.append((operation, size))
        self._gathered_bytes += size
        self._let_leave()
        return answer

    async def call(self, operation: exchange_pb2.Operation) -> exchange_pb2.OperationResult:
        """Send one operation; raises what storage answered, or UNAVAILABLE."""
        result = await self.send(operation)
        if result.HasField("error"):
            raise from_status(result.error)
        return result

    def refusal(self) -> TidemarkError:
        """Why nothing can be asked of the partition now."""
        number = str(self.partition)
        if self.fenced:
            return NotOwner(
                f"another broker owns partition {number}",
                partition=number,
                owner=self.owner_address,
            )
        return Unavailable(f"the link to partition {number} is broken", partition=number)

    async def finish(self, timeout_ms: int) -> None:
        """Return once everything that was asked is answered, or the time is over."""
        with suppress(TimeoutError):
            await self._clock.wait_for(self._all_answered(), timeout_ms)

    async def _all_answered(self) -> None:
        # Repeatedly: a callback of an answer may have sent more operations.
        while pending := [answer for answer in self._answers.values() if not answer.done()]:
            await asyncio.wait(pending)

    def check_serving(self) -> None:
        """Raise for a faulty partition; storage itself refuses publishes to one that starts."""
        if not self.connected.is_set():
            raise self.refusal()
        if self._health.state == topic_pb2.PARTITION_STATE_FAULTY:
            reasons = ",".join(fault.reason for fault in self._health.faults)
            raise PartitionFaulty(
                f"partition {self.partition} does not serve: {reasons}",
                partition=str(self.partition),
                reasons=reasons,
            )

    # --- staying connected ---------------------------------------------------------------------

    async def run(self) -> None:
        """Claim, exchange, and again after every fault; ends when a claim is refused for good.

        A fenced exchange or report does not prove that: a claim of this broker whose answer was
        lost may have come after the one that it goes by.
        """
        wait_ms = _RECONNECT_MS_MIN
        while not self.fenced:
            claimed = False
            try:
                node = self.node = await self._nodes.locate(self.partition)
                epoch = await self._claim(node)
                claimed = True
                wait_ms = _RECONNECT_MS_MIN
                await self._exchange(node, epoch)
            except TidemarkError as error:
                _log.info("link lost", extra={"partition": self.partition, "reason": error.reason})
                if isinstance(error, PartitionNotFound):
                    self._nodes.forget(self.partition)
                lost = self.node is not None or self._nodes.is_any_away
                self.is_away = not claimed and lost and isinstance(error, Unavailable)
                self._enter(self._state_after(error), f"{error.reason}: {error.detail}")
            finally:
                self._drop_callers()
            if not self.fenced:
                _reconnects.add(1)
                await self._clock.sleep_ms(wait_ms)
                wait_ms = min(2 * wait_ms, _RECONNECT_MS_MAX)

    def _state_after(self, error: TidemarkError) -> LinkState:
        if self.fenced:
            return LinkState.MOVED
        return LinkState.FAULTY if isinstance(error, _FAULTY) else LinkState.DOWN

    def _enter(self, state: LinkState, detail: str = "") -> None:
        self._detail = detail
        self._state = state
        self._state_changed()

    async def _claim(self, node: StorageNode) -> int:
        claim = storage_pb2.ClaimPartitionRequest(
            partition=self.partition,
            cluster_id=self._settings.cluster_id,
            broker_id=self._settings.broker_id,
            incarnation=self._incarnation,
            broker_address=self.address,
            held_epoch=self._held_epoch,
            client_timeout_ms=self._settings.client_timeout_ms,
            partitions=self._settings.partitions,
        )
        try:
            claimed = await node.storage.ClaimPartition(claim)
        except Fenced as error:
            self.fenced = True
            self.owner_address = error.metadata.get("owner", "")
            _log.warning("fenced: %s", error, extra={"partition": self.partition})
            raise
        self._held_epoch = claimed.broker_epoch
        if claimed.report_required:
            report = self._report(claimed.broker_epoch)
            reported = await node.storage.ReportHeldReservations(report)
            if self._listener is not None:
                self._listener.expired(self.partition, reported.gone_reservation_ids)
        return claimed.broker_epoch

    def _report(self, broker_epoch: int) -> Iterator[storage_pb2.ReportHeldReservationsRequest]:
        """What this broker still holds, in pages; the first names partition and epoch."""
        listener = self._listener
        held = [] if listener is None else list(listener.held_receipts(self.partition))
        yield storage_pb2.ReportHeldReservationsRequest(
            partition=self.partition, broker_epoch=broker_epoch
        )
        for at in range(0, len(held), _HELD_PER_PAGE):
            page = held[at : at + _HELD_PER_PAGE]
            yield storage_pb2.ReportHeldReservationsRequest(receipts=page)

    async def _exchange(self, node: StorageNode, broker_epoch: int) -> None:
        """Until the part of this partition ends; raises why."""
        self._ended = asyncio.get_running_loop().create_future()
        node.link.bind(self, broker_epoch)
        try:
            await self._ended
        finally:
            node.link.unbind(self)
            self._ended = None

    # --- as its node uses it -------------------------------------------------------------------

    def part_ended(self, reason: TidemarkError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(reason)
            self._ended.exception()  # marked as seen: the link may be stopping

    def before_frame_sent(self) -> None:
        if self._listener is not None:
            self._listener.before_frame_sent(self.partition)

    def move_to(
        self, part: exchange_pb2.PartitionOperations, share_bytes: int, room_bytes: int
    ) -> int:
        """All waiting operations, as far as they fit and storage may owe answers."""
        frame: list[exchange_pb2.Operation] = []
        frame_bytes = 0
        while self._gathered and self._may_owe():
            operation, size = self._gathered[0]
            if frame_bytes + size > (share_bytes if frame else room_bytes):
                break
            self._gathered.popleft()
            frame_bytes += size
            self._sent_bytes[operation.request_id] = size
            self._unanswered_bytes += size
            frame.append(operation)
        if frame:
            self._gathered_bytes -= frame_bytes
            self._frame_ends.add(frame[-1].request_id)
            part.operations.extend(frame)
        self._let_leave()
        return frame_bytes

    def _may_owe(self) -> bool:
        """Whether one more operation may be unanswered: beyond that, storage would stop reading,
        also what other partitions have to send."""
        return not self._sent_bytes or (
            len(self._sent_bytes) < UNANSWERED_OPERATIONS_MAX
            and self._unanswered_bytes + self._gathered[0][1] <= UNANSWERED_BYTES_MAX
        )

    def _let_leave(self) -> None:
        """Whether the next operations leave now; asked again whenever something has changed.

        Storage commits what gathers there while it commits, so a small frame that waits for the one
        before it loses little time, and what joins it meanwhile saves the cost of a frame each.
        """
        under_way = len(self._frame_ends)
        worthwhile = (
            len(self._gathered) >= WORTHWHILE_OPERATIONS or self._gathered_bytes >= WORTHWHILE_BYTES
        )
        prompt = not under_way or (worthwhile and under_way < FRAMES_IN_FLIGHT_MAX)
        if self.node is not None:
            self.node.link.may_leave(self, bool(self._gathered) and prompt and self._may_owe())

    def take(self, frame: exchange_pb2.PartitionResponse) -> None:
        """Raises Unavailable if storage has reopened the partition."""
        for result in frame.results:
            request_id = result.request_id
            if not request_id:  # of a standing reserve
                self._handed_out(result.reserve)
                continue
            self._frame_ends.discard(request_id)
            self._unanswered_bytes -= self._sent_bytes.pop(request_id, 0)
            answer = self._answers.pop(request_id, None)
            if answer is not None and not answer.done():
                answer.set_result(result)
        if frame.results:
            self._let_leave()
        was_serving, openings = self.serving, self._health.openings
        if frame.HasField("health"):
            self._health = frame.health
        if self.connected.is_set() and openings != self._health.openings:
            # The outcome of its last commit is unknown: reservations may have expired, or been made
            # without an answer. Only a report after a new claim reveals them.
            raise Unavailable(
                f"storage has reopened partition {self.partition}", partition=str(self.partition)
            )
        listener = self._listener
        if not self.connected.is_set():
            if not frame.HasField("health"):
                return  # the bind is refused
            self.connected.set()
            self.is_away = False
            self._enter(LinkState.UP)
            _log.info("link up", extra={"partition": self.partition})
        if listener is None:
            return
        if self.serving and not was_serving:
            listener.link_up(self.partition)
        if frame.expired_reservation_ids:
            # Behind the results of this frame, which are seen in the next turn: one of them may
            # have handed out what has expired since.
            asyncio.get_running_loop().call_soon(
                listener.expired, self.partition, frame.expired_reservation_ids
            )
        for event in frame.ready:
            listener.queue_ready(self.partition, event.lmq_name, event.group)
        if frame.HasField("next_deadline"):
            deadline = frame.next_deadline
            in_ms = deadline.in_ms if deadline.HasField("in_ms") else None
            listener.next_deadline(self.partition, in_ms)

    def _handed_out(self, reserved: exchange_pb2.ReserveResult) -> None:
        """In order with the results of reserves, which are seen in the next turn."""
        if self._listener is not None:
            handed_out = self._listener.handed_out
            asyncio.get_running_loop().call_soon(handed_out, self.partition, reserved)

    def _drop_callers(self) -> None:
        was_connected = self.connected.is_set()
        self.connected.clear()
        self._gathered.clear()
        self._gathered_bytes = 0
        self._frame_ends.clear()
        self._sent_bytes.clear()
        self._unanswered_bytes = 0
        self._let_leave()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(self.refusal())
                answer.exception()  # marked as seen: its caller may be gone
        if was_connected and self._listener is not None:
            self._listener.link_down(self.partition)
