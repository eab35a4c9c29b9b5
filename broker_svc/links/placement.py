"""Placement: which partitions a queue lives in.

Pure. A lite queue lives in one partition; a plain queue of a topic with several partitions spans
that many, beginning with its own.
"""

from typing import Final

from tidemark.names import is_lite, partition_of
from tidemark.topics import Topic

TOPIC_HOME: Final = 0
"""The partition in which topics have their home."""


def partitions_of(lmq_name: str, topic: Topic, cluster_partitions: int) -> tuple[int, ...]:
    first = partition_of(lmq_name, cluster_partitions)
    if is_lite(lmq_name):
        return (first,)
    spanned = min(topic.settings.partitions, cluster_partitions)
    return tuple((first + step) % cluster_partitions for step in range(spanned))
