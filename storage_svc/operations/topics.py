"""Topics: created and changed in their home partition, then brought to all others."""

from typing import NamedTuple

from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.partition.commit import CommitContext
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.rpc.topic_codec import topic_from_proto
from tidemark.topics import Topic, validate


class TopicStored(NamedTuple):
    """The topic as this partition has it; None if it is deleted."""

    topic: Topic | None
    version: int

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.apply_topic.version = self.version


class PutTopic(NamedTuple):
    """Create or change a topic in its home partition, the only one that gives versions."""

    topic: Topic
    create: bool
    expected_version: int = 0

    async def apply(self, commit: CommitContext) -> TopicStored:
        counters = commit.counters
        version = counters.topic_version + 1
        batch = commit.journal.batch
        if self.create:
            topic = commit.topics.create(self.topic, version, commit.now_ms, batch)
        else:
            topic = commit.topics.update(
                self.topic, self.expected_version, version, commit.now_ms, batch
            )
        counters.topic_version = max(counters.topic_version, topic.version)
        commit.handles.topic_changed(topic, commit.journal)
        return TopicStored(topic, topic.version)


class DropTopic(NamedTuple):
    """Delete a topic in its home partition; the caller has deleted its queues before."""

    name: str

    async def apply(self, commit: CommitContext) -> TopicStored:
        commit.counters.topic_version += 1
        version = commit.counters.topic_version
        commit.topics.delete(self.name, version, commit.journal.batch)
        return TopicStored(None, version)


class ApplyTopic(NamedTuple):
    """Bring a version of a topic from its home to this partition, which ignores older ones."""

    topic: Topic
    deleted: bool = False

    @classmethod
    def from_proto(cls, proto: exchange_pb2.ApplyTopic) -> "ApplyTopic":
        return cls(topic_from_proto(proto.topic), proto.deleted)

    async def apply(self, commit: CommitContext) -> TopicStored:
        if not self.deleted:
            validate(self.topic, commit.partitions)
        topics = commit.topics
        if topics.apply(self.topic, self.deleted, commit.journal.batch):
            counters = commit.counters
            counters.topic_version = max(counters.topic_version, self.topic.version)
            if not self.deleted:
                commit.handles.topic_changed(self.topic, commit.journal)
        return TopicStored(topics.find(self.topic.name), topics.version(self.topic.name))


OPERATIONS: ExchangeDecoders = {"apply_topic": ApplyTopic.from_proto}
