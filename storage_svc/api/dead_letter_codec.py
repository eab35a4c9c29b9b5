"""Dead letters and outbox entries as operators see them, as protos."""

from storage_svc.reads.dead_letters import DeadLetters, Waiting
from tidemark.api.broker.v1 import topic_pb2


def encode_dead_letters(partition: int, listed: DeadLetters) -> topic_pb2.DeadLetters:
    story = listed.story
    proto = topic_pb2.DeadLetters(
        partition=partition,
        first_offset=listed.first_offset,
        messages=listed.messages,
        reason=story.reason,
        source_lmq_name=story.source_lmq_name,
        source_offset=story.source_offset,
        group=story.group,
        attempt_count=story.attempts,
        detail=story.detail,
    )
    if story.time_ms:
        proto.dead_time.FromMilliseconds(story.time_ms)
    return proto


def encode_waiting(partition: int, waiting: Waiting) -> topic_pb2.WaitingEntry:
    entry = waiting.entry
    proto = topic_pb2.WaitingEntry(
        partition=partition,
        destination_lmq_name=entry.destination_lmq_name,
        sequence=entry.sequence,
        messages=entry.messages,
        reason=entry.reason.value,
    )
    proto.create_time.FromMilliseconds(entry.create_time_ms)
    if waiting.retry_ms:
        proto.retry_time.FromMilliseconds(waiting.retry_ms)
    return proto
