"""Partitions, queues and groups as operators see them: their state, encoded as protos."""

from storage_svc.api.codec import encode_health
from storage_svc.partition.partition import Partition
from storage_svc.reads.queues import GroupView, QueueView
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import PartitionFaulty
from tidemark.names import topic_of


def encode_partition(partition: Partition) -> topic_pb2.PartitionInfo:
    health = encode_health(partition.health)
    info = topic_pb2.PartitionInfo(
        partition=partition.number,
        state=health.state,
        faults=health.faults,
        reservations=partition.reservations,
        commits=partition.commits,
    )
    try:
        state = partition.state
    except PartitionFaulty:
        return info
    info.broker_id = state.claim.broker_id
    info.broker_address = state.claim.address
    info.broker_epoch = state.counters.broker_epoch
    info.storage_epoch = state.engine.storage_epoch
    info.queues = state.counters.queues
    info.messages = state.counters.messages
    info.bytes = state.counters.body_bytes
    info.published = state.counters.published
    info.delivered = state.counters.delivered
    info.acked = state.counters.acked
    info.materialized_queues = len(state.handles)
    info.paused_queues = state.counters.paused_queues
    info.paused_topics = state.topics.paused
    return info


def encode_queue(partition: Partition, view: QueueView) -> topic_pb2.Queue:
    record = view.record
    loaded = topic_pb2.QUEUE_ACTIVITY_MATERIALIZED
    queue = topic_pb2.Queue(
        lmq_name=record.lmq_name,
        queue_id=record.queue_id,
        partition=partition.number,
        activity=loaded if view.materialized else topic_pb2.QUEUE_ACTIVITY_IDLE,
        messages=record.messages + record.scheduled,
        bytes=record.body_bytes,
        inflight=view.inflight,
        next_offset=record.next_offset,
        paused=record.paused,
    )
    topic = partition.state.topics.find(topic_of(record.lmq_name))
    queue.topic_paused = topic is not None and topic.paused
    queue.last_activity_time.FromMilliseconds(record.last_activity_ms)
    queue.create_time.FromMilliseconds(record.create_time_ms)
    if view.oldest_publish_time_ms is not None:
        queue.oldest_publish_time.FromMilliseconds(view.oldest_publish_time_ms)
    return queue


def encode_group(partition: Partition, view: GroupView) -> topic_pb2.Group:
    return topic_pb2.Group(
        name=view.name,
        cursor=view.cursor,
        unsettled=view.unsettled,
        inflight=view.inflight,
        owner_client_id=view.owner_client_id,
        owner_epoch=view.owner_epoch,
        partition=partition.number,
    )
