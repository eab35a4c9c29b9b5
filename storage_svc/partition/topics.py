"""The topics of the cluster in the view of one partition, all in memory with their versions.

Partition 0 is the home partition, which assigns versions; the others receive newer versions and
ignore older ones, so that the fan-out may repeat itself and arrive in any order. A deleted topic
leaves its version behind for the same reason.
"""

from dataclasses import replace

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import text
from storage_svc.engines.paging import scan_all
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import InvalidArgument, TopicExists, TopicNotFound, TopicVersionMismatch
from tidemark.rpc.topic_codec import topic_from_proto, topic_to_proto
from tidemark.topics import Topic

_LIVE, _DELETED = b"\x01", b"\x00"


class Topics:
    """The topics of one partition. Changes are written to the batch of the commit under way."""

    def __init__(self) -> None:
        self._live: dict[str, Topic] = {}
        self._deleted: dict[str, int] = {}
        self._limited: tuple[Topic, ...] | None = None
        self._expiring: tuple[Topic, ...] | None = None

    async def load(self, engine: Engine) -> None:
        async for _, value in scan_all(engine, Table.TOPICS, b"", None):
            topic = topic_from_proto(topic_pb2.Topic.FromString(value[1:]))
            if value[:1] == _LIVE:
                self._live[topic.name] = topic
            else:
                self._deleted[topic.name] = topic.version

    def get(self, name: str) -> Topic:
        try:
            return self._live[name]
        except KeyError:
            raise TopicNotFound(
                f"there is no topic {name}", topic=name, version=str(self.version(name))
            ) from None

    def find(self, name: str) -> Topic | None:
        return self._live.get(name)

    def limited(self) -> tuple[Topic, ...]:
        """Topics with a limit for the age of their messages."""
        if self._limited is None:
            self._limited = tuple(filter(_is_limited, self._live.values()))
        return self._limited

    def expiring(self) -> tuple[Topic, ...]:
        """Topics whose groups expire."""
        if self._expiring is None:
            topics = self._live.values()
            self._expiring = tuple(each for each in topics if each.settings.group_expiry_seconds)
        return self._expiring

    def names(self) -> list[str]:
        return sorted(self._live)

    @property
    def paused(self) -> int:
        """How many topics are paused."""
        return sum(topic.paused for topic in self._live.values())

    def version(self, name: str) -> int:
        """The newest version, also of a deleted topic; 0 for an unknown one."""
        topic = self._live.get(name)
        return self._deleted.get(name, 0) if topic is None else topic.version

    def create(self, topic: Topic, version: int, now_ms: int, batch: Batch) -> Topic:
        """A new topic; one that exists with equal settings is left as it is."""
        stored = self._live.get(topic.name)
        if stored is not None:
            if stored.settings == topic.settings:
                return stored
            raise TopicExists(f"topic {topic.name} exists with other settings", topic=topic.name)
        self._check_dead_letters(topic)
        return self._put(replace(topic, version=version, create_time_ms=now_ms), now_ms, batch)

    def update(
        self, topic: Topic, expected_version: int, version: int, now_ms: int, batch: Batch
    ) -> Topic:
        """Other settings for a topic that exists, which may be paused or resumed."""
        stored = self.get(topic.name)
        if expected_version not in (0, stored.version):
            raise TopicVersionMismatch(
                f"topic {topic.name} has version {stored.version}, not {expected_version}",
                version=str(stored.version),
            )
        self._check_dead_letters(topic)
        changed = replace(stored, settings=topic.settings, paused=topic.paused, version=version)
        return self._put(changed, now_ms, batch)

    def delete(self, name: str, version: int, batch: Batch) -> None:
        """The topic is gone; its version stays."""
        self._remove(replace(self.get(name), version=version), batch)

    def apply(self, topic: Topic, deleted: bool, batch: Batch) -> bool:
        """Take a version from the home partition; returns whether it was newer."""
        if topic.version <= self.version(topic.name):
            return False
        if deleted:
            self._remove(topic, batch)
        else:
            self._put(topic, topic.update_time_ms, batch)
        return True

    def _check_dead_letters(self, topic: Topic) -> None:
        """Refuse a cycle of dead-letter topics: a message could go round in it without end."""
        way = [topic.name]
        name = topic.settings.dead_letter_topic
        while name:
            way.append(name)
            if name == topic.name:
                raise InvalidArgument(
                    f"dead-letter topics point at each other: {' -> '.join(way)}",
                    field="dead_letter_topic",
                )
            found = self._live.get(name)
            name = "" if found is None else found.settings.dead_letter_topic

    def _put(self, topic: Topic, now_ms: int, batch: Batch) -> Topic:
        topic = replace(topic, update_time_ms=now_ms)
        self._live[topic.name] = topic
        self._limited = self._expiring = None
        self._deleted.pop(topic.name, None)
        batch.put(Table.TOPICS, _key(topic), _LIVE + topic_to_proto(topic).SerializeToString())
        return topic

    def _remove(self, topic: Topic, batch: Batch) -> None:
        self._live.pop(topic.name, None)
        self._limited = self._expiring = None
        self._deleted[topic.name] = topic.version
        batch.put(Table.TOPICS, _key(topic), _DELETED + topic_to_proto(topic).SerializeToString())


def _is_limited(topic: Topic) -> bool:
    settings = topic.settings
    retention_s = settings.retention_seconds or settings.completed_retention_seconds
    return bool(settings.max_wait_time_seconds or (settings.retention_enabled and retention_s))


def _key(topic: Topic) -> bytes:
    return text(topic.name.encode())
