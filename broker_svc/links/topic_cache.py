"""Topics as this broker knows them: asked once, renewed when storage says that they have changed.

A topic that is not known is asked of its home partition; one whose version turns out to be newer
elsewhere is brought to the partition that lacks it. Names that do not exist are not remembered.
"""

import asyncio
from collections.abc import Mapping

from broker_svc.links.partition_link import PartitionLink
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2, storage_pb2_grpc
from tidemark.rpc.topic_codec import topic_from_proto, topic_to_proto
from tidemark.topics import Topic


class TopicCache:
    """The topics that were used lately. All topics of a cluster fit in memory."""

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
        """Raises TopicNotFound."""
        topic = self._topics.get(name)
        return topic if topic is not None else await self.renew(name)

    async def renew(self, name: str) -> Topic:
        """Ask the home partition."""
        self._topics.pop(name, None)
        found = await self._storage.GetTopic(storage_pb2.GetTopicRequest(name=name))
        topic = self._topics[name] = topic_from_proto(found.topic)
        return topic

    def forget(self, name: str) -> None:
        self._topics.pop(name, None)

    async def fan_out(self, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to every partition this broker owns."""
        if deleted:
            self._topics.pop(topic.name, None)
        else:
            self._topics[topic.name] = topic
        await asyncio.gather(
            *(self.bring(number, topic, deleted=deleted) for number in self._links)
        )

    async def bring(self, partition: int, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to one partition; an older one than it has is ignored there."""
        apply_topic = exchange_pb2.ApplyTopic(topic=topic_to_proto(topic), deleted=deleted)
        await self._links[partition].call(exchange_pb2.Operation(apply_topic=apply_topic))
