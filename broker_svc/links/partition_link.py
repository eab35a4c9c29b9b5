"""The link to one partition: its claim, and its part of the exchange with its storage node.

A link follows assignments for as long as the broker runs: `link_state` decides what it may do. When
a link breaks, pending operations fail with UNAVAILABLE, and the broker claims the partition again
and reports the reservations that it still holds. When another broker has taken the partition, they
fail with NOT_OWNER, and the listener drops what the broker held of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from broker_svc.links.frame_columns import HandOutRow, PlainOperation, hand_outs_of
from broker_svc.links.link_listener import LinkListener
from broker_svc.links.link_state import Assigned, Holding, LinkState
from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from broker_svc.links.unanswered_operations import Answer, LongOperation, UnansweredOperations
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2, partition_pb2, storage_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    DataCorrupt,
    Fenced,
    LifecycleUnavailable,
    NotOwner,
    PartitionFaulty,
    TidemarkError,
    Unavailable,
)
from tidemark.rpc.callbacks import Done, complete, pass_on
from tidemark.rpc.statuses import from_status
from tidemark.settings import BrokerSettings
from tidemark.telemetry import counter, current_traceparent

_HELD_PER_PAGE: Final = 10_000
_RECONNECT_MS_MIN: Final = 50
CLAIM_MS_MAX: Final = 60_000
"""Storage's own limit for a call. A claim without an answer by then is lost, and made again, as is
the report that follows it: a node may hang in such a way that its connections live."""
_FAULTY: Final = (DataCorrupt, PartitionFaulty)

T = TypeVar("T")

_log = logging.getLogger(__name__)
_reconnects = counter("tidemark.broker.link_reconnects", description="Claims after a link was lost")


def refusal_of(result: exchange_pb2.OperationResult) -> str:
    """The reason for which storage refused an operation; empty if it did it."""
    return from_status(result.error).reason if result.HasField("error") else ""


def _is_of_fenced_broker(result: exchange_pb2.OperationResult) -> bool:
    """Whether it was refused because another broker holds the partition: nothing was done.

    The end of the part follows, and with it the caller gets NOT_OWNER. A client that does not own
    its queue is fenced as well, and must get that as it is.
    """
    error = from_status(result.error)
    return isinstance(error, Fenced) and "owner" in error.metadata


class PartitionLink:
    """One partition as this broker sees it. `run` follows its assignment until cancelled."""

    def __init__(
        self,
        partition: int,
        settings: BrokerSettings,
        incarnation: int,
        nodes: StorageNodes,
        clock: Clock,
        state_changed: Callable[[], None],
        outdated: "Callable[[PartitionLink, int], None]" = lambda _link, _version: None,
        asked_elsewhere: Callable[[str], None] = lambda _address: None,
    ) -> None:
        """`outdated` is called with a version of the assignment that storage knows: a newer one is
        needed. `asked_elsewhere` is called with the address of a holder that a client is sent to.
        """
        self.partition = partition
        self.connected = asyncio.Event()
        self._is_connected = False
        """The same, for what is asked with every frame and operation."""
        self._holding = Holding(settings.broker_id)
        self._reassigned = asyncio.Event()
        self._detail = "not assigned yet"
        self._state_changed = state_changed
        self._outdated = outdated
        self._asked_elsewhere = asked_elsewhere
        self.address = settings.listen
        """The address of this broker, as storage and other brokers get it."""
        self._settings = settings
        self._incarnation = incarnation
        self._nodes = nodes
        self.node: StorageNode | None = nodes.located(partition)
        """The node that the partition was last found at."""
        self.is_unreachable = False
        """Whether the last claim did not reach the node: it may be gone for long."""
        self._clock = clock
        self._listener: LinkListener | None = None
        self._away = asyncio.Event()
        self._away.set()
        self._health = partition_pb2.PartitionHealth()
        self.serving = False
        """Whether the partition takes its share of requests (L4)."""
        self.unanswered = UnansweredOperations(partition)
        self._held_epoch = 0
        self._ended: asyncio.Future[None] | None = None
        """The end of the part that is bound, which is always an error."""

    def listen(self, listener: LinkListener) -> None:
        self._listener = listener

    def follow(self, assigned: Assigned) -> None:
        """An assignment names the broker that is to hold the partition."""
        known, was = self._holding.assigned, self._holding.state
        self._holding.follow(assigned)
        if self._holding.assigned == known:
            return
        self._reassigned.set()
        if self.state in (LinkState.AWAY, LinkState.LEAVING):
            self._detail = f"assigned to {assigned.broker_id or 'no broker'} {assigned.address}"
        elif self.state is not was:
            self._detail = "" if self.connected.is_set() else "being claimed"
        self._entered()

    def look_again(self) -> None:
        """Storage nodes have changed: a link that is down does not wait to look for its node."""
        if not self.connected.is_set():
            self._reassigned.set()

    @property
    def state(self) -> LinkState:
        return self._holding.state

    @property
    def is_assigned(self) -> bool:
        """Whether this broker is to hold it, as far as storage has not refused that."""
        return self._holding.may_claim

    @property
    def assigned(self) -> Assigned:
        return self._holding.assigned

    @property
    def was_held(self) -> bool:
        """Whether this broker has ever held the partition."""
        return self._held_epoch > 0

    async def until_away(self) -> None:
        """Return once this broker neither holds nor claims the partition."""
        await self._away.wait()

    @property
    def holder_address(self) -> str:
        """The address of the other broker that holds it; "" if none is known, or this one does."""
        return self._holding.holder_address

    @property
    def detail(self) -> str:
        """Why the link is not up; "" while it is."""
        return self._detail

    @property
    def waiting(self) -> int:
        """Operations that are not answered yet."""
        return len(self.unanswered)

    @property
    def witnessed_commit(self) -> int:
        """The highest that storage has answered."""
        return self.unanswered.witnessed_commit

    # --- asking --------------------------------------------------------------------------------

    def send(self, operation: exchange_pb2.Operation) -> Answer:
        """Queue one operation; its answer may hold an error. Never blocks, never raises."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self.ask(operation, partial(complete, answer))
        return answer

    def ask(
        self, operation: exchange_pb2.Operation, done: Done[exchange_pb2.OperationResult]
    ) -> None:
        """Queue one operation; `done` is called once, at once while the link is down.

        For what there is much of: results are passed on as they are read from the frame, in their
        order, without a future and a turn of the event loop for each.
        """
        if not self._is_connected:
            done(self.refusal())
            return
        if not operation.traceparent and (caller := current_traceparent()):
            operation.traceparent = caller
        self.unanswered.put(LongOperation(operation, done))

    def ask_plain(self, operation: PlainOperation) -> None:
        """The same for an operation that may travel in columns, and gets its answer itself. It is
        not traced."""
        if not self._is_connected:
            operation(self.refusal())
            return
        self.unanswered.put(operation)

    async def call(self, operation: exchange_pb2.Operation) -> exchange_pb2.OperationResult:
        """Send one operation; raises what storage answered, or UNAVAILABLE."""
        result = await self.send(operation)
        if result.HasField("error"):
            raise from_status(result.error)
        return result

    def refusal(self) -> TidemarkError:
        """Why nothing can be asked of the partition now."""
        number = str(self.partition)
        if self.holder_address:
            self._asked_elsewhere(self.holder_address)
            return NotOwner(
                f"another broker owns partition {number}",
                partition=number,
                owner=self.holder_address,
            )
        if self.state is LinkState.AWAY:
            detail = f"partition {number} has no broker now"
        else:
            detail = f"the link to partition {number} is broken"
        # A partition that moves is served again within milliseconds, as a rule.
        return Unavailable(detail, retry_after_ms=_RECONNECT_MS_MIN, partition=number)

    async def finish(self, timeout_ms: int) -> None:
        """Return once everything that was asked is answered, or the time is over."""
        with suppress(TimeoutError):
            await self._clock.wait_for(self.unanswered.until_none(), timeout_ms)

    def check_serving(self) -> None:
        """Raise for a partition that takes no publishes.

        Storage refuses them as well, but then the link has to claim once the partition serves: runs
        behind those that were refused may be on their way.
        """
        if not self._is_connected:
            raise self.refusal()
        if self._health.state == topic_pb2.PARTITION_STATE_STARTING:
            raise LifecycleUnavailable(
                f"partition {self.partition} waits for its first sweep",
                partition=str(self.partition),
            )
        if self._health.state == topic_pb2.PARTITION_STATE_FAULTY:
            reasons = ",".join(fault.reason for fault in self._health.faults)
            raise PartitionFaulty(
                f"partition {self.partition} does not serve: {reasons}",
                partition=str(self.partition),
                reasons=reasons,
            )

    # --- staying connected ---------------------------------------------------------------------

    async def run(self) -> None:
        """Claim while the partition is assigned here, exchange, and again after every fault.

        A fenced exchange or report does not prove that another broker holds the partition: a claim
        of this broker whose answer was lost may have come after the one that it goes by. So the
        partition is claimed once more, unless it is assigned to another broker by now.
        """
        wait_ms = _RECONNECT_MS_MIN
        while True:
            self._reassigned.clear()
            if not self._holding.may_claim:
                await self._reassigned.wait()
                wait_ms = _RECONNECT_MS_MIN
                continue
            claimed = False
            try:
                node = self.node = await self._nodes.locate(self.partition)
                epoch = await self._claim(node, self._holding.assigned.version)
                claimed = True
                wait_ms = _RECONNECT_MS_MIN
                await self._exchange(node, epoch)
            except TidemarkError as error:
                self._lost(error, claimed=claimed)
            finally:
                self._drop_callers()
            self._entered()
            if self._holding.may_claim:
                _reconnects.add(1)
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._reassigned.wait(), wait_ms)
                wait_ms = min(2 * wait_ms, self._nodes.look_again_ms_max)

    def _lost(self, error: TidemarkError, *, claimed: bool) -> None:
        _log.info("link lost", extra={"partition": self.partition, "reason": error.reason})
        self._nodes.lost(self.partition, error)
        known = self.node is not None or self._nodes.is_any_away
        self.is_unreachable = not claimed and known and isinstance(error, Unavailable)
        self._holding.lost(faulty=isinstance(error, _FAULTY))
        self._detail = f"{error.reason}: {error.detail}"

    def _entered(self) -> None:
        """The state may have changed: if the partition has left, have its deliveries dropped."""
        if self.state is not LinkState.AWAY:
            self._away.clear()
        elif not self._away.is_set():
            self._away.set()
            if self._listener is not None:
                self._listener.partition_left(self.partition)
        self._state_changed()

    async def _claim(self, node: StorageNode, version: int) -> int:
        claim = storage_pb2.ClaimPartitionRequest(
            partition=self.partition,
            cluster_id=self._settings.cluster_id,
            broker_id=self._settings.broker_id,
            incarnation=self._incarnation,
            broker_address=self.address,
            assignment_version=version,
            held_epoch=self._held_epoch,
            client_timeout_ms=self._settings.client_timeout_ms,
            partitions=self._settings.partitions,
            witnessed_commit=self.witnessed_commit,
        )
        try:
            claimed = await self._answer(node, "a claim", node.storage.ClaimPartition(claim))
        except Fenced as error:
            _log.warning("fenced: %s", error, extra={"partition": self.partition})
            self._holding.refused(version, error.metadata.get("owner", ""))
            # Under the same version, the registry has lost one, and has given it twice.
            held_version = int(error.metadata.get("assignment_version", "0"))
            self._outdated(self, max(held_version, version + (held_version == version)))
            raise
        self._held_epoch = claimed.broker_epoch
        self.unanswered.saw_commit(claimed.commit)
        if claimed.lost_commits and self._listener is not None:
            self._listener.commits_lost(self.partition)
        if claimed.report_required:
            reporting = node.storage.ReportHeldReservations(self._report(claimed.broker_epoch))
            reported = await self._answer(node, "a report of held reservations", reporting)
            if self._listener is not None:
                self._listener.expired(self.partition, reported.gone_reservation_ids)
        return claimed.broker_epoch

    async def _answer(self, node: StorageNode, call_name: str, calling: Awaitable[T]) -> T:
        """The answer of a storage node, which must come within `CLAIM_MS_MAX`."""
        try:
            return await self._clock.wait_for(calling, CLAIM_MS_MAX)
        except TimeoutError:
            detail = f"{node.address} did not answer {call_name} in {CLAIM_MS_MAX} ms"
            raise Unavailable(detail, partition=str(self.partition)) from None

    def _report(self, broker_epoch: int) -> Iterator[storage_pb2.ReportHeldReservationsRequest]:
        """Reservations that this broker holds, in pages; the first names partition and epoch."""
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

    def before_frame_sent(self, leaving: Collection[int]) -> None:
        if self._listener is not None:
            self._listener.before_frame_sent(leaving)

    def take(self, frame: exchange_pb2.PartitionResponse) -> None:
        """Raises Unavailable if storage has reopened the partition."""
        unanswered = self.unanswered
        unanswered.saw_commit(frame.commit)
        for result in frame.results:
            request_id = result.request_id
            if not request_id:  # of standing reserves
                self._handed_out(result)
            elif not result.HasField("error") or not _is_of_fenced_broker(result):
                unanswered.take(request_id, result)
        unanswered.results_taken()
        if frame.HasField("health"):
            self._take_health(frame.health)
        elif not self._is_connected:
            return  # the bind is refused
        listener = self._listener
        if listener is None:
            return
        if frame.expired_reservation_ids:
            # Behind the results of this frame, some of which are seen in the next turn.
            asyncio.get_running_loop().call_soon(
                listener.expired, self.partition, frame.expired_reservation_ids
            )
        for event in frame.ready:
            listener.queue_ready(self.partition, event.lmq_name, event.group)
        if frame.HasField("next_deadline"):
            deadline = frame.next_deadline
            in_ms = deadline.in_ms if deadline.HasField("in_ms") else None
            listener.next_deadline(self.partition, in_ms)

    def handed_out_many(self, hand_outs: Sequence[HandOutRow]) -> None:
        if self._listener is not None:
            self._listener.handed_out_many(hand_outs)

    def _take_health(self, health: partition_pb2.PartitionHealth) -> None:
        was_serving, openings = self.serving, self._health.openings
        self._health = health
        if self.connected.is_set() and openings != health.openings:
            # The outcome of its last commit is unknown: reservations may have expired, or been made
            # without an answer. Only a report after a new claim reveals them.
            raise Unavailable(
                f"storage has reopened partition {self.partition}", partition=str(self.partition)
            )
        self.serving = health.state == topic_pb2.PARTITION_STATE_SERVING
        if not self._is_connected:
            self._is_connected = True
            self.connected.set()
            self.is_unreachable = False
            self._holding.claimed()
            self._detail = ""
            self._entered()
            _log.info("link up", extra={"partition": self.partition})
        if self._listener is not None and self.serving and not was_serving:
            self._listener.link_up(self.partition)

    def frame_taken(self) -> None:
        if self._listener is not None:
            self._listener.frame_taken()

    def _handed_out(self, result: exchange_pb2.OperationResult) -> None:
        """In order with the results of reserves."""
        if self._listener is None:
            return
        try:
            if result.HasField("hand_outs"):
                self._listener.handed_out_many(hand_outs_of(self.partition, result.hand_outs))
            else:
                self._listener.handed_out(self.partition, result.reserve)
        except Exception:  # as `pass_on` does
            _log.exception("a result was not taken")

    def _drop_callers(self) -> None:
        was_connected, self._is_connected, self.serving = self._is_connected, False, False
        self.connected.clear()
        dropped = self.unanswered.drop()
        if was_connected and self._listener is not None:
            self._listener.link_down(self.partition)
        for done in dropped:
            pass_on(done, self.refusal())
