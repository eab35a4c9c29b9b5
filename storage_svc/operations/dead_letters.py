"""Dead letters: messages that must not be delivered any more (L5, L6).

They go to the dead-letter topic through the outbox, labelled with where they come from and why, or
are deleted where the topic has none. Nothing that a live reservation holds is touched.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from storage_svc.engines import group_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64x3
from storage_svc.loading.handles import Handle
from storage_svc.operations import history, outbox
from storage_svc.operations.dead_letter_filter import (
    HEADER_ATTEMPTS,
    HEADER_DETAIL,
    HEADER_GROUP,
    HEADER_OFFSET,
    HEADER_QUEUE,
    HEADER_REASON,
    HEADER_TIME,
    HEADER_TOPIC,
)
from storage_svc.operations.history import RetentionType
from storage_svc.operations.operation import STALE, Acted, ActionDecoders, ActionOutcome
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.runs import waiting_spans
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.reservation import Span
from storage_svc.queue.run import Run, Slice
from tidemark.api.storage.v1 import action_pb2
from tidemark.errors import InvalidArgument, RecordUnreadable
from tidemark.limits import RUN_BYTES_MAX
from tidemark.telemetry import counter, messaging, tracer
from tidemark.telemetry.messaging import Messages

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_dead_messages = counter(
    "tidemark.storage.dead_messages",
    description="Messages that were dead-lettered or deleted",
    zeros=[{"reason": reason.value} for reason in DeadReason],
)
_HISTORY_TYPES = {
    DeadReason.ATTEMPTS_EXHAUSTED: RetentionType.ATTEMPTS_EXHAUSTED,
    DeadReason.TIME_TO_LIVE: RetentionType.TIME_TO_LIVE,
    DeadReason.REJECTED: RetentionType.ATTEMPTS_EXHAUSTED,
    DeadReason.MAX_WAIT_TIME: RetentionType.MAX_WAIT_TIME_EVICTION,
}


class Death(NamedTuple):
    """Why messages cannot be delivered, and in which groups."""

    reason: DeadReason
    groups: str  # comma-separated where several are concerned by a deletion
    detail: str = ""


class Bury(NamedTuple):
    """Dispose of messages that must not be delivered: to the outbox, or for good.

    ATTEMPTS_EXHAUSTED concerns one slice of one group, TIME_TO_LIVE a whole run in all groups.
    """

    queue_id: int
    group: str
    fairness_key: str
    first_offset: int
    reason: DeadReason
    expected_attempts: int = 0
    expected_dead_deadline_ms: int = 0

    @classmethod
    def from_proto(cls, proto: action_pb2.BuryMessages) -> "Bury":
        reason = DeadReason.from_proto(proto.reason)
        if reason is None:
            raise InvalidArgument("a reason is required", field="reason")
        return cls(
            proto.queue_id,
            proto.group,
            proto.fairness_key,
            proto.first_offset,
            reason,
            proto.expected_attempt_count,
            proto.expected_dead_deadline_ms,
        )

    def write_to(self, proto: action_pb2.Action) -> None:
        bury = proto.bury_messages
        bury.queue_id = self.queue_id
        bury.group = self.group
        bury.fairness_key = self.fairness_key
        bury.first_offset = self.first_offset
        bury.reason = self.reason.to_proto()
        bury.expected_attempt_count = self.expected_attempts
        bury.expected_dead_deadline_ms = self.expected_dead_deadline_ms

    async def apply(self, commit: CommitContext) -> Acted:
        if commit.deletions_refused is not None:
            raise commit.deletions_refused
        handle = await commit.queue_by_id(self.queue_id, briefly=True)
        if handle is None:
            if self.reason is DeadReason.TIME_TO_LIVE:
                commit.journal.batch.delete(*self.index_entry())
            return STALE
        bury = _bury_slice if self.reason is DeadReason.ATTEMPTS_EXHAUSTED else _bury_run
        left_out = commit.state.left_out
        try:
            acted = await bury(commit, handle, self)
        except RecordUnreadable:
            left_out.add(*self.index_entry(), commit.now_ms)
            raise
        left_out.discard(*self.index_entry())
        return acted

    def index_entry(self) -> tuple[Table, bytes]:
        """The entry of the due index that a sweep found."""
        if self.reason is DeadReason.ATTEMPTS_EXHAUSTED:
            return Table.BURIED, group_rows.returned_key(
                self.queue_id, self.group, self.first_offset
            )
        dead_ms = self.expected_dead_deadline_ms
        return Table.TTL, u64x3(dead_ms, self.queue_id, self.first_offset)


async def dispose(
    commit: CommitContext, handle: Handle, slice_: Slice, body: bytes, death: Death
) -> None:
    """Send messages that were just settled to the dead-letter topic, or record their deletion."""
    record = handle.state.record
    run = slice_.run
    _dead_messages.add(slice_.messages, {"reason": death.reason.value})
    dead = Messages(
        record.lmq_name, slice_.messages, death.groups, commit.partition, slice_.attempts
    )
    messaging.moment(_tracer, messaging.DEAD_LETTER, dead, run.traceparent)
    destination = handle.topic.settings.dead_letter_topic
    if not destination:
        _log.info(
            "messages were deleted",
            extra={
                "queue": record.lmq_name,
                "offset": slice_.start,
                "messages": slice_.messages,
                "reason": death.reason.value,
                "group": death.groups,
            },
        )
        bytes_removed = slice_.messages * run.message_bytes
        kind = _HISTORY_TYPES[death.reason]
        history.write(commit, record.lmq_name, kind, "sweep", slice_.messages, bytes_removed)
        return
    if slice_.messages != run.messages:
        body = bodies.cut(body, slice_.start - run.first_offset, slice_.end - run.first_offset)
    headers = {
        HEADER_REASON: death.reason.value,
        HEADER_TOPIC: handle.topic.name,
        HEADER_QUEUE: record.lmq_name,
        HEADER_GROUP: death.groups,
        HEADER_ATTEMPTS: str(slice_.attempts),
        HEADER_TIME: str(commit.now_ms),
    }
    if death.detail:
        headers[HEADER_DETAIL] = death.detail
    await _put_labelled(commit, destination, slice_, body, headers, death.reason)


async def dispose_waiting(
    commit: CommitContext, handle: Handle, run: Run, reason: DeadReason
) -> int:
    """Dispose of what some group still waits for in a run that no reservation holds.

    The caller deletes or settles it. Returns how many messages that was. Raises RecordUnreadable,
    and changes nothing, if its body would be needed and cannot be read.
    """
    spans = waiting_spans(handle.state, run)
    if not spans:
        return 0
    body = await commit.body(handle.queue_id, run)
    for slice_, groups in _deaths(handle, run, spans):
        await dispose(commit, handle, slice_, body, Death(reason, groups))
    return sum(end - start for start, end in spans)


def _deaths(handle: Handle, run: Run, spans: Sequence[Span]) -> list[tuple[Slice, str]]:
    """One dead letter for each message and group that has not settled it; one without any group.
    By the names of groups: those that were loaded again are in another order.

    Where there is no dead-letter topic, messages are deleted once, for all groups.
    """
    names = sorted(handle.state.groups)
    groups = [group for name in names if not (group := handle.state.groups[name]).has_settled(run)]
    if not groups or not handle.topic.settings.dead_letter_topic:
        all_names = ",".join(group.name for group in groups)
        return [(Slice(start, end, run), all_names) for start, end in spans]
    deaths: list[tuple[Slice, str]] = []
    for group in groups:
        for slice_ in group.waiting_slices(run):
            last = deaths[-1][0] if deaths and deaths[-1][1] == group.name else None
            if last is not None and (last.end, last.attempts) == (slice_.start, slice_.attempts):
                deaths[-1] = (last._replace(end=slice_.end), group.name)
            else:
                deaths.append((slice_, group.name))
    return deaths


async def _put_labelled(
    commit: CommitContext,
    destination: str,
    slice_: Slice,
    body: bytes,
    headers: Mapping[str, str],
    reason: DeadReason,
) -> None:
    """In parts where the headers make it larger than a run may be: no frame would take it."""
    labelled = bodies.label(body, headers, slice_.start, HEADER_OFFSET)
    half = slice_.messages // 2
    if not half or len(labelled) <= RUN_BYTES_MAX:
        outbox.put(commit, destination, slice_, labelled, reason)
        return
    middle = slice_.start + half
    for part, at in ((slice_._replace(end=middle), 0), (slice_._replace(start=middle), half)):
        part_body = bodies.cut(body, at, at + part.messages)
        await _put_labelled(commit, destination, part, part_body, headers, reason)


async def _bury_slice(commit: CommitContext, handle: Handle, operation: Bury) -> Acted:
    """Attempts are exhausted in one group: its slice was set aside when that happened."""
    group = handle.state.groups.get(operation.group)
    slice_ = None if group is None else group.buried.get(operation.first_offset)
    if group is None or slice_ is None or slice_.attempts != operation.expected_attempts:
        return STALE
    body = await commit.body(handle.queue_id, slice_.run)
    handle.state.settle_buried(group, slice_.start, commit.journal)
    late = 0 < slice_.run.dead_deadline_ms <= commit.now_ms
    exhausted = 0 < handle.topic.settings.max_attempts <= slice_.attempts
    reason = DeadReason.TIME_TO_LIVE if late and not exhausted else DeadReason.ATTEMPTS_EXHAUSTED
    await dispose(commit, handle, slice_, body, Death(reason, group.name))
    return Acted(ActionOutcome.DONE, slice_.messages)


async def _bury_run(commit: CommitContext, handle: Handle, operation: Bury) -> Acted:
    """The time to live of a run has passed: it leaves in every group that has not settled it."""
    run = await commit.find_run(handle.queue_id, operation.fairness_key, operation.first_offset)
    if run is None:
        commit.journal.batch.delete(*operation.index_entry())
        return STALE
    if (
        run.dead_deadline_ms != operation.expected_dead_deadline_ms
        or run.dead_deadline_ms > commit.now_ms
        or handle.state.is_held(run)
    ):
        return STALE
    removed = await dispose_waiting(commit, handle, run, DeadReason.TIME_TO_LIVE)
    replayable = run.messages - removed  # settled, and kept until now
    if replayable:
        kind, lmq_name = RetentionType.TIME_TO_LIVE, handle.state.record.lmq_name
        body_bytes = replayable * run.message_bytes
        history.write(commit, lmq_name, kind, "sweep", replayable, body_bytes)
    handle.state.delete_runs((run,), commit.journal)
    return Acted(ActionOutcome.DONE, removed)


ACTIONS: ActionDecoders = {"bury_messages": Bury.from_proto}
