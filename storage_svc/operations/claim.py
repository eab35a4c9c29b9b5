"""Claims: which broker holds the partition, what that broker has seen of it, and what it still has
reserved.

Storage decides: a claim durably raises the broker epoch, and a broker under a lower epoch is
fenced. The epoch fences the sender; reservations and their receipts stay valid.
"""

from collections.abc import Mapping
from typing import NamedTuple

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_u64, read_u64x3
from storage_svc.engines.paging import scan_all
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.commit_numbers import Loss, LossWitnessed
from storage_svc.partition.counters import Claim, put_claim
from storage_svc.queue.reservation import Ending
from storage_svc.turns import in_turns
from tidemark.errors import Fenced


class CheckWitness(NamedTuple):
    """Compare the partition with a commit that a caller saw answered.

    Raises LossWitnessed, which ends the service of the partition, if it does not have the commit.
    """

    commit: int

    async def apply(self, commit: CommitContext) -> None:
        numbers = commit.state.numbers
        if not numbers.has(self.commit):
            # The caller may have seen it at a node that has taken the partition over since.
            await commit.engine.verify()
            raise LossWitnessed(commit.partition, Loss(self.commit, numbers.last))


class Claimed(NamedTuple):
    """The claim is durable."""

    broker_epoch: int
    same_incarnation: bool
    lost_commits: bool
    """Whether the caller saw commits that are lost, which an operator has confirmed."""


class ClaimPartition(NamedTuple):
    """Let a broker hold the partition, unless a newer assignment names another one; raises what
    CheckWitness does."""

    claim: Claim
    held_epoch: int = 0  # of the caller's last claim; 0 for its first
    client_timeout_ms: int = 0
    witnessed_commit: int = 0  # the highest number that the caller saw answered

    async def apply(self, commit: CommitContext) -> Claimed:
        await CheckWitness(self.witnessed_commit).apply(commit)
        held, asked = commit.state.claim, self.claim
        if asked.assignment_version < held.assignment_version:
            raise Fenced(
                f"partition {commit.partition} was assigned to {held.broker_id} since",
                owner=held.address,
                assignment_version=str(held.assignment_version),
            )
        same = held.broker_id == asked.broker_id and held.incarnation == asked.incarnation
        newer = asked.assignment_version > held.assignment_version
        if self.held_epoch and held.broker_id and not same and not newer:
            by = held.broker_id
            if by == asked.broker_id:
                by = f"another broker with the same id, {by} (TIDEMARK_BROKER_ID),"
            raise Fenced(
                f"partition {commit.partition} was claimed by {by} since",
                owner=held.address,
                assignment_version=str(held.assignment_version),
            )
        if not same:
            commit.handles.forget_trackers()
        commit.state.hold.claimed(self.client_timeout_ms)
        commit.state.claim = asked
        first = commit.state.first_broker_epoch
        commit.counters.broker_epoch = max(first, commit.counters.broker_epoch + 1)
        put_claim(commit.journal.batch, asked)
        lost = not commit.state.numbers.is_stored(self.witnessed_commit)
        return Claimed(commit.counters.broker_epoch, same, lost)


class Reported(NamedTuple):
    """The report of held reservations was compared with what is stored."""

    released: int
    gone: tuple[int, ...]
    """Reservations of the report that have expired or are unknown."""


class ReleaseUnreported(NamedTuple):
    """Release what the broker's incarnation holds and did not report: those answers were lost."""

    held: Mapping[int, int]
    """The reservations of the report, each with its queue."""

    async def apply(self, commit: CommitContext) -> Reported:
        incarnation = commit.state.claim.incarnation
        released = 0
        ended = dict(self.held)
        stored = [row async for row in scan_all(commit.engine, Table.DEADLINES, b"", None)]
        async for part in in_turns(stored):
            for key, value in part:
                _, queue_id, reservation_id = read_u64x3(key)
                if ended.pop(reservation_id, None) is not None or read_u64(value) != incarnation:
                    continue
                found = await commit.reservation(queue_id, reservation_id)
                if found is not None and found[1].live:
                    state, reservation = found[0].state, found[1]
                    state.settle(reservation, (), Ending.RELEASE, commit.now_ms, commit.journal)
                    released += 1
        gone = [each for each, queue_id in ended.items() if await _is_gone(commit, queue_id, each)]
        return Reported(released, tuple(gone))


async def _is_gone(commit: CommitContext, queue_id: int, reservation_id: int) -> bool:
    """Whether it can no longer be settled, not even by repeating a lost settlement (V6)."""
    found = await commit.reservation(queue_id, reservation_id)
    return found is None or found[1].expired
