"""The applier: executors send a plan to storage, call by call.

A plan arrives in the order in which it was read, one storage partition after the other, and is not
shuffled between machines. A call carries rows of several partitions of a service. A task that dies
can be run again: storage ignores rows that are already gone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from queue import Queue
from threading import Thread
from typing import Final

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_batch.passes.calls import RUNS_PER_ROW_MAX, Call, fold, pack
from spark_batch.passes.failures import Failures
from spark_batch.passes.retention_types import ABANDONED_GROUP
from spark_batch.storage_client import PendingApply, StorageClient
from tidemark.api.storage.v1.retention_pb2 import ApplyRetentionRequest
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status

CALLS_IN_PROGRESS_MAX: Final = 2
"""Concurrent calls of one task to a storage service, so that it always has the next one."""

BATCHES_AHEAD_MAX: Final = 32
"""Batches of the plan, of 10 000 rows by default, that a task reads before storage takes them."""

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
    ahead = _ReadAhead(batches)
    plan = (fold(batch, rows_max) for batch in ahead)
    in_progress: dict[str, deque[tuple[Call, PendingApply]]] = {}
    failed: set[int] = set()

    def finish_next(address: str) -> None:
        call, pending = in_progress[address].popleft()
        try:
            for partition, error in _finish(call, clients[address], pending, totals):
                failed.add(partition)
                failures.add({partition: error})
        except TidemarkError as error:  # of the whole call
            failed.update(call.partitions)
            failures.add(dict.fromkeys(call.partitions, str(error)))

    with ExitStack() as opened:
        for call in pack(plan, addresses, pass_id, batch_size, failed):
            address = call.address
            if address not in clients:
                clients[address] = opened.enter_context(StorageClient(address, traceparent))
                in_progress[address] = deque()
            if len(in_progress[address]) == CALLS_IN_PROGRESS_MAX:
                finish_next(address)
            call.request.planned_rows = ahead.take_planned()
            in_progress[address].append((call, clients[address].apply(call.request)))
        for address, calls in in_progress.items():
            while calls:
                finish_next(address)
    if totals:
        rows = [(*key, *total) for key, total in totals.items()]
        columns = [list(column) for column in zip(*rows, strict=True)]
        yield pa.RecordBatch.from_pydict(dict(zip(OUTCOME.names, columns, strict=True)))


class _ReadAhead:
    """The batches of a plan, read in a thread: Spark goes on planning while storage deletes."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches
        self._ready: Queue[pa.RecordBatch | BaseException | None] = Queue(BATCHES_AHEAD_MAX)
        self._planned = 0
        self._reported = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        Thread(target=self._read, daemon=True).start()
        while (batch := self._ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self._planned += batch.num_rows
                self._ready.put(batch)
        except BaseException as error:  # it is raised where the batches are used
            self._ready.put(error)
        else:
            self._ready.put(None)

    def take_planned(self) -> int:
        """The rows that were read since this was last asked for."""
        planned, reported = self._planned, self._reported
        self._reported = planned
        return planned - reported


def _finish(
    call: Call, client: StorageClient, pending: PendingApply, totals: _Totals
) -> Iterator[tuple[int, str]]:
    """Wait for a call and add its removals to the totals; returns partitions that refused it."""
    for subject in call.subjects:
        totals.setdefault(subject, [0, 0, 0, 0])
    parts = list(zip(call.subjects, call.request.parts, strict=True))
    while parts:
        totals[parts[0][0]][3] += 1
        rest = []
        for (subject, part), applied in zip(parts, pending().parts, strict=True):
            total = totals[subject]
            groups = subject[1] == ABANDONED_GROUP
            total[0] += applied.groups if groups else applied.messages + applied.queues
            total[1] += applied.bytes
            total[2] += applied.stale
            if applied.HasField("error"):
                yield part.partition, str(from_status(applied.error))
            elif applied.more:  # it is removed in portions
                rest.append((subject, part))
        parts = rest
        if parts:
            again = ApplyRetentionRequest(pass_id=call.request.pass_id)
            again.parts.extend(part for _, part in parts)
            pending = client.apply(again)
