"""The topic API: topics, queues and groups as operators and tools see them.

Translates and checks, then asks storage: reads beside the writer by unary calls, changes over the
links. A queue over several partitions is asked about in each of them and answered as one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from broker_svc.api import queue_totals as queue_views
from broker_svc.api.peek import Peek
from broker_svc.components import BrokerComponents
from broker_svc.idle.cleanup import EvictionOutcome
from broker_svc.links.partition_link import LinkState
from broker_svc.links.placement import partitions_of
from tidemark import limits, topics
from tidemark.api.broker.v1 import topic_pb2, topic_pb2_grpc
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2, storage_pb2_grpc
from tidemark.errors import (
    GroupNotFound,
    InvalidArgument,
    QueueNotFound,
    TidemarkError,
    TopicNotEmpty,
)
from tidemark.names import LmqName, validate_group, validate_topic
from tidemark.rpc.topic_codec import (
    settings_from_proto,
    settings_to_proto,
    topic_from_proto,
    topic_to_proto,
)
from tidemark.topics import Topic

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")

_UNREACHABLE = topic_pb2.PARTITION_STATE_UNSPECIFIED
_LINK_STATES = {
    LinkState.UP: topic_pb2.LINK_STATE_UP,
    LinkState.DOWN: topic_pb2.LINK_STATE_DOWN,
    LinkState.FAULTY: topic_pb2.LINK_STATE_FAULTY,
    LinkState.MOVED: topic_pb2.LINK_STATE_MOVED,
}


class TopicService(topic_pb2_grpc.TopicServiceServicer):
    """Everything about topics that is not publishing or consuming."""

    def __init__(
        self, components: BrokerComponents, storage: storage_pb2_grpc.StorageServiceStub
    ) -> None:
        self._components = components
        self._storage = storage

    # --- topics --------------------------------------------------------------------------------

    async def CreateTopic(
        self, request: topic_pb2.CreateTopicRequest, context: Context
    ) -> topic_pb2.CreateTopicResponse:
        topic = Topic(request.name, settings_from_proto(request.settings))
        topics.validate(topic, self._components.settings.partitions)
        stored = await self._put(topic, create=True)
        return topic_pb2.CreateTopicResponse(topic=topic_to_proto(stored))

    async def UpdateTopic(
        self, request: topic_pb2.UpdateTopicRequest, context: Context
    ) -> topic_pb2.UpdateTopicResponse:
        validate_topic(request.name)
        if not request.update_mask.paths:
            raise InvalidArgument("name the settings to change", field="update_mask")
        topic = await self._components.topics.renew(request.name)
        merged = settings_to_proto(topic.settings)
        for path in request.update_mask.paths:
            if path not in topics.SETTING_NAMES:
                raise InvalidArgument(f"there is no setting {path!r}", field="update_mask")
            merged.ClearField(path)  # type: ignore[arg-type]
        named = topic_pb2.TopicSettings()
        request.update_mask.MergeMessage(request.settings, named)
        merged.MergeFrom(named)
        changed = replace(topic, settings=settings_from_proto(merged))
        if changed.settings.partitions < topic.settings.partitions:
            raise InvalidArgument("a queue keeps the partitions it spans", field="partitions")
        if changed.settings.subscription is not topic.settings.subscription:
            # Its groups have owners, or consumers who would have to hear that there are some now.
            raise InvalidArgument("a topic stays shared or exclusive", field="subscription")
        topics.validate(changed, self._components.settings.partitions)
        version = request.expected_version or topic.version
        stored = await self._put(changed, create=False, expected_version=version)
        return topic_pb2.UpdateTopicResponse(topic=topic_to_proto(stored))

    async def GetTopic(
        self, request: topic_pb2.GetTopicRequest, context: Context
    ) -> topic_pb2.GetTopicResponse:
        validate_topic(request.name)
        topic = await self._components.topics.renew(request.name)
        return topic_pb2.GetTopicResponse(topic=topic_to_proto(topic))

    async def ListTopics(
        self, request: topic_pb2.ListTopicsRequest, context: Context
    ) -> topic_pb2.ListTopicsResponse:
        listed = await self._storage.ListTopics(
            storage_pb2.ListTopicsRequest(
                page_size=request.page_size, page_token=request.page_token
            )
        )
        return topic_pb2.ListTopicsResponse(
            topics=listed.topics, next_page_token=listed.next_page_token
        )

    async def DeleteTopic(
        self, request: topic_pb2.DeleteTopicRequest, context: Context
    ) -> topic_pb2.DeleteTopicResponse:
        validate_topic(request.name)
        topic = await self._components.topics.renew(request.name)
        deleted = 0
        partitions = range(self._components.settings.partitions)
        if not request.force:  # all of them before the first is deleted
            for number in partitions:
                await self._check_empty(number, request.name)
        try:
            for number in partitions:
                deleted += await self._delete_queues(number, request.name, force=request.force)
            gone = await self._storage.DeleteTopic(
                storage_pb2.DeleteTopicRequest(name=request.name)
            )
            await self._components.topics.fan_out(
                replace(topic, version=gone.version), deleted=True
            )
        finally:  # also of half a deletion
            self._components.subscriptions.topic_deleted(request.name)
        return topic_pb2.DeleteTopicResponse(queues=deleted)

    async def _put(self, topic: Topic, *, create: bool, expected_version: int = 0) -> Topic:
        """Store a topic at its home and bring it to all partitions."""
        stored = await self._storage.PutTopic(
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

    async def _check_empty(self, partition: int, topic: str) -> None:
        pages = storage_pb2.ListQueuesRequest(
            partition=partition, topic=topic, page_size=limits.PAGE_SIZE_MAX
        )
        while True:
            page = await self._storage.ListQueues(pages)
            full = [queue.lmq_name for queue in page.queues if queue.messages]
            if full:
                raise TopicNotEmpty(
                    f"queue {full[0]} holds messages; force deletes it too", queue=full[0]
                )
            pages.page_token = page.next_page_token
            if not pages.page_token:
                return

    async def _delete_queues(self, partition: int, topic: str, *, force: bool) -> int:
        """Without force, storage refuses a queue that was published to meanwhile."""
        deleted = 0
        while True:
            page = await self._storage.ListQueues(
                storage_pb2.ListQueuesRequest(
                    partition=partition, topic=topic, page_size=limits.PAGE_SIZE_MAX
                )
            )
            for queue in page.queues:
                remove = exchange_pb2.RemoveQueue(lmq_name=queue.lmq_name, only_empty=not force)
                try:
                    await self._call(partition, exchange_pb2.Operation(remove_queue=remove))
                finally:
                    self._components.tracking.queue_deleted(queue.lmq_name, [partition])
            deleted += len(page.queues)
            if not page.next_page_token:
                return deleted

    # --- queues --------------------------------------------------------------------------------

    async def ListQueues(
        self, request: topic_pb2.ListQueuesRequest, context: Context
    ) -> topic_pb2.ListQueuesResponse:
        await self._components.topics.get(request.topic)
        limit = request.page_size or limits.PAGE_SIZE_DEFAULT
        if limit > limits.PAGE_SIZE_MAX:
            raise InvalidArgument(f"at most {limits.PAGE_SIZE_MAX} a page", field="page_size")
        partition, token = queue_views.read_token(
            request.page_token, self._components.settings.partitions
        )
        response = topic_pb2.ListQueuesResponse()
        while partition < self._components.settings.partitions:
            page = await self._storage.ListQueues(
                storage_pb2.ListQueuesRequest(
                    partition=partition,
                    topic=request.topic,
                    lite_prefix=request.lite_prefix,
                    page_size=limit - len(response.queues),
                    page_token=token,
                )
            )
            response.queues.extend(page.queues)
            token = page.next_page_token
            if not token:
                partition += 1
            if len(response.queues) >= limit:
                break
        if partition < self._components.settings.partitions:
            response.next_page_token = queue_views.page_token(partition, token)
        return response

    async def GetQueue(
        self, request: topic_pb2.GetQueueRequest, context: Context
    ) -> topic_pb2.GetQueueResponse:
        found = await self._found(request.lmq_name)
        response = topic_pb2.GetQueueResponse(queue=found[0].queue)
        response.groups.extend(queue_views.groups(found))
        for each in found[1:]:
            queue_views.add(response.queue, each.queue)
        return response

    async def DeleteQueue(
        self, request: topic_pb2.DeleteQueueRequest, context: Context
    ) -> topic_pb2.DeleteQueueResponse:
        remove = exchange_pb2.RemoveQueue(lmq_name=request.lmq_name)
        operation = exchange_pb2.Operation(remove_queue=remove)
        try:
            results = await self._change(request.lmq_name, operation)
        finally:  # it may be gone from some partitions, also if others could not be reached
            self._components.tracking.queue_deleted(request.lmq_name, self._components.links)
            self._components.dispatcher.queue_forgotten(request.lmq_name)
        messages = sum(result.removed.messages for result in results)
        return topic_pb2.DeleteQueueResponse(messages=messages)

    async def PurgeQueue(
        self, request: topic_pb2.PurgeQueueRequest, context: Context
    ) -> topic_pb2.PurgeQueueResponse:
        purge = exchange_pb2.Purge(lmq_name=request.lmq_name)
        results = await self._change(request.lmq_name, exchange_pb2.Operation(purge=purge))
        messages = sum(result.removed.messages for result in results)
        return topic_pb2.PurgeQueueResponse(messages=messages)

    async def PeekQueue(
        self, request: topic_pb2.PeekQueueRequest, context: Context
    ) -> topic_pb2.PeekQueueResponse:
        async def has_group() -> bool:
            found = await self._found(request.lmq_name)
            return any(group.name == request.group for each in found for group in each.groups)

        partitions = await self._partitions(request.lmq_name)
        return await Peek(request, partitions, self._storage.PeekQueue, has_group).page()

    async def CancelScheduled(
        self, request: topic_pb2.CancelScheduledRequest, context: Context
    ) -> topic_pb2.CancelScheduledResponse:
        if request.partition not in await self._partitions(request.lmq_name):
            raise InvalidArgument("the queue does not live there", field="partition")
        unschedule = exchange_pb2.Unschedule(
            lmq_name=request.lmq_name, schedule_id=request.schedule_id
        )
        operation = exchange_pb2.Operation(unschedule=unschedule)
        result = await self._call(request.partition, operation)
        return topic_pb2.CancelScheduledResponse(messages=result.removed.messages)

    async def RedriveDeadLetters(
        self, request: topic_pb2.RedriveDeadLettersRequest, context: Context
    ) -> topic_pb2.RedriveDeadLettersResponse:
        redrive = exchange_pb2.Redrive(
            lmq_name=request.lmq_name,
            reason=request.reason,
            source_lmq_name=request.source_lmq_name,
            after_ms=_unix_ms(request, "after_time"),
            before_ms=_unix_ms(request, "before_time"),
            limit=request.limit,
            dry_run=request.dry_run,
        )
        response = topic_pb2.RedriveDeadLettersResponse()
        for partition in await self._partitions(request.lmq_name):
            if request.limit and response.messages >= request.limit:
                break
            redrive.page_token = b""
            await self._redrive(partition, redrive, response)
        return response

    async def _redrive(
        self,
        partition: int,
        redrive: exchange_pb2.Redrive,
        total: topic_pb2.RedriveDeadLettersResponse,
    ) -> None:
        """One partition, page by page: others get their turn in between."""
        limit = redrive.limit
        while True:
            operation = exchange_pb2.Operation(redrive=redrive)
            operation.redrive.limit = limit - total.messages if limit else 0
            try:
                removed = (await self._call(partition, operation)).removed
            except QueueNotFound:  # nothing died into this partition yet
                return
            total.messages += removed.messages
            total.orphans += removed.skipped
            redrive.page_token = removed.next_page_token
            if not removed.next_page_token or (limit and total.messages >= limit):
                return

    # --- groups --------------------------------------------------------------------------------

    async def ListGroups(
        self, request: topic_pb2.ListGroupsRequest, context: Context
    ) -> topic_pb2.ListGroupsResponse:
        found = await self._found(request.lmq_name)
        return topic_pb2.ListGroupsResponse(groups=queue_views.groups(found))

    async def ResetGroup(
        self, request: topic_pb2.ResetGroupRequest, context: Context
    ) -> topic_pb2.ResetGroupResponse:
        validate_group(request.group)
        if request.start.WhichOneof("position") is None:
            raise InvalidArgument("say where the group is to go on", field="start")
        found = await self._found(request.lmq_name)
        if not any(group.name == request.group for each in found for group in each.groups):
            raise GroupNotFound(f"there is no group {request.group}", group=request.group)
        place = exchange_pb2.PlaceGroup(
            lmq_name=request.lmq_name, group=request.group, start=request.start
        )
        await self._change(request.lmq_name, exchange_pb2.Operation(place_group=place))
        found = await self._found(request.lmq_name)
        groups = [group for each in found for group in each.groups if group.name == request.group]
        return topic_pb2.ResetGroupResponse(groups=groups)

    async def DeleteGroup(
        self, request: topic_pb2.DeleteGroupRequest, context: Context
    ) -> topic_pb2.DeleteGroupResponse:
        validate_group(request.group)
        remove = exchange_pb2.RemoveGroup(lmq_name=request.lmq_name, group=request.group)
        await self._change(request.lmq_name, exchange_pb2.Operation(remove_group=remove))
        self._components.dispatcher.queue_forgotten(request.lmq_name)
        return topic_pb2.DeleteGroupResponse()

    # --- diagnostics ---------------------------------------------------------------------------

    async def TryEvictInactiveQueue(
        self, request: topic_pb2.TryEvictInactiveQueueRequest, context: Context
    ) -> topic_pb2.TryEvictInactiveQueueResponse:
        response = topic_pb2.TryEvictInactiveQueueResponse()
        overall = EvictionOutcome.EVICTED
        for partition in await self._partitions(request.lmq_name):
            outcome = await self._components.cleanup.evict((partition, request.lmq_name))
            response.partitions.add(partition=partition, outcome=_outcome(outcome))
            if overall is EvictionOutcome.EVICTED:
                overall = outcome
        response.outcome = _outcome(overall)
        return response

    async def ListPartitions(
        self, request: topic_pb2.ListPartitionsRequest, context: Context
    ) -> topic_pb2.ListPartitionsResponse:
        response = topic_pb2.ListPartitionsResponse()
        try:
            described = await self._storage.DescribeStorage(storage_pb2.DescribeStorageRequest())
        except TidemarkError:
            for number in self._components.links:
                response.partitions.add(partition=number, state=_UNREACHABLE)
        else:
            for info in described.held:
                info.storage_address = self._components.settings.storage_address
                response.partitions.append(info)
        for info in response.partitions:
            link = self._components.links.get(info.partition)
            if link is not None:
                info.link_state = _LINK_STATES[link.state]
                info.link_detail = link.detail
        return response

    # --- asking --------------------------------------------------------------------------------

    async def _partitions(self, lmq_name: str) -> Sequence[int]:
        topic = await self._components.topics.get(LmqName.parse(lmq_name).topic)
        return partitions_of(lmq_name, topic, self._components.settings.partitions)

    async def _found(self, lmq_name: str) -> Sequence[storage_pb2.GetQueueResponse]:
        async def get(partition: int) -> storage_pb2.GetQueueResponse:
            return await self._storage.GetQueue(
                storage_pb2.GetQueueRequest(partition=partition, lmq_name=lmq_name)
            )

        return await self._in_each(lmq_name, get)

    async def _change(
        self, lmq_name: str, operation: exchange_pb2.Operation
    ) -> Sequence[exchange_pb2.OperationResult]:
        async def change(partition: int) -> exchange_pb2.OperationResult:
            copied = exchange_pb2.Operation()
            copied.CopyFrom(operation)
            return await self._call(partition, copied)

        return await self._in_each(lmq_name, change)

    async def _in_each(self, lmq_name: str, ask: Callable[[int], Awaitable[R]]) -> Sequence[R]:
        """The answers of the partitions that have the queue; at least one must."""
        partitions = await self._partitions(lmq_name)
        answers = await asyncio.gather(
            *(ask(partition) for partition in partitions), return_exceptions=True
        )
        found: list[R] = []
        missing: BaseException | None = None
        for answer in answers:
            if isinstance(answer, QueueNotFound | GroupNotFound):
                missing = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        if not found and missing is not None:
            raise missing
        return found

    async def _call(
        self, partition: int, operation: exchange_pb2.Operation
    ) -> exchange_pb2.OperationResult:
        return await self._components.links[partition].call(operation)


def _outcome(outcome: EvictionOutcome) -> topic_pb2.EvictionOutcome.ValueType:
    return topic_pb2.EvictionOutcome.Value(f"EVICTION_OUTCOME_{outcome.value}")


def _unix_ms(request: topic_pb2.RedriveDeadLettersRequest, field: str) -> int:
    """A time of the request; 0 if it is not set."""
    try:
        return max(0, int(getattr(request, field).ToMilliseconds()))
    except ValueError:
        raise InvalidArgument("not a time", field=field) from None
