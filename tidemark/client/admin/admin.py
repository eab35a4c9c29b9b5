"""The administrative calls of a broker: topics, queues, groups, partitions.

Calls `TopicService` over a channel of the caller and turns answers into values. Calls raise the
classes of `tidemark.errors`. It keeps no state and closes no channel.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from tidemark import limits
from tidemark.api.broker.v1 import subscription_pb2, topic_pb2
from tidemark.client.admin.cluster import ClusterCalls
from tidemark.client.admin.dead_letters import DeadLetterCalls
from tidemark.client.admin.pages import pages
from tidemark.client.admin.values import (
    Eviction,
    Group,
    Queue,
    QueueStats,
    StoredMessage,
)
from tidemark.client.arguments import (
    UINT32_MAX,
    check_bool,
    check_group,
    check_instance,
    check_int,
    check_lmq_name,
    check_settings,
    check_str,
    check_topic_name,
)
from tidemark.errors import InvalidArgument
from tidemark.limits import PAGE_SIZE_MAX
from tidemark.rpc.enums import word_of
from tidemark.rpc.topic_codec import settings_to_proto, topic_from_proto
from tidemark.topics import SETTING_NAMES, Topic, TopicSettings

Position: TypeAlias = Literal["earliest", "latest", "last", "offset", "time"]
"""Where a group continues; the last two need a number."""

_DEFAULTS = TopicSettings()


class Admin(ClusterCalls, DeadLetterCalls):
    """The administrative calls of a broker. A call that takes longer than the timeout fails.

    Calls that are safe to repeat are retried until then: reads, `create_topic`, `update_topic`
    without a version, and `evict_queue`.
    """

    # --- topics --------------------------------------------------------------------------------

    async def create_topic(self, name: str, settings: TopicSettings = _DEFAULTS) -> Topic:
        """Create a topic. It also succeeds if the topic exists with equal settings.

        So a retry after a lost answer succeeds; TopicExists means that the settings differ.
        """
        check_topic_name(name)
        check_instance("settings", settings, TopicSettings)
        chosen = check_settings({each: getattr(settings, each) for each in SETTING_NAMES})
        request = topic_pb2.CreateTopicRequest(
            name=name, settings=settings_to_proto(TopicSettings(**chosen))
        )
        answer = await self._repeat(lambda topics: topics.CreateTopic, request)
        return topic_from_proto(answer.topic)

    async def get_topic(self, name: str) -> Topic:
        request = topic_pb2.GetTopicRequest(name=check_topic_name(name))
        answer = await self._repeat(lambda topics: topics.GetTopic, request)
        return topic_from_proto(answer.topic)

    async def list_topics(self) -> AsyncIterator[Topic]:
        """All topics by name, page by page."""
        request = topic_pb2.ListTopicsRequest(page_size=PAGE_SIZE_MAX)
        async for page in pages(self._repeated(lambda topics: topics.ListTopics), request):
            for each in page.topics:
                yield topic_from_proto(each)

    async def update_topic(
        self, name: str, changes: Mapping[str, Any], *, expected_version: int = 0
    ) -> Topic:
        """Change only the named settings; 0 restores a default."""
        check_topic_name(name)
        changes = check_settings(changes)
        request = topic_pb2.UpdateTopicRequest(
            name=name,
            settings=settings_to_proto(replace(_DEFAULTS, **changes)),
            expected_version=check_int("expected_version", expected_version, 0),
        )
        request.update_mask.paths.extend(changes)
        # With an expected version, a retry after a lost answer would fail although the first try
        # succeeded.
        call = self._once if expected_version else self._repeat
        answer = await call(lambda topics: topics.UpdateTopic, request)
        return topic_from_proto(answer.topic)

    async def pause_topic(self, name: str) -> Topic:
        """Stop delivering messages of a topic, until `resume_topic`; publishing goes on."""
        request = topic_pb2.PauseTopicRequest(name=check_topic_name(name))
        answer = await self._repeat(lambda topics: topics.PauseTopic, request)
        return topic_from_proto(answer.topic)

    async def resume_topic(self, name: str) -> Topic:
        """Deliver messages of a topic again, except of queues that are paused themselves."""
        request = topic_pb2.ResumeTopicRequest(name=check_topic_name(name))
        answer = await self._repeat(lambda topics: topics.ResumeTopic, request)
        return topic_from_proto(answer.topic)

    async def delete_topic(self, name: str, *, force: bool = False) -> int:
        """Delete a topic; returns how many queues it had."""
        request = topic_pb2.DeleteTopicRequest(
            name=check_topic_name(name), force=check_bool("force", force)
        )
        return (await self._once(lambda topics: topics.DeleteTopic, request)).queues

    # --- queues --------------------------------------------------------------------------------

    def list_queues(
        self, topic: str, *, lite_prefix: str = "", page_size: int = PAGE_SIZE_MAX
    ) -> AsyncIterator[Queue]:
        """The queues of a topic by partition and name, page by page; none is loaded."""
        request = topic_pb2.ListQueuesRequest(
            topic=check_topic_name(topic, "topic"),
            lite_prefix=check_str("lite_prefix", lite_prefix, limits.LITE_NAME_BYTES_MAX),
            page_size=check_int("page_size", page_size, 1, UINT32_MAX),
        )
        return self._queues(request)

    async def _queues(self, request: topic_pb2.ListQueuesRequest) -> AsyncIterator[Queue]:
        async for page in pages(self._repeated(lambda topics: topics.ListQueues), request):
            for each in page.queues:
                yield _queue(each)

    async def get_queue(self, lmq_name: str) -> QueueStats:
        request = topic_pb2.GetQueueRequest(lmq_name=check_lmq_name(lmq_name))
        answer = await self._repeat(lambda topics: topics.GetQueue, request)
        return QueueStats(_queue(answer.queue), tuple(map(_group, answer.groups)))

    async def peek_queue(
        self, lmq_name: str, *, offset: int = 0, max_messages: int = 10, group: str = ""
    ) -> list[StoredMessage]:
        """Messages by offset without reserving them; with a group, those it has not settled."""
        request = topic_pb2.PeekQueueRequest(
            lmq_name=check_lmq_name(lmq_name),
            offset=check_int("offset", offset, 0),
            max_messages=check_int("max_messages", max_messages, 1, limits.PEEK_MESSAGES_MAX),
            group=check_group(group) if group != "" else "",
        )
        answer = await self._repeat(lambda topics: topics.PeekQueue, request)
        return [_stored(each) for each in answer.messages]

    async def peek_all(self, lmq_name: str, *, group: str = "") -> AsyncIterator[StoredMessage]:
        """All messages by partition and offset, page by page, as `peek_queue` shows them."""
        request = topic_pb2.PeekQueueRequest(
            lmq_name=check_lmq_name(lmq_name),
            max_messages=limits.PEEK_MESSAGES_MAX,
            group=check_group(group) if group != "" else "",
        )
        async for page in pages(self._repeated(lambda topics: topics.PeekQueue), request):
            for each in page.messages:
                yield _stored(each)

    async def purge_queue(self, lmq_name: str) -> int:
        """Delete all messages that are not reserved; returns how many."""
        request = topic_pb2.PurgeQueueRequest(lmq_name=check_lmq_name(lmq_name))
        return (await self._once(lambda topics: topics.PurgeQueue, request)).messages

    async def pause_queue(self, lmq_name: str) -> Queue:
        """Stop delivering messages of a queue, until `resume_queue`; publishing goes on."""
        request = topic_pb2.PauseQueueRequest(lmq_name=check_lmq_name(lmq_name))
        answer = await self._repeat(lambda topics: topics.PauseQueue, request)
        return _queue(answer.queue)

    async def resume_queue(self, lmq_name: str) -> Queue:
        """Deliver messages of a queue again, unless its topic is paused."""
        request = topic_pb2.ResumeQueueRequest(lmq_name=check_lmq_name(lmq_name))
        answer = await self._repeat(lambda topics: topics.ResumeQueue, request)
        return _queue(answer.queue)

    async def delete_queue(self, lmq_name: str) -> int:
        """Delete a queue; returns how many messages it had."""
        request = topic_pb2.DeleteQueueRequest(lmq_name=check_lmq_name(lmq_name))
        return (await self._once(lambda topics: topics.DeleteQueue, request)).messages

    async def evict_queue(self, lmq_name: str) -> Eviction:
        """Try to unload a queue now; returns the outcome (I6)."""
        request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=check_lmq_name(lmq_name))
        answer = await self._repeat(lambda topics: topics.TryEvictInactiveQueue, request)
        outcomes = {each.partition: _outcome(each.outcome) for each in answer.partitions}
        return Eviction(_outcome(answer.outcome), outcomes)

    async def cancel_scheduled(self, lmq_name: str, partition: int, schedule_id: int) -> int:
        """Cancel a run that is not yet due; returns how many messages it had."""
        request = topic_pb2.CancelScheduledRequest(
            lmq_name=check_lmq_name(lmq_name),
            partition=check_int("partition", partition, 0, limits.PARTITIONS_MAX - 1),
            schedule_id=check_int("schedule_id", schedule_id, 1),
        )
        return (await self._once(lambda topics: topics.CancelScheduled, request)).messages

    # --- groups --------------------------------------------------------------------------------

    async def list_groups(self, lmq_name: str) -> list[Group]:
        request = topic_pb2.ListGroupsRequest(lmq_name=check_lmq_name(lmq_name))
        answer = await self._repeat(lambda topics: topics.ListGroups, request)
        return [_group(each) for each in answer.groups]

    async def reset_group(
        self, lmq_name: str, group: str, position: Position, number: int = 0
    ) -> list[Group]:
        """Move the progress of a group; reservations of its consumers are revoked.

        `number` belongs to `last` (messages), `offset`, and `time` (Unix time in milliseconds: the
        group continues with the first message that was published then or later).
        """
        if position not in get_args(Position):
            known = ", ".join(get_args(Position))
            raise InvalidArgument(f"position is one of {known}", field="position")
        least = 1 if position == "last" else 0
        number = check_int("number", number, least)
        start = subscription_pb2.StartPosition()
        if position in ("earliest", "latest"):
            setattr(start, position, True)
        elif position == "time":
            if number > limits.TIME_MS_MAX:
                raise InvalidArgument("number is after the year 9999", field="number")
            start.time.FromMilliseconds(number)
        else:
            setattr(start, position, number)
        request = topic_pb2.ResetGroupRequest(
            lmq_name=check_lmq_name(lmq_name), group=check_group(group), start=start
        )
        answer = await self._once(lambda topics: topics.ResetGroup, request)
        return [_group(each) for each in answer.groups]

    async def delete_group(self, lmq_name: str, group: str) -> None:
        request = topic_pb2.DeleteGroupRequest(
            lmq_name=check_lmq_name(lmq_name), group=check_group(group)
        )
        await self._once(lambda topics: topics.DeleteGroup, request)


def _queue(proto: topic_pb2.Queue) -> Queue:
    oldest = proto.HasField("oldest_publish_time")
    return Queue(
        lmq_name=proto.lmq_name,
        queue_id=proto.queue_id,
        partition=proto.partition,
        materialized=proto.activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED,
        messages=proto.messages,
        bytes=proto.bytes,
        inflight=proto.inflight,
        next_offset=proto.next_offset,
        oldest_publish_time_ms=proto.oldest_publish_time.ToMilliseconds() if oldest else None,
        last_activity_time_ms=proto.last_activity_time.ToMilliseconds(),
        create_time_ms=proto.create_time.ToMilliseconds(),
        paused=proto.paused,
        topic_paused=proto.topic_paused,
    )


def _group(proto: topic_pb2.Group) -> Group:
    return Group(
        name=proto.name,
        partition=proto.partition,
        cursor=proto.cursor,
        unsettled=proto.unsettled,
        inflight=proto.inflight,
        owner_client_id=proto.owner_client_id,
        owner_epoch=proto.owner_epoch,
    )


def _stored(proto: topic_pb2.PeekedMessage) -> StoredMessage:
    return StoredMessage(
        offset=proto.offset,
        payload=proto.message.payload,
        headers=dict(proto.message.headers),
        publish_time_ms=proto.publish_time.ToMilliseconds(),
        fairness_key=proto.fairness_key,
        partition=proto.partition,
    )


def _outcome(outcome: topic_pb2.EvictionOutcome.ValueType) -> str:
    return word_of(topic_pb2.EvictionOutcome, outcome, "EVICTION_OUTCOME_")
