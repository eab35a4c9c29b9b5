"""The tables of the data source: their columns, and the filters that storage can apply.

This is the only place where Spark's side of a schema is written. Storage encodes the same columns
in `storage_svc/reads/arrow.py`; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_BOOLEAN: Final = BooleanType()
_DOUBLE: Final = DoubleType()
_INT: Final = IntegerType()
_LONG: Final = LongType()
_STRING: Final = StringType()
_TIME: Final = TimestampType()


@dataclass(frozen=True, slots=True)
class TableShape:
    """The schema of a table, the column of its time, and whether rows name a queue."""

    schema: StructType
    time: str
    has_queues: bool = True


def _schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def _queue_schema(**columns: DataType) -> StructType:
    head = {"partition": _INT, "topic": _STRING, "lmq_name": _STRING, "queue_id": _LONG}
    return _schema(**head, **columns)


TABLES: Final = {
    "runs": TableShape(
        _queue_schema(
            fairness_key=_STRING,
            first_offset=_LONG,
            messages=_LONG,
            bytes=_LONG,
            publish_time=_TIME,
            groups=_INT,
            waiting_groups=_INT,
            settled=_BOOLEAN,
            held=_BOOLEAN,
            age_ms=_LONG,
        ),
        "publish_time",
    ),
    "groups": TableShape(
        _queue_schema(
            group=_STRING,
            cursor=_LONG,
            unsettled=_LONG,
            inflight=_LONG,
            owner_client_id=_STRING,
            owner_epoch=_LONG,
            last_used=_TIME,
            in_use=_BOOLEAN,
            age_ms=_LONG,
        ),
        "last_used",
    ),
    "queues": TableShape(
        _queue_schema(
            messages=_LONG,
            bytes=_LONG,
            scheduled=_LONG,
            next_offset=_LONG,
            create_time=_TIME,
            last_activity=_TIME,
            materialized=_BOOLEAN,
            in_use=_BOOLEAN,
            age_ms=_LONG,
        ),
        "last_activity",
    ),
    "history": TableShape(
        _schema(
            partition=_INT,
            lmq_name=_STRING,
            retention_type=_STRING,
            pass_id=_STRING,
            messages=_LONG,
            bytes=_LONG,
            executed_at=_TIME,
        ),
        "executed_at",
    ),
    "messages_consumed": TableShape(
        _queue_schema(
            group=_STRING,
            start=_LONG,
            end=_LONG,
            publish_time=_TIME,
            first_delivery_time=_TIME,
            acked_at=_TIME,
        ),
        "acked_at",
    ),
    "system_metrics": TableShape(
        _schema(
            partition=_INT,
            instance=_STRING,
            name=_STRING,
            samples=_LONG,
            min=_DOUBLE,
            max=_DOUBLE,
            mean=_DOUBLE,
            last=_DOUBLE,
            timestamp=_TIME,
        ),
        "timestamp",
        has_queues=False,
    ),
}


def schema_of(table: TableShape, wanted: Sequence[str]) -> StructType:
    """The schema of the wanted columns in their order, or of all columns if none is given."""
    if not wanted:
        return table.schema
    unknown = sorted(set(wanted) - set(table.schema.names))
    if unknown:
        names = ", ".join(table.schema.names)
        raise ValueError(f"the table has no columns {unknown}, only {names}")
    return StructType([table.schema[name] for name in wanted])
