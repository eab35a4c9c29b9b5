"""PendingApply: what the executors do with a plan, call by call, beside the data.

A plan arrives in the order in which it was read, storage partition by storage partition; nothing is
gathered or moved between machines. A task that dies may be run again: storage finds what is gone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Final

import pyarrow as pa

from spark_batch.passes.calls import RUNS_PER_ROW_MAX, Call, fold, pack
from spark_batch.storage_client import PendingApply, StorageClient

CALLS_UNDER_WAY: Final = 2
"""Calls of one task that storage has at a time: the next is there when one is done."""

OUTCOME: Final = (
    "topic string, retention_type string, removed bigint, bytes bigint, stale bigint, calls bigint"
)
"""What a task reports per topic and type; `removed` counts messages, queues or records."""

_Totals = dict[tuple[str, str], list[int]]


def applier(
    addresses: Mapping[int, str], pass_id: str, batch_size: int, traceparent: str = ""
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `mapInArrow`; `addresses` are the addresses of storage by partition.

    Executors are other processes: `traceparent` makes their calls part of the pass's trace.
    """
    return partial(_apply, dict(addresses), pass_id, batch_size, traceparent)


def _apply(
    addresses: Mapping[int, str],
    pass_id: str,
    batch_size: int,
    traceparent: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    totals: _Totals = {}
    clients: dict[str, StorageClient] = {}
    rows_max = min(batch_size, RUNS_PER_ROW_MAX)
    plan = chain.from_iterable(fold(batch, rows_max) for batch in batches)
    under_way: deque[tuple[Call, StorageClient, PendingApply]] = deque()
    with ExitStack() as opened:
        for call in pack(plan, pass_id, batch_size):
            address = addresses[call.request.partition]
            if address not in clients:
                clients[address] = opened.enter_context(StorageClient(address, traceparent))
            client = clients[address]
            under_way.append((call, client, client.apply(call.request)))
            if len(under_way) == CALLS_UNDER_WAY:
                _finish(*under_way.popleft(), totals)
        for each in under_way:
            _finish(*each, totals)
    if totals:
        rows = [(*key, *total) for key, total in totals.items()]
        names = [column.split()[0] for column in OUTCOME.split(", ")]
        columns = [list(column) for column in zip(*rows, strict=True)]
        yield pa.RecordBatch.from_pydict(dict(zip(names, columns, strict=True)))


def _finish(call: Call, client: StorageClient, applying: PendingApply, totals: _Totals) -> None:
    """Wait for a call and count what it removed."""
    total = totals.setdefault((call.topic, call.retention_type), [0, 0, 0, 0])
    while True:
        applied = applying()
        total[0] += applied.messages + applied.queues
        total[1] += applied.bytes
        total[2] += applied.stale
        total[3] += 1
        if not applied.more:
            return
        applying = client.apply(call.request)  # old records leave in portions
