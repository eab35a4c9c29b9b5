"""Claiming: which broker owns the partition, and which topics it knows.

Storage is the judge: a claim durably raises the broker epoch, and whoever held a lower one is
fenced. The epoch fences the sender; reservations and their receipts stay good.
"""

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_u64x3
from storage_svc.engines.paging import scan_all
from storage_svc.operations import (
    ApplyTopic,
    Claimed,
    ClaimPartition,
    DropTopic,
    PutTopic,
    ReleaseUnreported,
    Reported,
    TopicStored,
)
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.counters import put_claim
from storage_svc.queue.reservation import Ending
from tidemark.errors import Fenced
from tidemark.topics import validate


async def claim(commit: CommitContext, operation: ClaimPartition) -> Claimed:
    """A broker becomes the owner, unless a newer assignment names another."""
    held, asked = commit.state.claim, operation.claim
    if asked.assignment_version < held.assignment_version:
        raise Fenced(
            f"partition {commit.partition} was assigned to {held.broker_id} since",
            owner=held.address,
        )
    same = held.broker_id == asked.broker_id and held.incarnation == asked.incarnation
    newer = asked.assignment_version > held.assignment_version
    if operation.held_epoch and not same and not newer:
        raise Fenced(
            f"partition {commit.partition} was claimed by {held.broker_id} since",
            owner=held.address,
        )
    if not same:
        commit.handles.forget_trackers()
    commit.state.claim = asked
    commit.counters.broker_epoch += 1
    put_claim(commit.journal.batch, asked)
    return Claimed(commit.counters.broker_epoch, same)


async def release_unreported(commit: CommitContext, operation: ReleaseUnreported) -> Reported:
    """Hand out again what the owner was given but never heard of; tell it what is gone."""
    incarnation = commit.state.claim.incarnation
    released = 0
    ended = dict(operation.held)
    keys = [key async for key, _ in scan_all(commit.engine, Table.DEADLINES, b"", None)]
    for key in keys:
        _, queue_id, reservation_id = read_u64x3(key)
        if ended.pop(reservation_id, None) is not None:
            continue
        stored = rows.reservation_key(queue_id, reservation_id)
        (value,) = await commit.engine.load(Table.RESERVATIONS, [stored])
        if value is None or rows.incarnation_of(value) != incarnation:
            continue
        found = await commit.reservation(queue_id, reservation_id)
        if found is not None and found[1].live:
            handle, reservation = found
            handle.state.settle(reservation, (), Ending.RELEASE, commit.now_ms, commit.journal)
            released += 1
    gone = [each for each, queue_id in ended.items() if await _is_gone(commit, queue_id, each)]
    return Reported(released, tuple(gone))


async def _is_gone(commit: CommitContext, queue_id: int, reservation_id: int) -> bool:
    """Whether nobody can settle it any more, not even by repeating a lost settlement (V6)."""
    found = await commit.reservation(queue_id, reservation_id)
    return found is None or found[1].expired


async def put_topic(commit: CommitContext, operation: PutTopic) -> TopicStored:
    """Create or change a topic; versions are given here alone."""
    topics, counters = commit.topics, commit.counters
    version = counters.topic_version + 1
    batch = commit.journal.batch
    if operation.create:
        topic = topics.create(operation.topic, version, commit.now_ms, batch)
    else:
        topic = topics.update(
            operation.topic, operation.expected_version, version, commit.now_ms, batch
        )
    counters.topic_version = max(counters.topic_version, topic.version)
    commit.handles.topic_changed(topic)
    return TopicStored(topic, topic.version)


async def drop_topic(commit: CommitContext, operation: DropTopic) -> TopicStored:
    """Delete a topic; its queues are the caller's to delete first."""
    commit.counters.topic_version += 1
    version = commit.counters.topic_version
    commit.topics.delete(operation.name, version, commit.journal.batch)
    return TopicStored(None, version)


async def apply_topic(commit: CommitContext, operation: ApplyTopic) -> TopicStored:
    """Take a version that the home partition gave, if it is newer."""
    topics = commit.topics
    if not operation.deleted:
        validate(operation.topic, commit.partitions)
    if topics.apply(operation.topic, operation.deleted, commit.journal.batch):
        counters = commit.counters
        counters.topic_version = max(counters.topic_version, operation.topic.version)
        if not operation.deleted:
            commit.handles.topic_changed(operation.topic)
    return TopicStored(topics.find(operation.topic.name), topics.version(operation.topic.name))
