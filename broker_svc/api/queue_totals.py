"""Queue totals: the figures, groups and pages of several partitions, combined into one answer.

Pure: it sends no requests.
"""

from collections.abc import Sequence
from typing import Final

from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import InvalidArgument

_SEPARATOR: Final = ":"


def whole(found: Sequence[storage_pb2.GetQueueResponse]) -> topic_pb2.Queue:
    """The queue as one, from the answers of its partitions."""
    queue = topic_pb2.Queue()
    queue.CopyFrom(found[0].queue)
    for each in found[1:]:
        add(queue, each.queue)
    return queue


def add(whole: topic_pb2.Queue, part: topic_pb2.Queue) -> None:
    """Add the figures of one more partition. A queue that is loaded anywhere counts as loaded."""
    whole.messages += part.messages
    whole.bytes += part.bytes
    whole.inflight += part.inflight
    whole.paused = whole.paused or part.paused
    if part.activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED:
        whole.activity = part.activity
    if part.last_activity_time.ToMilliseconds() > whole.last_activity_time.ToMilliseconds():
        whole.last_activity_time.CopyFrom(part.last_activity_time)
    if part.create_time.ToMilliseconds() < whole.create_time.ToMilliseconds():
        whole.create_time.CopyFrom(part.create_time)
    if part.HasField("oldest_publish_time"):
        oldest = whole.oldest_publish_time
        older = part.oldest_publish_time.ToMilliseconds() < oldest.ToMilliseconds()
        if older or not whole.HasField("oldest_publish_time"):
            oldest.CopyFrom(part.oldest_publish_time)


def groups(found: Sequence[storage_pb2.GetQueueResponse]) -> list[topic_pb2.Group]:
    """The groups of all partitions, by partition and name."""
    found_groups = [group for each in found for group in each.groups]
    return sorted(found_groups, key=lambda group: (group.partition, group.name))


def page_size(asked: int) -> int:
    """Entries of a page, from a request."""
    if asked > limits.PAGE_SIZE_MAX:
        raise InvalidArgument(f"at most {limits.PAGE_SIZE_MAX} a page", field="page_size")
    return asked or limits.PAGE_SIZE_DEFAULT


def page_token(partition: int, token: str) -> str:
    """The token at which a listing over all partitions continues."""
    return f"{partition}{_SEPARATOR}{token}"


def read_token(token: str, partitions: int) -> tuple[int, str]:
    """The partition at which a listing continues, and storage's token for it."""
    if not token:
        return 0, ""
    partition, separator, rest = token.partition(_SEPARATOR)
    is_valid = separator and partition.isascii() and partition.isdigit() and len(partition) < 6
    if not is_valid or int(partition) >= partitions:
        raise InvalidArgument("not a page token of this call", field="page_token")
    return int(partition), rest
