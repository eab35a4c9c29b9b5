"""The columns of the tables for Spark, and their rows as Arrow streams.

The only module of storage that imports pyarrow, which is large: the first scan imports it.
"""

from typing import Any

import pyarrow as pa

from storage_svc.reads.table_filter import TableName

_TIME = pa.timestamp("us", tz="UTC")  # the only unit that Spark takes
_QUEUE_COLUMNS = [
    ("partition", pa.int32()),
    ("topic", pa.string()),
    ("lmq_name", pa.string()),
    ("queue_id", pa.int64()),
]
SCHEMAS = {
    TableName.RUNS: pa.schema(
        [
            *_QUEUE_COLUMNS,
            ("fairness_key", pa.string()),
            ("first_offset", pa.int64()),
            ("messages", pa.int64()),
            ("bytes", pa.int64()),
            ("publish_time", _TIME),
            ("groups", pa.int32()),  # of the queue
            ("waiting_groups", pa.int32()),  # that have not settled the run
            ("settled", pa.bool_()),  # by every group, and at least one
            ("held", pa.bool_()),  # by a live reservation, or for a sweep: no rule removes it
            ("age_ms", pa.int64()),  # since its publish time, by the time of the partition
        ]
    ),
    TableName.GROUPS: pa.schema(
        [
            *_QUEUE_COLUMNS,
            ("group", pa.string()),
            ("cursor", pa.int64()),
            ("unsettled", pa.int64()),
            ("inflight", pa.int64()),
            ("owner_client_id", pa.string()),
            ("owner_epoch", pa.int64()),
            ("last_used", _TIME),  # by a consumer, as far as that was noted
            ("in_use", pa.bool_()),  # it has a consumer or an owner, as far as storage knows
            ("age_ms", pa.int64()),  # since then, or since its topic was changed
        ]
    ),
    TableName.QUEUES: pa.schema(
        [
            *_QUEUE_COLUMNS,
            ("messages", pa.int64()),
            ("bytes", pa.int64()),
            ("scheduled", pa.int64()),
            ("next_offset", pa.int64()),
            ("create_time", _TIME),
            ("last_activity", _TIME),
            ("materialized", pa.bool_()),
            ("in_use", pa.bool_()),  # by a connected client, as far as storage knows
            ("age_ms", pa.int64()),  # since the last activity, by the time of the partition
        ]
    ),
    TableName.HISTORY: pa.schema(
        [
            ("partition", pa.int32()),
            ("lmq_name", pa.string()),
            ("retention_type", pa.string()),
            ("pass_id", pa.string()),
            ("messages", pa.int64()),
            ("bytes", pa.int64()),
            ("executed_at", _TIME),
        ]
    ),
    TableName.MESSAGES_CONSUMED: pa.schema(
        [
            *_QUEUE_COLUMNS,
            ("group", pa.string()),
            ("start", pa.int64()),
            ("end", pa.int64()),
            ("publish_time", _TIME),
            ("first_delivery_time", _TIME),
            ("acked_at", _TIME),
        ]
    ),
    TableName.SYSTEM_METRICS: pa.schema(
        [
            ("partition", pa.int32()),
            ("instance", pa.string()),
            ("name", pa.string()),
            ("samples", pa.int64()),
            ("min", pa.float64()),
            ("max", pa.float64()),
            ("mean", pa.float64()),
            ("last", pa.float64()),
            ("timestamp", _TIME),
        ]
    ),
}

# Where pandas is installed, the first array imports it: here, beside the event loop.
pa.array([0])


def encode(schema: pa.Schema, columns: list[str], found: list[tuple[Any, ...]]) -> bytes:
    narrow = pa.schema([schema.field(column) for column in columns])
    at = [schema.names.index(column) for column in columns]
    by_column = list(zip(*found, strict=True))
    arrays = [
        pa.array(by_column[index], type=field.type) for index, field in zip(at, narrow, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, narrow) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=narrow))
    data: bytes = sink.getvalue().to_pybytes()
    return data
