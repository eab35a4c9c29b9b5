"""The topic API: topics, queues and groups as operators and tools see them.

Translates and checks requests. `queue_partitions` asks storage, and `queue_totals` combines the
answers of the partitions of one queue.
"""

from typing import Any

import grpc

from broker_svc.api import cluster_members, queue_totals
from broker_svc.api.dead_letters import DeadLetters
from broker_svc.api.pauses import Pauses
from broker_svc.api.peek import Peek
from broker_svc.api.queue_partitions import QueuePartitions
from broker_svc.api.topic_changes import TopicChanges
from broker_svc.api.topic_deletion import TopicDeletion
from broker_svc.components import BrokerComponents
from broker_svc.idle.cleanup import EvictionOutcome
from broker_svc.links.holders import FORWARDED, is_forwarded
from broker_svc.links.placement import TOPIC_HOME
from tidemark.api.broker.v1 import topic_pb2, topic_pb2_grpc
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.errors import GroupNotFound, InvalidArgument
from tidemark.names import validate_group, validate_topic
from tidemark.rpc.topic_codec import topic_to_proto

Context = grpc.aio.ServicerContext[Any, Any]


class TopicService(topic_pb2_grpc.TopicServiceServicer):
    """Everything about topics that is not publishing or consuming."""

    def __init__(self, components: BrokerComponents) -> None:
        self._components = components
        self._nodes = components.storage_nodes
        self._partitions = QueuePartitions(
            components.settings.partitions, components.holders, components.topics, self._nodes
        )
        self._dead_letters = DeadLetters(
            self._partitions, self._nodes, components.settings.partitions
        )
        self._changes = TopicChanges(components)
        self._pauses = Pauses(components.topics, self._partitions, self._changes.put)

    # --- topics --------------------------------------------------------------------------------

    async def CreateTopic(
        self, request: topic_pb2.CreateTopicRequest, context: Context
    ) -> topic_pb2.CreateTopicResponse:
        topic = await self._changes.create(request)
        return topic_pb2.CreateTopicResponse(topic=topic_to_proto(topic))

    async def UpdateTopic(
        self, request: topic_pb2.UpdateTopicRequest, context: Context
    ) -> topic_pb2.UpdateTopicResponse:
        topic = await self._changes.update(request)
        return topic_pb2.UpdateTopicResponse(topic=topic_to_proto(topic))

    async def GetTopic(
        self, request: topic_pb2.GetTopicRequest, context: Context
    ) -> topic_pb2.GetTopicResponse:
        validate_topic(request.name)
        topic = await self._components.topics.renew(request.name)
        return topic_pb2.GetTopicResponse(topic=topic_to_proto(topic))

    async def ListTopics(
        self, request: topic_pb2.ListTopicsRequest, context: Context
    ) -> topic_pb2.ListTopicsResponse:
        home = await self._nodes.storage(TOPIC_HOME)
        listed = await home.ListTopics(
            storage_pb2.ListTopicsRequest(
                partition=TOPIC_HOME, page_size=request.page_size, page_token=request.page_token
            )
        )
        return topic_pb2.ListTopicsResponse(
            topics=listed.topics, next_page_token=listed.next_page_token
        )

    async def DeleteTopic(
        self, request: topic_pb2.DeleteTopicRequest, context: Context
    ) -> topic_pb2.DeleteTopicResponse:
        validate_topic(request.name)
        deletion = TopicDeletion(self._components, self._partitions)
        queues = await deletion.delete(request.name, force=request.force)
        return topic_pb2.DeleteTopicResponse(queues=queues)

    async def PauseTopic(
        self, request: topic_pb2.PauseTopicRequest, context: Context
    ) -> topic_pb2.PauseTopicResponse:
        topic = await self._pauses.pause_topic(request.name, True)
        return topic_pb2.PauseTopicResponse(topic=topic_to_proto(topic))

    async def ResumeTopic(
        self, request: topic_pb2.ResumeTopicRequest, context: Context
    ) -> topic_pb2.ResumeTopicResponse:
        topic = await self._pauses.pause_topic(request.name, False)
        return topic_pb2.ResumeTopicResponse(topic=topic_to_proto(topic))

    # --- queues --------------------------------------------------------------------------------

    async def ListQueues(
        self, request: topic_pb2.ListQueuesRequest, context: Context
    ) -> topic_pb2.ListQueuesResponse:
        await self._components.topics.get(request.topic)
        limit = queue_totals.page_size(request.page_size)
        partition, token = queue_totals.read_token(
            request.page_token, self._components.settings.partitions
        )
        response = topic_pb2.ListQueuesResponse()
        while partition < self._components.settings.partitions:
            storage = await self._nodes.storage(partition)
            page = await storage.ListQueues(
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
            response.next_page_token = queue_totals.page_token(partition, token)
        return response

    async def GetQueue(
        self, request: topic_pb2.GetQueueRequest, context: Context
    ) -> topic_pb2.GetQueueResponse:
        found = await self._partitions.read(request.lmq_name)
        return topic_pb2.GetQueueResponse(
            queue=queue_totals.whole(found), groups=queue_totals.groups(found)
        )

    async def PauseQueue(
        self, request: topic_pb2.PauseQueueRequest, context: Context
    ) -> topic_pb2.PauseQueueResponse:
        await self._pauses.pause_queue(request.lmq_name, True)
        return topic_pb2.PauseQueueResponse(queue=await self._queue(request.lmq_name))

    async def ResumeQueue(
        self, request: topic_pb2.ResumeQueueRequest, context: Context
    ) -> topic_pb2.ResumeQueueResponse:
        await self._pauses.pause_queue(request.lmq_name, False)
        return topic_pb2.ResumeQueueResponse(queue=await self._queue(request.lmq_name))

    async def _queue(self, lmq_name: str) -> topic_pb2.Queue:
        return queue_totals.whole(await self._partitions.read(lmq_name))

    async def DeleteQueue(
        self, request: topic_pb2.DeleteQueueRequest, context: Context
    ) -> topic_pb2.DeleteQueueResponse:
        remove = exchange_pb2.RemoveQueue(lmq_name=request.lmq_name)
        operation = exchange_pb2.Operation(remove_queue=remove)
        try:
            results = await self._partitions.change(request.lmq_name, operation)
        finally:  # some partitions may have deleted it even if others were unreachable
            self._components.tracking.queue_deleted(request.lmq_name, self._components.links)
            self._components.dispatcher.queue_forgotten(request.lmq_name)
        messages = sum(result.removed.messages for result in results)
        return topic_pb2.DeleteQueueResponse(messages=messages)

    async def PurgeQueue(
        self, request: topic_pb2.PurgeQueueRequest, context: Context
    ) -> topic_pb2.PurgeQueueResponse:
        purge = exchange_pb2.Purge(lmq_name=request.lmq_name)
        results = await self._partitions.change(
            request.lmq_name, exchange_pb2.Operation(purge=purge)
        )
        messages = sum(result.removed.messages for result in results)
        return topic_pb2.PurgeQueueResponse(messages=messages)

    async def PeekQueue(
        self, request: topic_pb2.PeekQueueRequest, context: Context
    ) -> topic_pb2.PeekQueueResponse:
        async def has_group() -> bool:
            return await self._partitions.has_group(request.lmq_name, request.group)

        async def look(page: storage_pb2.PeekQueueRequest) -> storage_pb2.PeekQueueResponse:
            return await (await self._nodes.storage(page.partition)).PeekQueue(page)

        partitions = await self._partitions.of(request.lmq_name)
        return await Peek(request, partitions, look, has_group).page()

    async def CancelScheduled(
        self, request: topic_pb2.CancelScheduledRequest, context: Context
    ) -> topic_pb2.CancelScheduledResponse:
        if request.partition not in await self._partitions.of(request.lmq_name):
            raise InvalidArgument("the queue is not in this partition", field="partition")
        unschedule = exchange_pb2.Unschedule(
            lmq_name=request.lmq_name, schedule_id=request.schedule_id
        )
        operation = exchange_pb2.Operation(unschedule=unschedule)
        result = await self._partitions.call(request.partition, operation)
        return topic_pb2.CancelScheduledResponse(messages=result.removed.messages)

    async def RedriveDeadLetters(
        self, request: topic_pb2.RedriveDeadLettersRequest, context: Context
    ) -> topic_pb2.RedriveDeadLettersResponse:
        return await self._dead_letters.redrive(request)

    async def ListDeadLetters(
        self, request: topic_pb2.ListDeadLettersRequest, context: Context
    ) -> topic_pb2.ListDeadLettersResponse:
        return await self._dead_letters.list_page(request)

    async def DeleteDeadLetters(
        self, request: topic_pb2.DeleteDeadLettersRequest, context: Context
    ) -> topic_pb2.DeleteDeadLettersResponse:
        return await self._dead_letters.delete(request)

    async def ListOutbox(
        self, request: topic_pb2.ListOutboxRequest, context: Context
    ) -> topic_pb2.ListOutboxResponse:
        return await self._dead_letters.list_outbox(request)

    async def DropOutbox(
        self, request: topic_pb2.DropOutboxRequest, context: Context
    ) -> topic_pb2.DropOutboxResponse:
        return await self._dead_letters.drop_outbox(request)

    # --- groups --------------------------------------------------------------------------------

    async def ListGroups(
        self, request: topic_pb2.ListGroupsRequest, context: Context
    ) -> topic_pb2.ListGroupsResponse:
        found = await self._partitions.read(request.lmq_name)
        return topic_pb2.ListGroupsResponse(groups=queue_totals.groups(found))

    async def ResetGroup(
        self, request: topic_pb2.ResetGroupRequest, context: Context
    ) -> topic_pb2.ResetGroupResponse:
        validate_group(request.group)
        if request.start.WhichOneof("position") is None:
            raise InvalidArgument("a reset needs a start position", field="start")
        if not await self._partitions.has_group(request.lmq_name, request.group):
            raise GroupNotFound(f"there is no group {request.group}", group=request.group)
        place = exchange_pb2.PlaceGroup(
            lmq_name=request.lmq_name, group=request.group, start=request.start
        )
        await self._partitions.change(request.lmq_name, exchange_pb2.Operation(place_group=place))
        found = await self._partitions.read(request.lmq_name)
        groups = [group for each in found for group in each.groups if group.name == request.group]
        return topic_pb2.ResetGroupResponse(groups=groups)

    async def DeleteGroup(
        self, request: topic_pb2.DeleteGroupRequest, context: Context
    ) -> topic_pb2.DeleteGroupResponse:
        validate_group(request.group)
        remove = exchange_pb2.RemoveGroup(lmq_name=request.lmq_name, group=request.group)
        await self._partitions.change(request.lmq_name, exchange_pb2.Operation(remove_group=remove))
        self._components.dispatcher.queue_forgotten(request.lmq_name)
        return topic_pb2.DeleteGroupResponse()

    # --- diagnostics ---------------------------------------------------------------------------

    async def TryEvictInactiveQueue(
        self, request: topic_pb2.TryEvictInactiveQueueRequest, context: Context
    ) -> topic_pb2.TryEvictInactiveQueueResponse:
        evictions: dict[int, topic_pb2.EvictionOutcome.ValueType] = {}
        partitions = await self._partitions.of(request.lmq_name)
        holders = self._components.holders
        here = [number for number in partitions if not holders.address(number)]
        for partition in here:
            outcome = await self._components.cleanup.evict((partition, request.lmq_name))
            evictions[partition] = _outcome(outcome)
        others = {holders.address(number) for number in partitions} - {""}
        for address in () if is_forwarded(context) else others:
            stub = await holders.topics(address)
            answer = await stub.TryEvictInactiveQueue(request, metadata=FORWARDED)
            evictions |= {each.partition: each.outcome for each in answer.partitions}
        response = topic_pb2.TryEvictInactiveQueueResponse()
        overall = evicted = _outcome(EvictionOutcome.EVICTED)
        for partition in partitions:
            if partition in evictions:
                outcome_there = evictions[partition]
                response.partitions.add(partition=partition, outcome=outcome_there)
                overall = outcome_there if overall == evicted else overall
        response.outcome = overall
        return response

    async def ListPartitions(
        self, request: topic_pb2.ListPartitionsRequest, context: Context
    ) -> topic_pb2.ListPartitionsResponse:
        partitions = await cluster_members.list_partitions(self._components)
        return topic_pb2.ListPartitionsResponse(partitions=partitions)

    async def DescribeCluster(
        self, request: topic_pb2.DescribeClusterRequest, context: Context
    ) -> topic_pb2.DescribeClusterResponse:
        return await cluster_members.describe(self._components)

    async def MovePartition(
        self, request: topic_pb2.MovePartitionRequest, context: Context
    ) -> topic_pb2.MovePartitionResponse:
        version = await cluster_members.move(self._components, request)
        return topic_pb2.MovePartitionResponse(assignment_version=version)

    async def DrainMember(
        self, request: topic_pb2.DrainMemberRequest, context: Context
    ) -> topic_pb2.DrainMemberResponse:
        version = await cluster_members.drain(self._components, request.member_id)
        return topic_pb2.DrainMemberResponse(assignment_version=version)

    async def ConfirmPartitionTime(
        self, request: topic_pb2.ConfirmPartitionTimeRequest, context: Context
    ) -> topic_pb2.ConfirmPartitionTimeResponse:
        storage = await self._nodes.storage(request.partition)
        confirmed = await storage.ConfirmPartitionTime(
            storage_pb2.ConfirmPartitionTimeRequest(
                partition=request.partition, to_wall_clock=request.to_wall_clock
            )
        )
        response = topic_pb2.ConfirmPartitionTimeResponse()
        response.partition_time.FromMilliseconds(confirmed.partition_time_ms)
        return response

    async def ConfirmLoss(
        self, request: topic_pb2.ConfirmLossRequest, context: Context
    ) -> topic_pb2.ConfirmLossResponse:
        storage = await self._nodes.storage(request.partition)
        confirmed = await storage.ConfirmLoss(
            storage_pb2.ConfirmLossRequest(partition=request.partition)
        )
        return topic_pb2.ConfirmLossResponse(
            witnessed_commit=confirmed.witnessed_commit, found_commit=confirmed.found_commit
        )


def _outcome(outcome: EvictionOutcome) -> topic_pb2.EvictionOutcome.ValueType:
    return topic_pb2.EvictionOutcome.Value(f"EVICTION_OUTCOME_{outcome.value}")
