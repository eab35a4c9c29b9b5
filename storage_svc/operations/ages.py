"""Review of the index of ages: compares entries whose time has come with their queues.

An entry is a lower bound (`engines/age_rows.py`). If nothing of its queue is due, the bound is out
of date: the messages it stood for have left, or were settled. It is then moved to the oldest
message that is there, or removed, so that a queue is reviewed about once per limit and not with
every pass.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

from storage_svc.engines import run_rows
from storage_svc.engines.age_rows import AgeKind
from storage_svc.engines.keys import prefix_end, successor, u64
from storage_svc.loading.recovery import stored_fairness_keys
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations.abandoned_groups import review_groups
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.queue import QueueState
from storage_svc.queue.run import Run
from tidemark.limits import RUN_MESSAGES_MAX

HEADERS_PER_LANE_MAX = 2_000
"""Headers that one review reads of a lane. If that does not decide, the queue counts as due: a pass
reads it beside the writer."""

POSTPONED_MS = 3_600_000
"""After how long an inactive queue in use is reviewed again."""

_AT = {kind: at for at, kind in enumerate(AgeKind)}  # its bound in `QueueRecord.indexed`
_PAGE = 64


class Reviewed(NamedTuple):
    """Whether anything is due of the queues that were reviewed."""

    due: bool
    blocked: bool = False
    """Whether messages of age stay for now: they are reserved, or a sweep removes them."""


class AgeEntry(NamedTuple):
    """A queue in the index, and the bound that it is there with."""

    time_ms: int
    queue_id: int


class ReviewAges(NamedTuple):
    """Compare entries of one kind with their queues, up to the first of which something is due."""

    kind: AgeKind
    topic: str  # "" for idle queues
    entries: tuple[AgeEntry, ...]
    last_ms: int
    """Messages published by then, and queues or groups unused since then, are due."""

    async def apply(self, commit: CommitContext) -> Reviewed:
        blocked = False
        await commit.prefetch([each.queue_id for each in self.entries])
        for entry in self.entries:
            found = await self._review(commit, *entry)
            if found.due:
                return found
            blocked |= found.blocked
        return Reviewed(False, blocked)

    async def _review(self, commit: CommitContext, time_ms: int, queue_id: int) -> Reviewed:
        kind, last_ms = self.kind, self.last_ms
        if queue_id in commit.journal.changed_queues:
            return Reviewed(False, blocked=True)  # its rows are out of date until after this commit
        handle = await commit.queue_by_id(queue_id, briefly=True)
        if handle is None or handle.state.record.indexed[_AT[kind]] != time_ms:
            commit.journal.ages.remove(kind, self.topic, time_ms, queue_id)  # of no queue
            return Reviewed(False)
        if queue_id in commit.journal.changed_queues:
            return Reviewed(False, blocked=True)  # loading it has dropped messages
        state = handle.state
        if kind is AgeKind.IDLE:
            return _review_idle(commit, state, last_ms)
        if kind is AgeKind.GROUPS:
            return Reviewed(review_groups(commit, handle, last_ms))
        found = await find_oldest(commit, state, kind, last_ms)
        if found.due:
            return Reviewed(True)
        if found.oldest_ms != time_ms:
            if kind is AgeKind.WAITING:
                state.record.waiting_since_ms = found.oldest_ms
            else:
                state.record.settled_since_ms = found.oldest_ms
            commit.journal.queue_changed(state.record)
        return Reviewed(False, 0 < found.oldest_ms <= last_ms)


def _review_idle(commit: CommitContext, state: QueueState, last_ms: int) -> Reviewed:
    record = state.record
    if record.messages or record.scheduled:
        record.idle_since_ms = 0  # until it is empty again
    elif record.last_activity_ms > last_ms:
        record.idle_since_ms = record.last_activity_ms
    elif record.paused or commit.state.is_in_use(record.lmq_name, commit.now_ms):
        record.idle_since_ms = last_ms + POSTPONED_MS
    else:
        return Reviewed(True)
    commit.journal.queue_changed(record)
    return Reviewed(False)


class Oldest(NamedTuple):
    """The oldest message of a kind; 0 if there is none. Undefined if one is due."""

    due: bool
    oldest_ms: int = 0


async def find_oldest(
    commit: CommitContext, state: QueueState, kind: AgeKind, last_ms: int
) -> Oldest:
    """Look for a message of a kind that is due: published by `last_ms`, and free to leave."""
    exhausted = state.exhausted_runs()
    oldest_ms = 0
    if not state.record.messages:
        return Oldest(False)
    for fairness_key in await stored_fairness_keys(commit.engine, state.record):
        read = 0
        async for run in _runs(commit, state, fairness_key, kind):
            read += 1
            if read > HEADERS_PER_LANE_MAX:
                return Oldest(True)
            if state.is_settled(run) is not (kind is AgeKind.SETTLED):
                continue
            if not 0 < oldest_ms <= run.publish_time_ms:
                oldest_ms = max(1, run.publish_time_ms)
            if run.publish_time_ms <= last_ms:
                if run.first_offset not in exhausted and not state.is_held(run):
                    return Oldest(True)
            elif not state.record.unordered:
                break
    return Oldest(False, oldest_ms)


async def _runs(
    commit: CommitContext, state: QueueState, fairness_key: str, kind: AgeKind
) -> AsyncIterator[Run]:
    """The stored runs of a lane that may be of a kind, in their order."""
    first, end = offsets_of(state, fairness_key, kind)
    purge = commit.state.erasures.purge_of(state.record.queue_id)
    prefix = run_rows.lane_prefix(state.record.queue_id, fairness_key)
    start, stop = prefix + u64(first), prefix_end(prefix) if end is None else prefix + u64(end)
    while start < stop:
        page = await scan_runs(commit.engine, purge, start, stop, limit=_PAGE)
        for run in run_rows.read_lane_runs(page):
            yield run
        if len(page) < _PAGE:
            return
        start = successor(page[-1][0])


def offsets_of(state: QueueState, fairness_key: str, kind: AgeKind) -> tuple[int, int | None]:
    """Where the runs of a kind lie in a lane: from the first offset, to the second if there is one.

    Every group has settled all runs before the first offset that any of them still has to hand out
    or has handed out, and none behind the last that all of them have handed out.
    """
    if kind is AgeKind.SETTLED:
        return 0, min(
            (
                max(group.base, lane.position if lane is not None else 0)
                for group in state.groups.values()
                for lane in (group.lanes.get(fairness_key),)
            ),
            default=0,
        )
    if not state.record.kept:
        return 0, None
    first = []
    for group in state.groups.values():
        lane = group.lanes.get(fairness_key)
        run_start = group.base if lane is None else lane.mark[0]
        if run_start <= group.base:  # a run that begins before the base may reach beyond it
            run_start = max(0, group.base - RUN_MESSAGES_MAX)
        first += [run_start, *group.outstanding]
    return min(first, default=0), None
