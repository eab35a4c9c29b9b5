"""Partition time on disk: what an operator or housekeeping decides must survive a restart."""

from typing import NamedTuple

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64
from storage_svc.partition.commit import CommitContext


class StampTime(NamedTuple):
    """Make a commit, and with it the counters durable: they hold whether deletions are suspended.

    Without it a partition at rest could be restarted before any commit has stored that.
    """

    async def apply(self, commit: CommitContext) -> None:
        commit.journal.batch.put(Table.META, b"time", u64(commit.now_ms))
