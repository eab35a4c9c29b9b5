"""Redriving: dead letters go back to the queues they came from, through the outbox (L6).

A dead letter carries where it came from in its headers. One call looks at a bounded part of the
dead-letter queue; what a live reservation holds, and what every group has settled, stays.
"""

from collections.abc import Mapping

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import successor
from storage_svc.loading.handles import Handle
from storage_svc.operations import DeadReason, Redrive, Removed, outbox
from storage_svc.operations import publish as appending
from storage_svc.operations.sweep import waiting_spans
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.lane import Run, Slice
from storage_svc.queue.reservation import Span
from tidemark.errors import InvalidArgument, InvalidName
from tidemark.names import LmqName, topic_of
from tidemark.telemetry import counter

RUNS_MAX = 200
BODY_BYTES_MAX = 4 * 1024 * 1024
"""What one commit looks at; a redrive of more is many calls, and others go on in between."""

_redriven = counter(
    "tidemark.storage.redriven_messages", description="Dead letters that left for their source"
)


async def redrive(commit: CommitContext, operation: Redrive) -> Removed:
    """Move what matches into the outbox, bound for its source, or only count it."""
    handle = await commit.queue(operation.lmq_name)
    start, end = rows.queue_range(handle.queue_id)
    if operation.page_token and not start <= operation.page_token < end:
        raise InvalidArgument("not a page token of this queue", field="page_token")
    page = await commit.engine.scan(
        Table.RUN_HEADERS, operation.page_token or start, end, limit=RUNS_MAX
    )
    moved = orphans = body_bytes = 0
    for key, value in page:
        if operation.limit and moved == operation.limit:
            return Removed(moved, body_bytes, orphans)
        if body_bytes >= BODY_BYTES_MAX:
            return Removed(moved, body_bytes, orphans, next_token=key)
        run = rows.read_run(key, value)
        if key in commit.journal.deleted or handle.state.is_held(run):
            continue
        body = await commit.body(handle.queue_id, run)
        body_bytes += len(body)
        headers = bodies.first_headers(body)
        spans = waiting_spans(handle, run)
        if not spans or not _matches(operation, headers):
            continue
        source = _source(commit, headers)
        if source is None:
            orphans += sum(end - start for start, end in spans)
            continue
        taken, left = _split(spans, operation.limit - moved if operation.limit else run.messages)
        moved += sum(end - start for start, end in taken)
        if not operation.dry_run:
            await _move(commit, handle, run, body, source, taken, left)
    more = len(page) == RUNS_MAX
    return Removed(moved, body_bytes, orphans, next_token=successor(page[-1][0]) if more else b"")


def _matches(operation: Redrive, headers: Mapping[str, str]) -> bool:
    """All messages of a run died together, so the headers of the first speak for all."""
    time_text = headers.get(outbox.HEADER_TIME, "")
    time_ms = int(time_text) if time_text.isascii() and time_text.isdigit() else 0
    return (
        operation.reason in ("", headers.get(outbox.HEADER_REASON))
        and operation.source_lmq_name in ("", headers.get(outbox.HEADER_QUEUE))
        and operation.after_ms <= time_ms
        and (not operation.before_ms or time_ms < operation.before_ms)
    )


def _source(commit: CommitContext, headers: Mapping[str, str]) -> str | None:
    """The queue that the messages came from; None if it cannot take them back."""
    name = headers.get(outbox.HEADER_QUEUE, "")
    try:
        LmqName.parse(name)  # anybody may have written it
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
        await outbox.put(
            commit,
            source,
            Slice(start, end, run),
            bodies.unlabel(cut, outbox.HEADER_PREFIX),
            DeadReason.REDRIVE,
        )
        _redriven.add(end - start, {"topic": handle.topic.name})
    for start, end in left:
        appending.append_run(
            commit,
            handle,
            bodies.cut(body, start - run.first_offset, end - run.first_offset),
            end - start,
            fairness_key=run.fairness_key,
            publish_time_ms=run.publish_time_ms,
            dead_deadline_ms=run.dead_deadline_ms,
            traceparent=run.traceparent,
        )
