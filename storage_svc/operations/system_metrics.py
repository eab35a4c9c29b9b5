"""System metrics: aggregated figures of the services, as rows in the order of time (R4, R12).

They are stored in one partition, whoever sends them, and leave as old records. What the figures
mean is the matter of the services that sample them.
"""

from struct import Struct

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, text
from storage_svc.operations import Measurement, RecordMetrics, Removed
from storage_svc.partition.commit import CommitContext

_FIGURES = Struct(">Qdddd")


async def record(commit: CommitContext, operation: RecordMetrics) -> Removed:
    """Write a row for each figure; nothing is removed."""
    for each in operation.measurements:
        commit.journal.batch.put(Table.METRICS, commit.journal.record_key(), _value(each))
    return Removed(0)


def _value(row: Measurement) -> bytes:
    return (
        _FIGURES.pack(row.samples, row.least, row.most, row.mean, row.last)
        + text(row.instance.encode())
        + row.name.encode()
    )


def read(value: bytes) -> Measurement:
    """A stored row; its time is in its key."""
    instance, at = read_text(value, _FIGURES.size)
    return Measurement(instance.decode(), value[at:].decode(), *_FIGURES.unpack_from(value))
