"""Redriving: dead letters go back to the queues they came from, through the outbox (L6).

A dead letter names its source in its headers. One call examines a bounded part of the dead-letter
queue; messages that a live reservation holds, or that every group has settled, stay.
"""

from collections.abc import Mapping
from typing import NamedTuple

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import successor
from storage_svc.loading.handles import Handle
from storage_svc.operations import outbox
from storage_svc.operations.dead_letters import (
    HEADER_PREFIX,
    HEADER_QUEUE,
    HEADER_REASON,
    HEADER_TIME,
)
from storage_svc.operations.fields import queue_name
from storage_svc.operations.operation import ExchangeDecoders, Removed
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.runs import append_run, waiting_spans
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.reservation import Span
from storage_svc.queue.run import Run, Slice
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.dead_letters import DeadLetterReason
from tidemark.errors import InvalidArgument, InvalidName, RecordUnreadable
from tidemark.names import LmqName, topic_of
from tidemark.telemetry import counter

RUNS_MAX = 200
BODY_BYTES_MAX = 4 * 1024 * 1024
"""What one commit examines; a redrive of more is many calls, with other commits in between."""

_redriven = counter(
    "tidemark.storage.redriven_messages", description="Dead letters that left for their source"
)


class Redrive(NamedTuple):
    """Bring dead letters of a queue back to where they came from, or count them."""

    lmq_name: str
    reason: str = ""
    source_lmq_name: str = ""
    after_ms: int = 0
    before_ms: int = 0
    limit: int = 0
    dry_run: bool = False
    page_token: bytes = b""

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Redrive) -> "Redrive":
        return cls(
            queue_name(proto.lmq_name),
            _reason(proto.reason),
            proto.source_lmq_name,
            proto.after_ms,
            proto.before_ms,
            proto.limit,
            proto.dry_run,
            proto.page_token,
        )

    async def apply(self, commit: CommitContext) -> Removed:
        """Move what matches into the outbox, bound for its source, or only count it."""
        handle = await commit.queue(self.lmq_name)
        start, end = rows.queue_range(handle.queue_id)
        if self.page_token and not start <= self.page_token < end:
            raise InvalidArgument("not a page token of this queue", field="page_token")
        page = await commit.engine.scan(
            Table.RUN_HEADERS, self.page_token or start, end, limit=RUNS_MAX
        )
        moved = orphans = body_bytes = 0
        for key, value in page:
            if self.limit and moved == self.limit:
                return Removed(moved, body_bytes, orphans)
            if body_bytes >= BODY_BYTES_MAX:
                return Removed(moved, body_bytes, orphans, next_token=key)
            run = rows.read_run(key, value)
            if key in commit.journal.deleted or handle.state.is_held(run):
                continue
            spans = waiting_spans(handle, run)
            try:
                body = await commit.body(handle.queue_id, run)
            except RecordUnreadable:  # it stays, and the others leave (V3)
                orphans += sum(end - start for start, end in spans)
                continue
            body_bytes += len(body)
            headers = bodies.first_headers(body)
            if not spans or not _matches(self, headers):
                continue
            source = _source(commit, headers)
            if source is None:
                orphans += sum(end - start for start, end in spans)
                continue
            taken, left = _split(spans, self.limit - moved if self.limit else run.messages)
            moved += sum(end - start for start, end in taken)
            if not self.dry_run:
                await _move(commit, handle, run, body, source, taken, left)
        more = len(page) == RUNS_MAX
        next_token = successor(page[-1][0]) if more else b""
        return Removed(moved, body_bytes, orphans, next_token)


def _reason(text: str) -> str:
    if text and text not in set(DeadLetterReason):
        raise InvalidArgument(
            f"reason is one of {', '.join(DeadLetterReason)}, not {text!r}", field="reason"
        )
    return text


def _matches(operation: Redrive, headers: Mapping[str, str]) -> bool:
    """All messages of a run died together, so the headers of the first count for all."""
    time_text = headers.get(HEADER_TIME, "")
    time_ms = int(time_text) if time_text.isascii() and time_text.isdigit() else 0
    return (
        operation.reason in ("", headers.get(HEADER_REASON))
        and operation.source_lmq_name in ("", headers.get(HEADER_QUEUE))
        and operation.after_ms <= time_ms
        and (not operation.before_ms or time_ms < operation.before_ms)
    )


def _source(commit: CommitContext, headers: Mapping[str, str]) -> str | None:
    """The queue that the messages came from; None if it cannot take them back."""
    name = headers.get(HEADER_QUEUE, "")
    try:
        LmqName.parse(name)  # any publisher may have written it
    except InvalidName:
        return None
    return None if commit.topics.find(topic_of(name)) is None else name


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


async def _move(
    commit: CommitContext,
    handle: Handle,
    run: Run,
    body: bytes,
    source: str,
    taken: list[Span],
    left: list[Span],
) -> None:
    """A run leaves as a whole; what a limit leaves behind is appended to the queue again."""
    handle.state.delete_runs((run,), commit.journal)
    for start, end in taken:
        cut = bodies.cut(body, start - run.first_offset, end - run.first_offset)
        unlabelled = bodies.unlabel(cut, HEADER_PREFIX)
        await outbox.put(commit, source, Slice(start, end, run), unlabelled, DeadReason.REDRIVE)
        _redriven.add(end - start, {"topic": handle.topic.name})
    for start, end in left:
        append_run(
            commit,
            handle,
            bodies.cut(body, start - run.first_offset, end - run.first_offset),
            end - start,
            fairness_key=run.fairness_key,
            publish_time_ms=run.publish_time_ms,
            dead_deadline_ms=run.dead_deadline_ms,
            traceparent=run.traceparent,
        )


OPERATIONS: ExchangeDecoders = {"redrive": Redrive.from_proto}
