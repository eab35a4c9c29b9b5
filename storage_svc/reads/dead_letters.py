"""Dead letters and the outbox for operators, read beside the writer without loading a queue (L9).

A page is bounded by the rows that it reads: reason and source are headers in the bodies, which are
parsed.
"""

from typing import NamedTuple

from storage_svc.engines import outbox_rows, queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import prefix_end, successor
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations import outbox
from storage_svc.operations.dead_letter_filter import DeadLetterFilter, Story
from storage_svc.operations.outbox import OutboxEntry
from storage_svc.operations.runs import waiting_spans
from storage_svc.partition.commit import report_unreadable
from storage_svc.partition.partition import Partition
from storage_svc.queue import bodies
from tidemark.errors import DataCorrupt, InvalidArgument

PAGE_BYTES_MAX = 1024 * 1024
"""Bodies that one page reads."""


class DeadLetters(NamedTuple):
    """Messages next to each other that died together."""

    first_offset: int
    messages: int
    story: Story


class Waiting(NamedTuple):
    """An entry of the outbox, without its messages."""

    entry: OutboxEntry
    retry_ms: int  # 0: its destination has not refused


async def list_dead_letters(
    partition: Partition, lmq_name: str, chosen: DeadLetterFilter, token: bytes, limit: int
) -> tuple[list[DeadLetters], bytes]:
    """A page of messages for a redrive or a deletion, and the token of the next page."""
    state = await partition.state.handles.read_state(lmq_name)
    queue_id = state.record.queue_id
    start, end = queue_rows.queue_range(queue_id)
    _check_token(token, start, end)
    listed: list[DeadLetters] = []
    read_bytes = 0
    with partition.reader() as reader:
        purge = partition.state.erasures.purge_of(queue_id)
        page = await scan_runs(reader, purge, token or start, end, limit=limit)
        for key, value in page:
            if len(listed) >= limit or read_bytes > PAGE_BYTES_MAX:
                return listed, key
            run = run_rows.read_run(key, value)
            spans = [] if state.is_held(run) else waiting_spans(state, run)
            if not spans:
                continue
            body_key = run_rows.body_key(queue_id, run.first_offset)
            body: bytes | None
            if run_rows.has_inline_body(run):
                body = run_rows.inline_body(value)
            else:
                try:
                    (body,) = await reader.load(Table.RUN_BODIES, [body_key])
                except DataCorrupt as error:  # the others are listed (V3)
                    report_unreadable(Table.RUN_BODIES, body_key, lmq_name, str(error))
                    continue
            if body is None:
                continue  # deleted between the two reads
            read_bytes += len(body)
            story = Story.of(bodies.first_headers(body))
            if chosen.matches(story):
                for first, last in spans:
                    source_offset = story.source_offset + first - run.first_offset
                    part = story._replace(source_offset=source_offset)
                    listed.append(DeadLetters(first, last - first, part))
    return listed, successor(page[-1][0]) if len(page) == limit else b""


async def list_outbox(
    partition: Partition, destination: str, token: bytes, limit: int
) -> tuple[list[Waiting], bytes]:
    """A page of waiting entries, by destination and sequence, and the token of the next page."""
    start, end = b"", None
    index = partition.state.outbox
    if destination:
        start = outbox_rows.outbox_key(destination, index.first(destination))
        end = prefix_end(outbox_rows.outbox_prefix(destination))
        _check_token(token, outbox_rows.outbox_prefix(destination), end)
    with partition.reader() as reader:
        found = await reader.scan(Table.OUTBOX, token or start, end, limit=limit)
    entries = [outbox.decode(key, value, b"") for key, value in found]
    waiting = [Waiting(each, index.retry_ms(each.destination_lmq_name)) for each in entries]
    return waiting, successor(found[-1][0]) if len(found) == limit else b""


def _check_token(token: bytes, start: bytes, end: bytes) -> None:
    if token and not start <= token < end:
        raise InvalidArgument("not a page token of this call", field="page_token")
