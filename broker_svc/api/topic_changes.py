"""Topics are created and changed: checked, stored at their home, and distributed to all partitions.

A dead-letter topic that a topic names and that does not exist is created with it, or refused.
"""

from contextlib import suppress
from dataclasses import replace

from broker_svc.components import BrokerComponents
from broker_svc.links.placement import TOPIC_HOME
from tidemark import topics
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import InvalidArgument, TopicExists, TopicNotFound
from tidemark.names import validate_topic
from tidemark.rpc.topic_codec import (
    settings_from_proto,
    settings_to_proto,
    topic_from_proto,
    topic_to_proto,
)
from tidemark.topics import Topic, TopicSettings


class TopicChanges:
    """Creates topics and changes their settings."""

    def __init__(self, components: BrokerComponents) -> None:
        self._components = components

    async def create(self, request: topic_pb2.CreateTopicRequest) -> Topic:
        """Raises InvalidArgument or TopicExists."""
        topic = Topic(request.name, settings_from_proto(request.settings))
        topics.validate(topic, self._components.settings.partitions)
        missing = await self._missing_dead_letter_topic(topic.settings)
        stored = await self.put(topic, create=True)
        await self._create_missing(missing)
        return stored

    async def update(self, request: topic_pb2.UpdateTopicRequest) -> Topic:
        """Raises InvalidArgument, TopicNotFound or TopicVersionMismatch."""
        validate_topic(request.name)
        if not request.update_mask.paths:
            raise InvalidArgument("name the settings to change", field="update_mask")
        topic = await self._components.topics.renew(request.name)
        changed = replace(topic, settings=_merged(topic.settings, request))
        if changed.settings.partitions < topic.settings.partitions:
            raise InvalidArgument("partitions cannot be lowered", field="partitions")
        if changed.settings.subscription is not topic.settings.subscription:
            # Its groups have owners, or consumers that do not expect any.
            raise InvalidArgument("subscription cannot be changed", field="subscription")
        topics.validate(changed, self._components.settings.partitions)
        version = request.expected_version or topic.version
        missing = ""
        if "dead_letter_topic" in request.update_mask.paths:
            missing = await self._missing_dead_letter_topic(changed.settings)
        stored = await self.put(changed, create=False, expected_version=version)
        await self._create_missing(missing)
        return stored

    async def put(self, topic: Topic, *, create: bool, expected_version: int = 0) -> Topic:
        """Store a topic, its defaults filled in, and distribute it to all partitions."""
        topic = replace(topic, settings=topic.settings.filled_in())
        home = await self._components.storage_nodes.storage(TOPIC_HOME)
        stored = await home.PutTopic(
            storage_pb2.PutTopicRequest(
                topic=topic_to_proto(topic), create=create, expected_version=expected_version
            )
        )
        current = topic_from_proto(stored.topic)
        await self._components.topics.fan_out(current)
        self._components.tracking.topic_changed(current)
        await self._components.subscriptions.topic_changed(current)
        if create:
            self._components.dispatcher.topic_created(current.name)
        return current

    async def _missing_dead_letter_topic(self, settings: TopicSettings) -> str:
        """The name of a dead-letter topic that is to be created; "" for none.

        Raises InvalidArgument if missing ones are refused: a wrong name would be noticed only when
        messages are dead, and wait.
        """
        name = settings.dead_letter_topic
        if not name:
            return ""
        try:
            await self._components.topics.renew(name)
        except TopicNotFound:
            if self._components.settings.missing_dead_letter_topic == "create":
                return name
            raise InvalidArgument(
                f"there is no topic {name} for dead letters", field="dead_letter_topic"
            ) from None
        return ""

    async def _create_missing(self, name: str) -> None:
        """After the topic that names it: where that is refused, nothing is left behind. A caller
        that repeats a call which failed in between completes it."""
        if name:
            with suppress(TopicExists):  # created meanwhile, with other settings
                await self.put(Topic(name), create=True)


def _merged(settings: TopicSettings, request: topic_pb2.UpdateTopicRequest) -> TopicSettings:
    """The settings with those that the update mask names taken from the request."""
    merged = settings_to_proto(settings)
    for path in request.update_mask.paths:
        if path not in topics.SETTING_NAMES:
            raise InvalidArgument(f"there is no setting {path!r}", field="update_mask")
        merged.ClearField(path)  # type: ignore[arg-type]
    named = topic_pb2.TopicSettings()
    request.update_mask.MergeMessage(request.settings, named)
    merged.MergeFrom(named)
    return settings_from_proto(merged)
