"""Loading and unloading queues, at a broker's request or by housekeeping (I2, I4, I9)."""

from enum import Enum
from typing import NamedTuple

from storage_svc.operations.abandoned_groups import join_groups
from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.operation import ExchangeDecoders, Removed
from storage_svc.partition.commit import CommitContext
from storage_svc.turns import release
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2

UNLOADS_PER_COMMIT_MAX = 1000
PRODUCERS_PER_COMMIT_MAX = 100


class Materialized(NamedTuple):
    """The queue is loaded."""

    queue_id: int
    was_cold: bool
    created: bool

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.materialize.queue_id = self.queue_id
        proto.materialize.was_cold = self.was_cold
        proto.materialize.created = self.created


class Materialize(NamedTuple):
    """Load a queue for a broker, which tracks it from now on and will ask to unload it."""

    lmq_name: str
    create: bool = False
    groups: tuple[str, ...] = ()  # that have a consumer or an owner

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Materialize) -> "Materialize":
        groups = tuple(map(group_name, proto.groups))
        return cls(queue_name(proto.lmq_name), proto.create, groups)

    async def apply(self, commit: CommitContext) -> Materialized:
        was_cold = commit.handles.peek(self.lmq_name) is None
        queues = commit.counters.queues
        if self.create:
            handle = await commit.queue_or_new(self.lmq_name)
        else:
            handle = await commit.queue(self.lmq_name)
        commit.handles.track(self.lmq_name)
        if self.groups:
            join_groups(commit, handle, self.groups)
        created = commit.counters.queues != queues
        return Materialized(handle.queue_id, was_cold, created)


class UnloadOutcome(Enum):
    """Storage's answer to `Unmaterialize`; the values are outcomes of I4."""

    EVICTED = "EVICTED"
    NOT_PRESENT = "NOT_PRESENT"
    NOT_MATERIALIZED = "NOT_MATERIALIZED"
    HAS_INFLIGHT = "HAS_INFLIGHT"
    RACE_LOST = "RACE_LOST"

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        outcome = topic_pb2.EvictionOutcome.Value(f"EVICTION_OUTCOME_{self.value}")
        proto.unmaterialize.outcome = outcome


class Unmaterialize(NamedTuple):
    """Unload a queue that a broker has found idle."""

    lmq_name: str

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Unmaterialize) -> "Unmaterialize":
        return cls(queue_name(proto.lmq_name))

    async def apply(self, commit: CommitContext) -> UnloadOutcome:
        return await _unload(commit, self.lmq_name)


class RunHousekeeping(NamedTuple):
    """Unload idle queues that no broker tracks, and forget producers that are gone.

    Answers how many queues were unloaded.
    """

    async def apply(self, commit: CommitContext) -> Removed:
        idle = commit.handles.untracked(commit.now_ms)[:UNLOADS_PER_COMMIT_MAX]
        for lmq_name in idle:
            await _unload(commit, lmq_name)
        if commit.deletions_refused is None:
            await commit.state.producers.forget_old(
                commit.now_ms, PRODUCERS_PER_COMMIT_MAX, commit.journal.batch
            )
        return Removed(len(idle))


async def _unload(commit: CommitContext, lmq_name: str) -> UnloadOutcome:
    handle = commit.handles.peek(lmq_name)
    if handle is None:
        deleted = lmq_name in commit.journal.removed_names
        if deleted or not await commit.handles.exists(lmq_name):
            return UnloadOutcome.NOT_PRESENT
        return UnloadOutcome.NOT_MATERIALIZED
    if handle.state.has_inflight:
        return UnloadOutcome.HAS_INFLIGHT
    # The changes of this commit are not in the engine yet: they could not be loaded again.
    if handle.queue_id in commit.journal.changed_queues:
        return UnloadOutcome.RACE_LOST
    for group in handle.state.groups.values():
        commit.end_standing(group, ask_again=True)
    await commit.forget_lanes(handle.state)
    containers = handle.state.containers
    handle.state.prepare_to_unload(commit.journal)
    commit.handles.drop(lmq_name)
    release(containers)
    return UnloadOutcome.EVICTED


OPERATIONS: ExchangeDecoders = {
    "materialize": Materialize.from_proto,
    "unmaterialize": Unmaterialize.from_proto,
}
