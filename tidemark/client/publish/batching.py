"""Batching: calls of `publish` become runs. Pure: it sends nothing and waits for nothing.

A lane is one fairness key of one queue in one partition, the scope in which order is kept. Calls
that arrive while the last runs of a lane are in flight wait in it; then consecutive calls that
differ only in their messages become one run. From then on the run is immutable, and keeps its
sequence until it has a definite result (S11).
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch, PublishRun
from tidemark.bodies import body_of
from tidemark.errors import TidemarkError

# Upper bound of the bytes of a message on the wire besides its payload and headers.
MESSAGE_OVERHEAD_BYTES: Final = 16
_HEADER_OVERHEAD_BYTES: Final = 16

_IS_PLAIN: Final = attrgetter("is_plain")


class RunOptions(NamedTuple):
    """The options that all messages of a run share, besides queue and fairness key."""

    delay_ms: int = 0
    ttl_ms: int = 0
    traceparent: str = ""
    sequence: int = 0
    """Chosen by the user; 0 lets the publish buffer assign one."""
    alone: bool = False
    """Whether the call is a separate run."""


class Done(Protocol):
    """The part of a future that batching needs: whether its caller still waits."""

    def done(self) -> bool: ...


D = TypeVar("D", bound=Done)


class Call(Generic[D]):
    """One call of `publish` or `publish_many`, until it has a result."""

    __slots__ = ("answer", "batch", "begun_ms", "count", "headers", "options", "payload", "size")

    def __init__(
        self,
        answer: D,
        options: RunOptions,
        begun_ms: int,
        payload: bytes = b"",
        headers: Mapping[str, str] | None = None,
        batch: MessageBatch | None = None,
    ) -> None:
        self.answer = answer
        self.options = options
        self.begun_ms = begun_ms
        self.payload = payload
        self.headers = headers
        self.batch = batch
        if batch is None:
            self.count = 1
            self.size = len(payload) + MESSAGE_OVERHEAD_BYTES
            if headers:
                self.size += sum(
                    4 * (len(key) + len(value)) + _HEADER_OVERHEAD_BYTES
                    for key, value in headers.items()
                )
        else:
            self.count = len(batch.messages)
            self.size = batch.ByteSize()

    def body(self) -> bytes:
        """Its messages as they are sent. Bodies of several calls are joined to one."""
        if self.batch is not None:
            return self.batch.SerializeToString(deterministic=True)
        if not self.headers:
            return body_of((self.payload,))
        message = Message(payload=self.payload, headers=self.headers)
        return MessageBatch(messages=(message,)).SerializeToString(deterministic=True)


class Run(Generic[D]):
    """Calls that are stored together or not at all."""

    __slots__ = ("body", "calls", "count", "is_plain", "options", "proto", "sequence", "size")

    def __init__(self, calls: list[Call[D]]) -> None:
        """Raises whatever the encoder raises."""
        self.calls = calls
        self.proto: PublishRun | None = None
        """Its long form, if it needs one."""
        self.options = options = calls[0].options
        self.sequence = options.sequence
        """0 until it has one."""
        self.is_plain = not (options.delay_ms or options.ttl_ms or options.traceparent)
        """Whether it has nothing but messages and a sequence, so that it can travel in columns.

        One that has travelled in its long form keeps it: a repeat must be the same to the byte.
        """
        if len(calls) == 1:
            (call,) = calls
            self.body, self.count, self.size = call.body(), call.count, call.size
        else:
            self.body = b"".join([call.body() for call in calls])
            self.count = sum(call.count for call in calls)
            self.size = sum(call.size for call in calls)


class Lane(Generic[D]):
    """One fairness key of one queue in one partition."""

    __slots__ = (
        "fairness_key",
        "last_stored",
        "lmq_name",
        "partition",
        "refused",
        "runs",
        "unanswered",
        "waiting",
    )

    def __init__(self, lmq_name: str, partition: int, fairness_key: str) -> None:
        self.lmq_name = lmq_name
        self.partition = partition
        self.fairness_key = fairness_key
        self.waiting: list[Call[D]] = []
        self.runs: list[Run[D]] = []
        """Runs without a definite result, in order. Waiting calls never overtake them."""
        self.unanswered = 0
        """How many of the runs are on the wire now."""
        self.refused: list[tuple[Run[D], TidemarkError]] = []
        """Those of the runs that were refused as a whole, until the others have results."""
        self.last_stored = 0
        """The highest sequence that was stored while others of `runs` had no result."""

    @property
    def is_plain(self) -> bool:
        """Whether all of its runs can travel in columns, which keep their order."""
        return not self.fairness_key and all(map(_IS_PLAIN, self.runs))

    def build_runs(
        self, room_bytes: int, runs_max: int, refuse: Callable[[Call[D], Exception], None]
    ) -> list[Run[D]]:
        """The next runs, as many as fit; at least one if any call waits.

        A call that cannot be encoded is refused with the reason; no other call fails with it.
        """
        assert not self.runs, "a lane builds new runs once its last ones have results"
        waiting, taken = self.waiting, 0
        try:
            while taken < len(waiting) and len(self.runs) < runs_max:
                if waiting[taken].answer.done():  # its caller was cancelled
                    taken += 1
                    continue
                if self.runs and waiting[taken].size > room_bytes:
                    break
                calls, taken = self._next_calls(taken, room_bytes)
                try:
                    run = Run(calls)
                    if not run.is_plain:
                        run.proto = self._proto_of(run)
                except Exception as error:  # whatever the encoder raises
                    if len(calls) == 1:
                        refuse(calls[0], error)
                    else:
                        del waiting[:taken]
                        taken = 0
                        self._put_back(calls)
                    continue
                room_bytes -= run.size
                self.runs.append(run)
        finally:
            del waiting[:taken]
        return self.runs

    def split_refused(self, fail: Callable[[list[Call[D]], TidemarkError], None]) -> None:
        """Whole runs were refused: each of their calls becomes a separate run. They fail if a later
        run is stored, or may be: it has overtaken them."""
        refused, self.refused = self.refused, []
        for run, error in reversed(refused):
            if run not in self.runs:  # it was given up
                continue
            overtaken = self.last_stored > run.sequence or self.runs[-1] is not run
            self.runs.remove(run)
            if overtaken:
                fail(run.calls, error)
            else:
                self._put_back(run.calls)

    def _put_back(self, calls: list[Call[D]]) -> None:
        """Each of these calls becomes a separate run."""
        for call in calls:
            call.options = call.options._replace(alone=True)
        self.waiting[:0] = calls

    def _next_calls(self, at: int, room_bytes: int) -> tuple[list[Call[D]], int]:
        """Consecutive calls from `at` on that become one run, and where the next one begins."""
        waiting = self.waiting
        first = waiting[at]
        calls, options, count, size = [first], first.options, first.count, first.size
        room_bytes = min(room_bytes, limits.RUN_BYTES_MAX)
        at += 1
        while at < len(waiting) and not options.alone:
            following = waiting[at]
            if following.answer.done():  # its caller was cancelled
                at += 1
                continue
            count += following.count
            size += following.size
            too_much = count > limits.RUN_MESSAGES_MAX or size > room_bytes
            if too_much or following.options != options:
                break
            calls.append(following)
            at += 1
        return calls, at

    def long_form(self, run: Run[D]) -> PublishRun:
        """A run as it is sent alone."""
        if run.proto is None:
            run.proto = self._proto_of(run)
            run.is_plain = False
        run.proto.sequence = run.sequence
        return run.proto

    def _proto_of(self, run: Run[D]) -> PublishRun:
        options = run.options
        proto = PublishRun(
            lmq_name=self.lmq_name,
            fairness_key=self.fairness_key,
            delay_ms=options.delay_ms,
            ttl_ms=options.ttl_ms,
            traceparent=options.traceparent,
            partition=self.partition,
            count=run.count,
        )
        proto.batch.MergeFromString(run.body)
        return proto


class Sequences:
    """The sequence numbers of a producer's runs in one partition.

    Storage remembers a window of them. A run that may have to be repeated must stay inside it, so
    numbers are assigned only as far as the window reaches beyond the oldest one without a result.
    """

    __slots__ = ("_last", "_unanswered")

    def __init__(self) -> None:
        self._last = 0
        self._unanswered: dict[int, None] = {}

    @property
    def room(self) -> int:
        """How many numbers may be assigned now."""
        oldest = next(iter(self._unanswered), self._last + 1)
        return limits.PRODUCER_SEQUENCES_MAX - (self._last + 1 - oldest)

    def take(self) -> int:
        self._last += 1
        self._unanswered[self._last] = None
        return self._last

    def answered(self, sequence: int) -> None:
        """No run will be repeated under this number again."""
        self._unanswered.pop(sequence, None)
