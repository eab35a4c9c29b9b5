"""Topics: names and settings, kept in their home partition."""

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import text
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import Clock
from tidemark.errors import TopicExists, TopicNotFound


class Topics:
    """The topics of the cluster. A topic is stored as the proto that describes it."""

    def __init__(self, home: Engine, clock: Clock) -> None:
        self._home = home
        self._clock = clock

    async def create(self, topic: topic_pb2.Topic) -> topic_pb2.Topic:
        """Store a new topic; one with equal settings that exists already is a success."""
        stored = await self._find(topic.name)
        if stored is not None:
            if stored.settings == topic.settings:
                return stored
            raise TopicExists(f"topic {topic.name} exists with other settings", topic=topic.name)
        stored = topic_pb2.Topic(name=topic.name, settings=topic.settings, version=1)
        stored.create_time.FromMilliseconds(self._clock.wall_ms())
        stored.update_time.CopyFrom(stored.create_time)
        batch = Batch()
        batch.put(Table.TOPICS, text(topic.name.encode()), stored.SerializeToString())
        await self._home.commit(batch)
        return stored

    async def get(self, name: str) -> topic_pb2.Topic:
        topic = await self._find(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name}", topic=name)
        return topic

    async def _find(self, name: str) -> topic_pb2.Topic | None:
        (stored,) = await self._home.load(Table.TOPICS, [text(name.encode())])
        return None if stored is None else topic_pb2.Topic.FromString(stored)
