"""Runs: what operations of several subjects do with one.

Appending a run to a queue within its quotas, removing one that no reservation holds, and finding
its unsettled messages.
"""

from storage_svc.engines.engine import Table
from storage_svc.loading.handles import Handle
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.queue import QueueState
from storage_svc.queue.reservation import Span
from storage_svc.queue.run import Run
from tidemark.errors import QueueFull
from tidemark.topics import Topic


async def queue_with_room(
    commit: CommitContext,
    topic: Topic,
    lmq_name: str,
    messages: int,
    body: bytes,
    *,
    briefly: bool = False,
) -> Handle:
    """The handle of a queue that can take another run, created if there is none yet.

    Raises QueueFull, and creates nothing, if the quotas of the topic leave no room.
    """
    handle = commit.loaded_queue(lmq_name) or await commit.find_queue(lmq_name, briefly=briefly)
    body_bytes = len(body)
    if handle is not None:
        record = handle.state.record
        messages += record.messages + record.scheduled
        body_bytes += record.body_bytes
    settings = topic.settings
    if 0 < settings.queue_messages_max < messages:
        raise QueueFull(
            f"queue {lmq_name} may hold {settings.queue_messages_max} messages",
            limit="queue_messages_max",
        )
    if 0 < settings.queue_bytes_max < body_bytes:
        raise QueueFull(
            f"queue {lmq_name} may hold {settings.queue_bytes_max} bytes",
            limit="queue_bytes_max",
        )
    return handle or await commit.queue_or_new(lmq_name, briefly=briefly)


def append_run(
    commit: CommitContext,
    handle: Handle,
    body: bytes,
    messages: int,
    *,
    fairness_key: str,
    publish_time_ms: int,
    dead_deadline_ms: int,
    traceparent: str,
    group: str = "",
) -> Run:
    """Give a run the next offsets of its queue."""
    run = Run(
        handle.state.record.next_offset,
        messages,
        len(body),
        publish_time_ms,
        dead_deadline_ms,
        fairness_key,
        traceparent,
        group,
    )
    handle.state.append(run, body, commit.now_ms, commit.journal)
    if dead_deadline_ms:
        commit.add_due(Table.TTL, dead_deadline_ms)
    return run


def waiting_spans(state: QueueState, run: Run) -> list[Span]:
    """The messages of a run that some group has not settled; all of them without any group."""
    groups = state.groups.values()
    if not groups:
        return [(run.first_offset, run.end)]
    merged: list[Span] = []
    for start, end in sorted(span for group in groups for span in group.unsettled_spans(run)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
