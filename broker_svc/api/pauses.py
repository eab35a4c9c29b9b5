"""Pauses: consumers of a paused topic or queue get no messages until it is resumed (L10).

A topic is paused by a version of itself, which reaches every partition as a change of its settings
does; a queue in each partition that it spans. Storage hands nothing out while it is paused, and
announces ready messages when it is resumed, so that consumers need not ask again.
"""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from broker_svc.api.queue_partitions import QueuePartitions
from broker_svc.links.topic_cache import TopicCache
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TopicVersionMismatch
from tidemark.names import validate_topic
from tidemark.topics import Topic


class PutTopic(Protocol):
    """Stores a topic that is based on a version, and distributes it."""

    def __call__(
        self, topic: Topic, *, create: bool, expected_version: int
    ) -> Awaitable[Topic]: ...


class Pauses:
    """Pauses and resumes topics and queues; repeating either changes nothing."""

    def __init__(self, topics: TopicCache, partitions: QueuePartitions, put: PutTopic) -> None:
        self._topics = topics
        self._partitions = partitions
        self._put = put

    async def pause_topic(self, name: str, paused: bool) -> Topic:
        """Pause a topic or resume it; raises TopicNotFound."""
        validate_topic(name)
        while True:
            topic = await self._topics.renew(name)
            if topic.paused == paused:
                # A partition may have missed the change when it was made.
                await self._topics.fan_out(topic)
                return topic
            changed = replace(topic, paused=paused)
            try:
                return await self._put(changed, create=False, expected_version=topic.version)
            except TopicVersionMismatch:
                continue  # it was changed meanwhile; the pause is independent of that

    async def pause_queue(self, lmq_name: str, paused: bool) -> None:
        """Pause a queue or resume it in every partition; raises QueueNotFound."""
        await self._partitions.read(lmq_name)  # storage would create it
        pause = exchange_pb2.PauseQueue(lmq_name=lmq_name, paused=paused)
        await self._partitions.change(lmq_name, exchange_pb2.Operation(pause_queue=pause))
