"""The part of a connection that carries runs: the lanes with something to send, and their results.

A frame with one run for each of many queues costs one object here, not one for each run: runs that
travel in columns are found by their place in the frame.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from tidemark import limits
from tidemark.api.broker.v1.broker_pb2 import GoAway
from tidemark.api.broker.v1.message_pb2 import PublishResult
from tidemark.client.publish import batching
from tidemark.client.publish.forwarding import ForwardedCall
from tidemark.client.publish.messages import Answer
from tidemark.client.transport.codec import Stored
from tidemark.client.transport.connection import Connection, SessionPart
from tidemark.client.transport.frames import FRAME_RUNS, PlainRun
from tidemark.client.transport.session import Session
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status
from tidemark.telemetry.traces import tracing_enabled

if TYPE_CHECKING:
    from tidemark.client.publish.publish_buffer import PublishBuffer

Run: TypeAlias = batching.Run[Answer]
Lane: TypeAlias = batching.Lane[Answer]

_log = logging.getLogger(__name__)

_FRAME_BYTES = limits.RUN_BYTES_MAX
"""Payload bytes in one frame: larger frames gain nothing, and delay small ones."""


class LanePart(SessionPart):
    """The lanes of one connection."""

    def __init__(self, publish_buffer: "PublishBuffer", connection: Connection) -> None:
        self.connection = connection
        self.lanes: deque[Lane] = deque()
        """Those with something to send. The connection was woken for the first."""
        self._publish_buffer = publish_buffer

    def add(self, lane: Lane) -> None:
        """Send the waiting calls of a lane with the next frame."""
        if not self.lanes:
            self.connection.wake()
        self.lanes.append(lane)

    def prepare(self, session: Session) -> bool:
        if self.connection.draining:
            return False
        buffer, lanes = self._publish_buffer, self.lanes
        buffer.traced = tracing_enabled()
        room_bytes, runs_left = _FRAME_BYTES, FRAME_RUNS
        plain: list[PlainRun] = []
        sent = _SentRuns(buffer)
        for _ in range(len(lanes)):
            if room_bytes <= 0 or runs_left <= 0:
                break
            lane = lanes.popleft()
            runs = buffer.next_runs(lane, room_bytes, runs_left)
            in_columns = lane.is_plain
            for run in runs:
                room_bytes -= run.size
                if in_columns:
                    plain.append((lane.lmq_name, run.body, run.count, run.sequence, lane.partition))
                    sent.lanes.append(lane)
                    sent.runs.append(run)
                else:
                    session.send_run(lane.long_form(run), SentRun(buffer, lane, run))
            runs_left -= max(1, len(runs))
        if plain:
            sent.first_id = session.send_plain_runs(plain, sent)
        return bool(lanes)

    def connected(self, session: Session) -> None:
        if self.lanes:
            session.wake()

    def disconnected(self, error: TidemarkError) -> None:
        self._publish_buffer.rerouted(self)

    def unreachable(self, error: TidemarkError) -> None:
        self._publish_buffer.unreachable(self)

    def moved(self, go_away: GoAway) -> None:
        if go_away.HasField("partition"):
            self._publish_buffer.moved(self, go_away.partition, go_away.address)

    def failed(self, error: TidemarkError) -> None:
        self._publish_buffer.failed(self, error)


def forwarded_call(publish_buffer: "PublishBuffer", lane: Lane) -> ForwardedCall:
    """A unary call with the next runs of a lane."""
    call = ForwardedCall()
    for run in publish_buffer.next_runs(lane, _FRAME_BYTES, FRAME_RUNS):
        call.send_run(lane.long_form(run), SentRun(publish_buffer, lane, run, forwarded=True))
    return call


class SentRun:
    """Passes the result of one run to the buffer."""

    __slots__ = ("_forwarded", "_lane", "_publish_buffer", "_run")

    def __init__(
        self, publish_buffer: "PublishBuffer", lane: Lane, run: Run, *, forwarded: bool = False
    ) -> None:
        self._publish_buffer = publish_buffer
        self._lane = lane
        self._run = run
        self._forwarded = forwarded

    def __call__(self, result: PublishResult | TidemarkError) -> None:
        """A result, or why there is none."""
        lane, run = self._lane, self._run
        if isinstance(result, TidemarkError):
            self._publish_buffer.refused(lane, run, result, answered=False)
        elif result.HasField("error"):
            self._publish_buffer.refused(lane, run, from_status(result.error), answered=True)
        else:
            receipt = result.receipt
            self._publish_buffer.stored(
                lane,
                run,
                (receipt.queue_id, receipt.first_offset, receipt.publisher_id),
                forwarded=self._forwarded,
                schedule_id=receipt.schedule_id,
                duplicate=receipt.duplicate,
            )


class _SentRuns:
    """Passes the results of runs that went in columns of one frame to the buffer."""

    __slots__ = ("_publish_buffer", "first_id", "lanes", "runs")

    def __init__(self, publish_buffer: "PublishBuffer") -> None:
        self._publish_buffer = publish_buffer
        self.first_id = 0
        """The request id of the first; the others follow without gaps."""
        self.lanes: list[Lane] = []
        self.runs: list[Run] = []
        """The runs, and the lane of each."""

    def stored(self, request_id: int, stored: Stored) -> None:
        index = request_id - self.first_id
        try:
            self._publish_buffer.stored(self.lanes[index], self.runs[index], stored)
        except Exception:  # as `pass_on` does
            _log.exception("a result was not taken")

    def answered(self, request_id: int, result: PublishResult | TidemarkError) -> None:
        index = request_id - self.first_id
        SentRun(self._publish_buffer, self.lanes[index], self.runs[index])(result)
