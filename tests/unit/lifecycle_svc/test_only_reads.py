"""Lifecycle has no way to write to a partition: it reads, and asks owners to act (L2)."""

import ast
from pathlib import Path

import lifecycle_svc
from tests.support.repository import parsed
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.storage.v1 import action_pb2, retention_pb2, storage_pb2

READS = {"DescribeStorage", "ScanPartition"}
SAYS = {"LeaseSweep", "ReportSweep"}
"""Its calls to storage about itself; neither touches the engine."""
ASKS = {"DelegateActions"}


def calls_of_the_contract() -> set[str]:
    files = (broker_pb2, topic_pb2, action_pb2, retention_pb2, storage_pb2)
    return {
        method.name
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def calls_in_the_code() -> set[str]:
    names: set[str] = set()
    for path in Path(lifecycle_svc.__file__).parent.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # getattr(stub, "PutTopic") would not hide
    return names & calls_of_the_contract()


def test_lifecycle_calls_nothing_that_writes() -> None:
    """L2: a new call appears here before it appears anywhere else."""
    assert calls_in_the_code() == READS | SAYS | ASKS
