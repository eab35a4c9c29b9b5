"""Topics as this broker knows them: read once, and again when storage reports a newer version.

Unknown topics are read from their home partition; a partition that lacks a version gets it from
here. Names that do not exist are not cached.
"""

import asyncio
from collections.abc import Mapping

from broker_svc.links.partition_link import PartitionLink
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2, storage_pb2_grpc
from tidemark.rpc.topic_codec import topic_from_proto, topic_to_proto
from tidemark.topics import Topic


class TopicCache:
    """The topics that were used. There is no bound: all topics of a cluster fit in memory."""

    def __init__(
        self,
        storage: storage_pb2_grpc.StorageServiceStub,
        links: Mapping[int, PartitionLink],
    ) -> None:
        self._storage = storage
        self._links = links
        self._topics: dict[str, Topic] = {}

    def known(self, name: str) -> Topic | None:
        return self._topics.get(name)

    async def get(self, name: str) -> Topic:
        """The cached topic, or else that of the home partition; raises TopicNotFound."""
        topic = self._topics.get(name)
        return topic if topic is not None else await self.renew(name)

    async def renew(self, name: str) -> Topic:
        """Read the topic from its home partition; raises TopicNotFound."""
        self._topics.pop(name, None)
        found = await self._storage.GetTopic(storage_pb2.GetTopicRequest(name=name))
        topic = self._topics[name] = topic_from_proto(found.topic)
        return topic

    async def fan_out(self, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to every partition, and cache it."""
        if deleted:
            self._topics.pop(topic.name, None)
        else:
            self._topics[topic.name] = topic
        await asyncio.gather(
            *(self.bring(number, topic, deleted=deleted) for number in self._links)
        )

    async def bring(self, partition: int, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to one partition, which ignores it if it has a newer one."""
        apply_topic = exchange_pb2.ApplyTopic(topic=topic_to_proto(topic), deleted=deleted)
        await self._links[partition].call(exchange_pb2.Operation(apply_topic=apply_topic))
