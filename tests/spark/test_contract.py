"""The data source declares tables and messages itself, as storage and `proto/` have them."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_tidemark.messages import DESCRIBE_STORAGE, FIELDS, SCAN_TABLE, TABLE_NUMBERS
from pyspark_tidemark.tables import TABLES
from storage_svc.reads.arrow import SCHEMAS
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import retention_pb2, storage_pb2

DECLARED = {
    message.name: message
    for file in (storage_pb2, retention_pb2, topic_pb2)
    for message in file.DESCRIPTOR.message_types_by_name.values()
}


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"Timestamp"}))
def test_a_message_has_the_fields_of_the_contract(name: str) -> None:
    """P1."""
    for field, (number, kind, repeated) in FIELDS[name].items():
        declared = DECLARED[name].fields_by_name[field]
        wire_type = FieldDescriptor.TYPE_INT32 if declared.enum_type else declared.type

        assert declared.number == number
        assert declared.is_repeated == repeated
        if isinstance(kind, str):
            assert declared.message_type.name == kind
        else:
            assert wire_type == kind


def test_tables_and_methods_are_those_of_the_contract() -> None:
    """P1."""
    numbers = dict(retention_pb2.ScanTableName.items())
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (storage_pb2, retention_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }

    assert {f"SCAN_TABLE_NAME_{name.upper()}": at for name, at in TABLE_NUMBERS.items()} == {
        name: number for name, number in numbers.items() if number
    }
    assert {DESCRIBE_STORAGE, SCAN_TABLE} <= methods


def test_a_table_has_the_columns_that_storage_encodes() -> None:
    """P1: names, order and types."""
    encoded = {name.value.lower(): schema for name, schema in SCHEMAS.items()}

    declared = {
        name: to_arrow_schema(table.schema, timezone="UTC") for name, table in TABLES.items()
    }

    assert declared == encoded
