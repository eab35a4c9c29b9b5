"""System metrics: aggregated figures of the services, as rows in time order (R4, R12).

All services store them in one partition, and they are deleted as old records. What a figure means
is decided by the service that samples it.
"""

from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, text
from storage_svc.partition.commit import CommitContext

_FIGURES = Struct(">Qdddd")


class Measurement(NamedTuple):
    """One figure, aggregated over its samples."""

    instance: str
    name: str
    samples: int
    least: float
    most: float
    mean: float
    last: float


class RecordMetrics(NamedTuple):
    """Store a row for each figure."""

    measurements: tuple[Measurement, ...]

    async def apply(self, commit: CommitContext) -> None:
        for each in self.measurements:
            commit.journal.batch.put(Table.METRICS, commit.journal.record_key(), _value(each))


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
