"""Reading ahead: what the operations of a commit name is loaded together, before they are applied.

For engines whose reads are trips to another process: a commit over a hundred queues that are not
loaded makes a few trips instead of hundreds. It changes nothing but what is in memory, and a read
that fails is repeated, and reported, by the operation that needs it.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

from storage_svc.operations.acks import AckReservations
from storage_svc.operations.operation import Operation
from storage_svc.operations.ownership import ConfirmOwnership, TakeOwnership
from storage_svc.operations.publish import Append, AppendRuns
from storage_svc.operations.renew import Renew
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.queue import QueueState
from tidemark.errors import TidemarkError
from tidemark.receipts import Receipt

_LOADING: Final = (Append, Reserve, TakeOwnership, ConfirmOwnership)
"""Operations that load the queue they name, and come in numbers."""

LANES_MAX: Final = 4
"""Fairness keys of a group that are read ahead; a reserve rarely gets further."""


async def read_ahead(commit: CommitContext, operations: Iterable[Operation[object]]) -> None:
    """Load the queues that operations name, and what reserves hand out first."""
    names: dict[str, None] = {}
    queue_ids: dict[int, None] = {}
    reserved: dict[tuple[str, str], None] = {}
    for each in operations:
        for receipt in _receipts(each):
            with suppress(TidemarkError):  # the operation is refused for it
                queue_ids[Receipt.decode(receipt).queue_id] = None
        if isinstance(each, _LOADING):
            names[each.lmq_name] = None
        if isinstance(each, AppendRuns):
            names.update((lmq_name, None) for lmq_name, *_ in each.runs)
        if isinstance(each, Reserve):
            reserved[each.lmq_name, each.group] = None
    if queue_ids:
        names.update(dict.fromkeys(await commit.read_names(list(queue_ids))))
    if names:
        with suppress(Exception):
            await commit.read_queues(list(names))
    # Of queues that are loaded, few have to read a page: a task for each would cost more.
    pages = [page for place in reserved for page in _pages(commit, *place)]
    if pages:
        await asyncio.gather(*(commit.read_lane(*each) for each in pages), return_exceptions=True)


def _pages(
    commit: CommitContext, lmq_name: str, group_name: str
) -> Iterator[tuple[QueueState, Group, Lane]]:
    """The lanes whose pages a reserve would read one by one."""
    handle = commit.handles.peek(lmq_name)
    group = None if handle is None else handle.state.groups.get(group_name)
    if handle is None or group is None or handle.state.paused:
        return
    for lane in islice(group.lanes.values(), LANES_MAX):
        if lane.needs_page:
            yield handle.state, group, lane


def _receipts(operation: object) -> Iterable[bytes]:
    if isinstance(operation, Settle):
        return (operation.receipt,)
    if isinstance(operation, AckReservations):
        return operation.receipts
    return [each.receipt for each in operation.held] if isinstance(operation, Renew) else ()
