"""Frames to the broker: requests that accumulate while one is written, and how many fit the next.

Pure: it sends nothing and waits for nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2 import Acks, Renewal
from tidemark.api.broker.v1.message_pb2 import PublishRun
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionSync

T = TypeVar("T")

FRAME_RUNS: Final = 500
FRAME_BYTES: Final = 1024 * 1024
"""The share of a burst that goes into one frame, far below the limit of the broker: while the
client writes one frame, the broker works on another and storage on a third."""
_PARTS_BYTES: Final = limits.FRAME_BYTES_MAX - 2 * limits.RUN_BYTES_MAX
"""Bytes of a frame besides runs: every frame has room for the runs of at least one lane, which have
`RUN_BYTES_MAX` besides their names."""

_RUN_NUMBERS: Final = 4

PlainRun: TypeAlias = tuple[str, bytes, int, int, int]
"""A run without options: lmq_name, body, count, sequence and partition."""


class _PlainRuns:
    """Runs that travel in columns, in the order of their submission."""

    __slots__ = ("_lmq_names", "_runs", "bodies")

    def __init__(self) -> None:
        self._lmq_names: list[str] = []
        self.bodies: list[bytes] = []
        self._runs: list[int] = []
        """Their numbers, as a `RunArray` has them."""

    def add(self, first_id: int, runs: Sequence[PlainRun]) -> None:
        """Add runs, whose request ids begin with `first_id`."""
        for request_id, (lmq_name, body, count, sequence, partition) in enumerate(runs, first_id):
            self._lmq_names.append(lmq_name)
            self.bodies.append(body)
            self._runs += (request_id, count, sequence, partition)

    def move_to(self, frame: broker_pb2.SessionRequest, runs: int, room_bytes: int) -> None:
        """Move as many as fit a frame that has so many runs; at least one if it has none."""
        fit = 0
        for body in self.bodies:
            room_bytes -= len(body)
            if runs + fit == FRAME_RUNS or (room_bytes < 0 and runs + fit):
                whole = _whole_lanes(self.lane, map(len, self.bodies), fit)
                fit = whole if whole <= fit or not runs else 0
                break
            fit += 1
        if fit:
            frame.run_arrays.add(
                lmq_names=self._lmq_names[:fit],
                bodies=self.bodies[:fit],
                runs=self._runs[: fit * _RUN_NUMBERS],
            )
            del self._lmq_names[:fit], self.bodies[:fit], self._runs[: fit * _RUN_NUMBERS]

    def lane(self, at: int) -> object:
        return self._lmq_names[at], self._runs[at * _RUN_NUMBERS + _RUN_NUMBERS - 1]


class Outgoing:
    """Everything that waits to be sent: runs in the order of their submission, and other parts.

    Runs of one lane are either all plain or none is: the two kinds do not wait for each other. A
    lane has no more runs than one frame takes, and they are in one: if the broker refused the first
    of them and took a later one from another frame, the repeat would come behind it.
    """

    __slots__ = ("parts", "plain_runs", "runs")

    def __init__(self) -> None:
        self.parts = broker_pb2.SessionRequest()
        """Everything but runs."""
        self.runs: deque[PublishRun] = deque()
        self.plain_runs = _PlainRuns()

    def next_frame(self) -> broker_pb2.SessionRequest:
        """Everything that has accumulated, as far as it fits a frame; the rest stays."""
        frame, self.parts = self.parts, broker_pb2.SessionRequest()
        frame_bytes = frame.ByteSize()
        if frame_bytes > limits.SMALL_FRAME_BYTES:
            self._cut(frame)
            frame_bytes = frame.ByteSize()
        room_bytes = min(FRAME_BYTES, limits.FRAME_BYTES_MAX - frame_bytes)
        runs, taken = self.runs, 0
        for run in runs:
            room_bytes -= run.batch.ByteSize()
            if taken == FRAME_RUNS or (taken and room_bytes < 0):
                sizes = (each.batch.ByteSize() for each in runs)
                taken = _whole_lanes(lambda at: _lane(runs[at]), sizes, taken)
                break
            taken += 1
        frame.runs.extend(runs.popleft() for _ in range(taken))
        if self.plain_runs.bodies:
            self.plain_runs.move_to(frame, taken, room_bytes)
        return frame

    def _cut(self, frame: broker_pb2.SessionRequest) -> None:
        """Leave as many parts in a frame as it may carry, and keep the others for the next."""
        rest = self.parts
        _move(frame.open_publishers, rest.open_publishers, limits.FRAME_PARTS_MAX)
        _move(frame.destroy_publishers, rest.destroy_publishers, limits.FRAME_PARTS_MAX)
        _move(frame.syncs, rest.syncs, _syncs_that_fit(frame.syncs))
        _move(frame.credits, rest.credits, limits.FRAME_PARTS_MAX)
        _move(frame.renewals, rest.renewals, _renewals_that_fit(frame.renewals))
        _move(frame.acks, rest.acks, _acks_that_fit(frame.acks))
        settlements = limits.SETTLEMENTS_PER_FRAME_MAX
        _move(frame.settlements, rest.settlements, settlements)
        while frame.ByteSize() > _PARTS_BYTES and settlements > 1:
            settlements //= 2
            kept = list(rest.settlements)
            del rest.settlements[:]
            _move(frame.settlements, rest.settlements, settlements)
            rest.settlements.extend(kept)

    @property
    def has_rest(self) -> bool:
        """Whether something is left for another frame."""
        return bool(self.runs or self.plain_runs.bodies or self.parts.ListFields())


def _lane(run: PublishRun) -> object:
    return run.lmq_name, run.partition, run.fairness_key


def _whole_lanes(lane: Callable[[int], object], sizes: Iterable[int], fit: int) -> int:
    """How many of more than `fit` runs go into a frame that so many fit, so that it cuts no lane in
    two: the last lane waits, or goes as a whole if it is the only one. Gets the lane of each run by
    its place.
    """
    end = fit
    while end and lane(end) == lane(end - 1):
        end -= 1
    if end:
        return end
    room_bytes = limits.RUN_BYTES_MAX
    for size in islice(sizes, FRAME_RUNS):
        room_bytes -= size
        if end >= fit and (room_bytes < 0 or lane(end) != lane(0)):
            break
        end += 1
    return end


def _move(parts: "MutableSequence[T]", rest: "MutableSequence[T]", fit: int) -> None:
    """Keep as many parts as fit, and move the others to `rest`."""
    if len(parts) > fit:
        rest.extend(parts[fit:])
        del parts[fit:]


def _syncs_that_fit(syncs: Sequence[SubscriptionSync]) -> int:
    """How many syncs a frame may carry, by the subscriptions they name; at least one."""
    entries = 0
    for number, sync in enumerate(syncs):
        entries += len(sync.entries)
        if number and entries > limits.FRAME_ENTRIES_MAX:
            return number
    return limits.FRAME_PARTS_MAX


def _renewals_that_fit(renewals: Sequence[Renewal]) -> int:
    """How many of them a frame may carry, by the reservations that they name; at least one."""
    named = 0
    for number, renewal in enumerate(renewals):
        named += len(renewal.delivery_tags) + len(renewal.receipts)
        if number and named > limits.RENEWALS_PER_FRAME_MAX:
            return number
    return limits.FRAME_PARTS_MAX


def _acks_that_fit(acks: Sequence[Acks]) -> int:
    """How many of them a frame may carry, by the deliveries that they name; at least one."""
    named = 0
    for number, each in enumerate(acks):
        named += len(each.delivery_tags)
        if number and named > limits.SETTLEMENTS_PER_FRAME_MAX:
            return number
    return limits.FRAME_PARTS_MAX
