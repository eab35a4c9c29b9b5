"""The publish buffer: calls and runs that wait, are in flight or are to be repeated.

Bounded in bytes and in time. If the result of a run is lost, the run is repeated unchanged, with
the same sequence, so that it is stored once (S11). Runs of one lane never overtake each other.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import Final, TypeAlias

from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.client.arguments import not_encoded
from tidemark.client.home_loop import HomeLoop
from tidemark.client.publish import batching
from tidemark.client.publish.batching import RunOptions, Sequences
from tidemark.client.publish.forwarding import ForwardedCalls, Publish
from tidemark.client.publish.lane_part import Lane, LanePart, Run, forwarded_call
from tidemark.client.publish.messages import Answer, PublishReceipt
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.codec import Stored
from tidemark.client.transport.connection import Connection, Identity
from tidemark.client.transport.routes import Routes
from tidemark.errors import DeadlineExceeded, NotOwner, TidemarkError
from tidemark.telemetry.traces import tracing_enabled

Call: TypeAlias = batching.Call[Answer]

_TICKS_PER_TIMEOUT: Final = 20

_log = logging.getLogger(__name__)


class _Partition:
    """The state that the runs of one partition share."""

    __slots__ = ("backoff", "parked", "resuming", "sequences")

    def __init__(self, backoff: Backoff) -> None:
        self.sequences = Sequences()
        self.backoff = backoff
        self.parked: deque[Lane] = deque()
        """Lanes that wait for a free sequence, or for the partition to serve again."""
        self.resuming: asyncio.Task[None] | None = None


class _Partitions(dict[int, _Partition]):
    """All partitions that were published to, by their numbers."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def __missing__(self, number: int) -> _Partition:
        part = self[number] = _Partition(Backoff(self._random, min_ms=20, may_move=True))
        return part


class PublishBuffer:
    """Everything that a client publishes."""

    def __init__(
        self,
        routes: Routes,
        identity: Identity,
        publish: Publish,
        *,
        timeout_ms: int,
        buffer_bytes_max: int,
    ) -> None:
        """`publish` is for runs of partitions with a holder that cannot be reached from here."""
        self.error: TidemarkError | None = None
        """Why nothing can be published; None while it can."""
        self.traced = tracing_enabled()
        """Whether tracing is on; refreshed once per frame."""
        self._loop = asyncio.get_running_loop()
        self.home_loop = HomeLoop()
        self._routes = routes
        self._clock = identity.clock
        self._timeout_ms = timeout_ms
        self._bytes_max = buffer_bytes_max
        self._bytes = 0
        self._room = asyncio.Event()
        self._lanes: dict[tuple[str, int, str], Lane] = {}
        """Lanes with calls or runs in them."""
        self._partitions = _Partitions(identity.random)
        self._lane_parts: dict[Connection, LanePart] = {}
        self._forwarded = ForwardedCalls(publish, identity.clock)
        self._ticking: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def lane_part(self, connection: Connection) -> LanePart:
        """The part of a connection that carries runs."""
        part = self._lane_parts.get(connection)
        if part is None:
            part = self._lane_parts[connection] = LanePart(self, connection)
        return part

    # --- calls ---------------------------------------------------------------------------------

    def begin(
        self,
        lmq_name: str,
        partition: int,
        fairness_key: str,
        options: RunOptions,
        payload: bytes = b"",
        headers: Mapping[str, str] | None = None,
        batch: MessageBatch | None = None,
    ) -> Call:
        """Store a call's messages as part of a run; its answer raises if they may not be stored.

        There must be room, see `is_full`, and the call counts until `end`. Not a coroutine of its
        own: there may be one for each of very many queues.
        """
        if self.error is not None:
            raise self.error
        answer: Answer = self._loop.create_future()
        call = batching.Call(answer, options, self._clock.monotonic_ms(), payload, headers, batch)
        self._add(call, lmq_name, partition, fairness_key)
        self._bytes += call.size
        return call

    def end(self, call: Call) -> None:
        """A call has its result, or its caller was cancelled."""
        self._bytes -= call.size
        if self._bytes < self._bytes_max:
            self._room.set()

    @property
    def is_full(self) -> bool:
        """Whether a new call has to wait until there is room."""
        return self._bytes >= self._bytes_max

    def serves(self, partition: int) -> bool:
        """Whether the partition accepted the last runs that were sent to it."""
        known = self._partitions.get(partition)
        return known is None or known.resuming is None

    async def flush(self) -> None:
        """Return once every call has its result."""
        await self._empty.wait()

    def close(self, error: TidemarkError) -> None:
        """Stop sending; every waiting call fails."""
        self.error = self.error or error
        for lane in list(self._lanes.values()):
            for run in lane.runs:
                self._fail(run.calls, self._unknown(lane, str(error.detail)))
            self._fail(lane.waiting, error)
            lane.runs.clear()
            lane.waiting.clear()
        self._lanes.clear()
        self._empty.set()
        self._room.set()
        for part in self._partitions.values():
            if part.resuming is not None:
                part.resuming.cancel()
        if self._ticking is not None:
            self._ticking.cancel()
        self._forwarded.close()

    def _add(self, call: Call, lmq_name: str, partition: int, fairness_key: str) -> None:
        key = (lmq_name, partition, fairness_key)
        lane = self._lanes.get(key)
        if lane is not None:
            lane.waiting.append(call)
            return
        lane = self._lanes[key] = batching.Lane(lmq_name, partition, fairness_key)
        lane.waiting.append(call)
        self._empty.clear()
        self.ready(lane)
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def until_room(self) -> None:
        """Return once a call may begin; raises after the timeout."""
        deadline_ms = self._clock.monotonic_ms() + self._timeout_ms
        while self._bytes >= self._bytes_max and self.error is None:
            self._room.clear()
            left_ms = deadline_ms - self._clock.monotonic_ms()
            try:
                await self._clock.wait_for(self._room.wait(), left_ms)
            except TimeoutError:
                raise self._not_sent("earlier publishes have no result yet") from None

    # --- lanes ---------------------------------------------------------------------------------

    def ready(self, lane: Lane) -> None:
        """Queue a lane for the next frame, or until its partition serves again."""
        part = self._partitions[lane.partition]
        if part.resuming is not None:
            part.parked.append(lane)
            return
        connection = self._routes.to_partition(lane.partition)
        if connection.is_unreachable:
            if self._forwarded.knows_holder(lane.partition):
                self._forwarded.make(forwarded_call(self, lane))
                return
            connection = self._routes.home
        self.lane_part(connection).add(lane)

    def rerouted(self, lane_part: LanePart) -> None:
        """A connection is lost: its lanes go to the connections that serve their partitions now."""
        self._routes.lost(lane_part.connection)
        self.unreachable(lane_part)

    def unreachable(self, lane_part: LanePart) -> None:
        """The broker cannot be reached: home forwards the runs of its lanes."""
        lanes, lane_part.lanes = lane_part.lanes, deque()
        for lane in lanes:
            self.ready(lane)

    def moved(self, lane_part: LanePart, partition: int, holder: str) -> None:
        """A broker named the holder of a partition: runs that it did not get go there at once."""
        route = self._routes.to_partition(partition)
        stale = route is not lane_part.connection and route.session is not None
        if stale or not holder or route.address == holder:
            return  # the connected broker serves it
        if not any(lane.partition == partition for lane in self._lanes.values()):
            self._routes.follow(partition, "")  # connected to the holder once it is needed
            return
        self._routes.follow(partition, holder)
        waiting = self.lane_part(route)
        moving = [lane for lane in waiting.lanes if lane.partition == partition]
        waiting.lanes = deque(lane for lane in waiting.lanes if lane.partition != partition)
        for lane in moving:
            self.ready(lane)

    def failed(self, lane_part: LanePart, error: TidemarkError) -> None:
        """A connection is closed for good; without the home connection nothing can be published."""
        self._lane_parts.pop(lane_part.connection, None)
        if lane_part.connection is self._routes.home:
            self.close(error)
        else:
            self.rerouted(lane_part)

    def next_runs(self, lane: Lane, room_bytes: int, runs_max: int) -> Sequence[Run]:
        """The runs of a lane that are sent now, repeated ones before new ones.

        None if it has nothing to send, or waits for a free sequence.
        """
        if not lane.runs:
            part = self._partitions[lane.partition]
            runs_max = min(runs_max, part.sequences.room)
            if runs_max <= 0 and lane.waiting:
                part.parked.append(lane)
                return ()
            for run in lane.build_runs(room_bytes, runs_max, self._refuse):
                if not run.sequence:
                    run.sequence = part.sequences.take()
            if not lane.runs:
                self._drop(lane)
        lane.unanswered += len(lane.runs)
        return lane.runs

    def stored(
        self,
        lane: Lane,
        run: Run,
        stored: Stored,
        *,
        forwarded: bool = False,
        schedule_id: int = 0,
        duplicate: bool = False,
    ) -> None:
        """A run is on disk."""
        part = self._partitions[lane.partition]
        if run in lane.runs:  # else it is repeated
            lane.runs.remove(run)
            if lane.runs and not schedule_id:
                lane.last_stored = max(lane.last_stored, run.sequence)
            part.sequences.answered(run.sequence)
            part.backoff.reset()
            if not forwarded and self._routes.forwards(lane.partition):
                self._routes.follow(lane.partition, "")  # home holds it by now
            queue_id, offset, publisher_id = stored
            for call in run.calls:
                if not call.answer.done():
                    receipt = PublishReceipt(
                        lane.lmq_name,
                        lane.partition,
                        queue_id,
                        offset,
                        call.count,
                        schedule_id,
                        duplicate,
                        publisher_id,
                    )
                    call.answer.set_result(receipt)
                if not schedule_id:
                    offset += call.count
        self._answered_one(lane, part)

    def refused(self, lane: Lane, run: Run, error: TidemarkError, *, answered: bool) -> None:
        """A run is not stored; without an answer that is not known, and it is repeated."""
        part = self._partitions[lane.partition]
        if answered and run in lane.runs:
            self._refused(lane, run, part, error)
        self._answered_one(lane, part)

    def _answered_one(self, lane: Lane, part: _Partition) -> None:
        lane.unanswered -= 1
        if not lane.unanswered:
            if lane.refused:
                lane.split_refused(self._fail)
            if lane.waiting or lane.runs:
                self.ready(lane)
            else:
                self._drop(lane)
        if part.parked:
            self._unpark(part)

    def _unpark(self, part: _Partition) -> None:
        """Resume as many parked lanes as there are free sequences."""
        if part.resuming is None:
            for _ in range(min(len(part.parked), part.sequences.room)):
                self.ready(part.parked.popleft())

    def _refused(self, lane: Lane, run: Run, part: _Partition, error: TidemarkError) -> None:
        if is_transient(error):
            if isinstance(error, NotOwner):
                self._routes.follow(lane.partition, error.metadata.get("owner", ""))
            if part.resuming is None:
                wait_ms = part.backoff.next_ms(error.retry_after_ms or 0)
                part.resuming = asyncio.create_task(self._resume(part, wait_ms))
            return
        part.sequences.answered(run.sequence)
        if len(run.calls) > 1:
            lane.refused.append((run, error))  # no call fails because of another one
            return
        lane.runs.remove(run)
        self._fail(run.calls, error)

    async def _resume(self, part: _Partition, wait_ms: int) -> None:
        await self._clock.sleep_ms(wait_ms)
        part.resuming = None
        parked, part.parked = part.parked, deque()
        for lane in parked:
            self.ready(lane)

    def _drop(self, lane: Lane) -> None:
        self._lanes.pop((lane.lmq_name, lane.partition, lane.fairness_key), None)
        if not self._lanes:
            self._empty.set()

    # --- time ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Fail calls that have waited too long; runs while any call waits."""
        while self._lanes:
            await self._clock.sleep_ms(max(1, self._timeout_ms // _TICKS_PER_TIMEOUT))
            too_old_ms = self._clock.monotonic_ms() - self._timeout_ms
            for lane in list(self._lanes.values()):
                self._expire(lane, too_old_ms)
            for part in self._partitions.values():
                self._unpark(part)
        self._ticking = None

    def _expire(self, lane: Lane, too_old_ms: int) -> None:
        for run in list(lane.runs):
            if run.calls[0].begun_ms <= too_old_ms:
                lane.runs.remove(run)
                self._partitions[lane.partition].sequences.answered(run.sequence)
                self._fail(run.calls, self._unknown(lane, self._why(lane)))
        too_old = list(takewhile(lambda call: call.begun_ms <= too_old_ms, lane.waiting))
        del lane.waiting[: len(too_old)]
        for call in too_old:
            self._fail([call], self._not_sent(self._why(lane)))

    def _why(self, lane: Lane) -> str:
        connection = self._routes.to_partition(lane.partition)
        if connection.session is None:
            return connection.error.detail
        return f"partition {lane.partition} does not respond"

    def _unknown(self, lane: Lane, why: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"sent to {lane.lmq_name}, but no result within {self._timeout_ms} ms ({why}): "
            "the outcome is unknown, it may have been stored",
            outcome="unknown",
        )

    def _not_sent(self, why: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"not sent within {self._timeout_ms} ms ({why}): it was not stored", outcome="not_sent"
        )

    def _refuse(self, call: Call, error: Exception) -> None:
        """A call cannot be encoded although its arguments passed the checks."""
        _log.error("a publish could not be encoded", exc_info=error)
        self._fail([call], not_encoded(error))

    @staticmethod
    def _fail(calls: list[Call], error: TidemarkError) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error)
