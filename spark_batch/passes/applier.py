"""The applier: executors send a plan to storage, call by call.

A plan arrives in the order in which it was read, one storage partition after the other, and is not
shuffled between machines. A task that dies can be run again: storage ignores what is already gone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Final

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_batch.passes.calls import RUNS_PER_ROW_MAX, Call, fold, pack
from spark_batch.passes.failures import Failures
from spark_batch.passes.retention_types import ABANDONED_GROUP
from spark_batch.storage_client import PendingApply, StorageClient
from tidemark.errors import TidemarkError

CALLS_IN_PROGRESS_MAX: Final = 2
"""Concurrent calls of one task, so that storage always has the next one."""

OUTCOME: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("retention_type", StringType()),
        StructField("removed", LongType()),
        StructField("bytes", LongType()),
        StructField("stale", LongType()),
        StructField("calls", LongType()),
    ]
)
"""The report of a task per topic and type; `removed` counts messages, queues, groups or
records."""

_Totals = dict[tuple[str, str], list[int]]


def applier(
    addresses: Mapping[int, str],
    pass_id: str,
    batch_size: int,
    failures: Failures,
    traceparent: str = "",
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `mapInArrow`; `addresses` are the addresses of storage by partition.

    `traceparent` makes the calls of the executors part of the trace of the pass. A partition that
    refuses a call is added to `failures`, and gets no more calls.
    """
    return partial(_apply, dict(addresses), pass_id, batch_size, failures, traceparent)


def _apply(
    addresses: Mapping[int, str],
    pass_id: str,
    batch_size: int,
    failures: Failures,
    traceparent: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    totals: _Totals = {}
    clients: dict[str, StorageClient] = {}
    rows_max = min(batch_size, RUNS_PER_ROW_MAX)
    plan = chain.from_iterable(fold(batch, rows_max) for batch in batches)
    in_progress: deque[tuple[Call, StorageClient, PendingApply]] = deque()
    failed: set[int] = set()

    def finish_next() -> None:
        call, client, pending = in_progress.popleft()
        try:
            _finish(call, client, pending, totals)
        except TidemarkError as error:
            failed.add(call.request.partition)
            failures.add({call.request.partition: str(error)})

    with ExitStack() as opened:
        for call in pack(plan, pass_id, batch_size):
            if call.request.partition in failed:
                continue
            address = addresses[call.request.partition]
            if address not in clients:
                clients[address] = opened.enter_context(StorageClient(address, traceparent))
            client = clients[address]
            in_progress.append((call, client, client.apply(call.request)))
            if len(in_progress) == CALLS_IN_PROGRESS_MAX:
                finish_next()
        while in_progress:
            finish_next()
    if totals:
        rows = [(*key, *total) for key, total in totals.items()]
        columns = [list(column) for column in zip(*rows, strict=True)]
        yield pa.RecordBatch.from_pydict(dict(zip(OUTCOME.names, columns, strict=True)))


def _finish(call: Call, client: StorageClient, pending: PendingApply, totals: _Totals) -> None:
    """Wait for a call and add what it removed to the totals."""
    total = totals.setdefault((call.topic, call.retention_type), [0, 0, 0, 0])
    while True:
        applied = pending()
        groups = call.retention_type == ABANDONED_GROUP
        total[0] += applied.groups if groups else applied.messages + applied.queues
        total[1] += applied.bytes
        total[2] += applied.stale
        total[3] += 1
        if not applied.more:
            return
        pending = client.apply(call.request)  # the rest of what is removed in portions
