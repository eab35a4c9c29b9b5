"""Redriving and deleting dead letters, by filter (L6, L9).

A dead letter names its source in its headers. One operation examines a bounded part of the
dead-letter queue; messages that a live reservation holds, or that every group has settled, stay. A
redrive sends messages back through the outbox, to the group that they died in; a deletion leaves a
row in the history.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.keys import successor
from storage_svc.loading.handles import Handle
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations import history, outbox
from storage_svc.operations.dead_letter_filter import HEADER_PREFIX, DeadLetterFilter, Story
from storage_svc.operations.fields import queue_name
from storage_svc.operations.history import RetentionType
from storage_svc.operations.operation import ExchangeDecoders, Removed
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.runs import append_run, waiting_spans
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.reservation import Span
from storage_svc.queue.run import Run, Slice
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, InvalidName, RecordUnreadable
from tidemark.names import LmqName, topic_of
from tidemark.telemetry import counter

RUNS_MAX = 200
BODY_BYTES_MAX = 4 * 1024 * 1024
"""Messages that one commit examines; a larger redrive is many calls, with other commits between."""

_redriven = counter(
    "tidemark.storage.redriven_messages", description="Dead letters that left for their source"
)


class Found(NamedTuple):
    """A run of dead letters that matches, and which messages of it are taken."""

    run: Run
    body: bytes
    story: Story
    taken: list[Span]
    left: list[Span]
    """Waiting messages that a limit leaves behind."""


Take = Callable[[CommitContext, Handle, Found], Awaitable[bool]]
"""Takes messages out of their queue; false if they have to stay. A dry run only asks."""


class Selection(NamedTuple):
    """Dead letters of one queue, from where the last operation ended."""

    lmq_name: str
    chosen: DeadLetterFilter = DeadLetterFilter()
    limit: int = 0
    dry_run: bool = False
    page_token: bytes = b""

    @classmethod
    def from_proto(
        cls, proto: exchange_pb2.Redrive | exchange_pb2.RemoveDeadLetters
    ) -> "Selection":
        return cls(
            queue_name(proto.lmq_name),
            DeadLetterFilter.from_proto(proto.filter),
            proto.limit,
            proto.dry_run,
            proto.page_token,
        )

    async def take(self, commit: CommitContext, take: Take) -> Removed:
        """Take what matches, or only count it."""
        handle = await commit.queue(self.lmq_name)
        start, end = queue_rows.queue_range(handle.queue_id)
        if self.page_token and not start <= self.page_token < end:
            raise InvalidArgument("not a page token of this queue", field="page_token")
        purge = commit.state.erasures.purge_of(handle.queue_id)
        page = await scan_runs(commit.engine, purge, self.page_token or start, end, limit=RUNS_MAX)
        messages = stayed = body_bytes = 0
        for key, value in page:
            if self.limit and messages == self.limit:
                return Removed(messages, body_bytes, stayed)
            if body_bytes >= BODY_BYTES_MAX:
                return Removed(messages, body_bytes, stayed, next_token=key)
            run = run_rows.read_run(key, value)
            if key in commit.journal.deleted or handle.state.is_held(run):
                continue
            spans = waiting_spans(handle.state, run)
            try:
                body = await commit.body(handle.queue_id, run)
            except RecordUnreadable:  # it stays, and the others leave (V3)
                stayed += _total(spans)
                continue
            body_bytes += len(body)
            story = Story.of(bodies.first_headers(body))
            if not spans or not self.chosen.matches(story):
                continue
            taken, left = _split(spans, self.limit - messages if self.limit else run.messages)
            if await take(commit, handle, Found(run, body, story, taken, left)):
                messages += _total(taken)
            else:
                stayed += _total(spans)
        more = len(page) == RUNS_MAX
        next_token = successor(page[-1][0]) if more else b""
        return Removed(messages, body_bytes, stayed, next_token)


class Redrive(NamedTuple):
    """Bring dead letters of a queue back to where they came from, or count them."""

    selection: Selection

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Redrive) -> "Redrive":
        return cls(Selection.from_proto(proto))

    async def apply(self, commit: CommitContext) -> Removed:
        return await self.selection.take(commit, self._take)

    async def _take(self, commit: CommitContext, handle: Handle, found: Found) -> bool:
        source = _source(commit, found.story)
        if source is None:
            return False
        if not self.selection.dry_run:
            _take_out(commit, handle, found)
            for start, end in found.taken:
                slice_ = Slice(start, end, found.run)
                unlabelled = bodies.unlabel(_cut(found, (start, end)), HEADER_PREFIX)
                reason, group = DeadReason.REDRIVE, found.story.group
                outbox.put(commit, source, slice_, unlabelled, reason, group)
                _redriven.add(end - start, {"topic": handle.topic.name})
        return True


class RemoveDeadLetters(NamedTuple):
    """Delete dead letters of a queue for good, or count them."""

    selection: Selection

    @classmethod
    def from_proto(cls, proto: exchange_pb2.RemoveDeadLetters) -> "RemoveDeadLetters":
        return cls(Selection.from_proto(proto))

    async def apply(self, commit: CommitContext) -> Removed:
        if self.selection.dry_run:
            return await self.selection.take(commit, self._leave)
        before = commit.journal.body_bytes
        removed = await self.selection.take(commit, self._take)
        if removed.messages:
            body_bytes = before - commit.journal.body_bytes
            lmq_name, kind = self.selection.lmq_name, RetentionType.PURGE
            history.write(commit, lmq_name, kind, "delete", removed.messages, body_bytes)
        return removed

    async def _leave(self, commit: CommitContext, handle: Handle, found: Found) -> bool:
        return True

    async def _take(self, commit: CommitContext, handle: Handle, found: Found) -> bool:
        _take_out(commit, handle, found)
        return True


def _source(commit: CommitContext, story: Story) -> str | None:
    """The queue that the messages came from; None if it cannot take them back."""
    name = story.source_lmq_name
    try:
        LmqName.parse(name)  # any publisher may have written it
    except InvalidName:
        return None
    return None if commit.topics.find(topic_of(name)) is None else name


def _total(spans: list[Span]) -> int:
    return sum(end - start for start, end in spans)


def _split(spans: list[Span], messages: int) -> tuple[list[Span], list[Span]]:
    """The first so many messages, and the rest."""
    taken: list[Span] = []
    left: list[Span] = []
    for start, end in spans:
        middle = min(end, start + messages)
        if start < middle:
            taken.append((start, middle))
        if middle < end:
            left.append((middle, end))
        messages -= middle - start
    return taken, left


def _cut(found: Found, span: Span) -> bytes:
    first_offset = found.run.first_offset
    return bodies.cut(found.body, span[0] - first_offset, span[1] - first_offset)


def _take_out(commit: CommitContext, handle: Handle, found: Found) -> None:
    """A run leaves as a whole; what a limit leaves behind is appended to the queue again."""
    run = found.run
    handle.state.delete_runs((run,), commit.journal)
    for start, end in found.left:
        append_run(
            commit,
            handle,
            _cut(found, (start, end)),
            end - start,
            fairness_key=run.fairness_key,
            publish_time_ms=run.publish_time_ms,
            dead_deadline_ms=run.dead_deadline_ms,
            traceparent=run.traceparent,
            group=run.group,
        )


OPERATIONS: ExchangeDecoders = {
    "redrive": Redrive.from_proto,
    "remove_dead_letters": RemoveDeadLetters.from_proto,
}
