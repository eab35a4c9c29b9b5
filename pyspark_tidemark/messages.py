"""The few messages of Tidemark's contract that a reader exchanges with storage.

They are declared here, in a separate pool, instead of being imported from generated code, which
only runs with a protobuf and a grpcio that are at least as new as its generator. So the package
installs into environments that pin older ones. A test compares this with `proto/`.
"""

from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE: Final = "tidemark.api.storage.v1"
DESCRIBE_STORAGE: Final = f"/{PACKAGE}.StorageService/DescribeStorage"
SCAN_TABLE: Final = f"/{PACKAGE}.RetentionService/ScanTable"

TABLE_NUMBERS: Final = {
    "runs": 1,
    "groups": 2,
    "queues": 3,
    "history": 4,
    "messages_consumed": 5,
    "system_metrics": 6,
}
"""Values of the enum ScanTableName."""

_BYTES: Final = FieldDescriptorProto.TYPE_BYTES
_INT32: Final = FieldDescriptorProto.TYPE_INT32
_INT64: Final = FieldDescriptorProto.TYPE_INT64
_STRING: Final = FieldDescriptorProto.TYPE_STRING
_UINT32: Final = FieldDescriptorProto.TYPE_UINT32
_UINT64: Final = FieldDescriptorProto.TYPE_UINT64

FIELDS: Final[dict[str, dict[str, tuple[int, Any, bool]]]] = {
    "DescribeStorageRequest": {},
    "PartitionInfo": {"partition": (1, _UINT32, False)},
    "DescribeStorageResponse": {
        "partitions": (2, _UINT32, False),
        "held": (3, "PartitionInfo", True),
        "node_addresses": (7, _STRING, True),
    },
    "Timestamp": {"seconds": (1, _INT64, False), "nanos": (2, _INT32, False)},
    "ScanTableRequest": {
        "partition": (1, _UINT32, False),
        "table": (2, _INT32, False),  # an enum has the encoding of an int32
        "columns": (3, _STRING, True),
        "topic": (4, _STRING, False),
        "after_time": (5, "Timestamp", False),
        "before_time": (6, "Timestamp", False),
        "batch_rows": (7, _UINT32, False),
        "lmq_name": (8, _STRING, False),
        "prefix": (9, _STRING, False),
        "age_ms_min": (10, _UINT64, False),
        "due_types": (11, _INT32, True),
    },
    "ScanTableResponse": {"arrow": (1, _BYTES, False)},
}
"""Number, type (or name of a message) and whether it repeats, by message and field."""


def _declare() -> dict[str, type[Any]]:
    file = FileDescriptorProto(name="pyspark_tidemark.proto", package=PACKAGE, syntax="proto3")
    for message, fields in FIELDS.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind, repeated) in fields.items():
            label = (
                FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else FieldDescriptorProto.LABEL_OPTIONAL
            )
            field = declared.field.add(name=name, number=number, label=label)
            if isinstance(kind, str):
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{PACKAGE}.{kind}"
            else:
                field.type = kind
    pool = DescriptorPool()
    pool.Add(file)
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS
    }


_classes: Final = _declare()
DescribeStorageRequest: Final = _classes["DescribeStorageRequest"]
DescribeStorageResponse: Final = _classes["DescribeStorageResponse"]
ScanTableRequest: Final = _classes["ScanTableRequest"]
ScanTableResponse: Final = _classes["ScanTableResponse"]
