"""The operations of storage: the proto and the modules of `operations/` name the same ones."""

from google.protobuf.descriptor import Descriptor

from storage_svc.operations import ACTIONS, OPERATIONS
from tidemark.api.storage.v1 import action_pb2, exchange_pb2


def test_every_operation_of_the_exchange_has_a_decoder() -> None:
    """S1: a broker can send whatever the contract names."""
    kinds = _kinds(exchange_pb2.Operation.DESCRIPTOR)

    assert {"action", *OPERATIONS} == kinds


def test_every_action_of_a_sweep_has_a_decoder() -> None:
    """L2: lifecycle can delegate whatever the contract names."""
    kinds = _kinds(action_pb2.Action.DESCRIPTOR)

    assert set(ACTIONS) == kinds


def _kinds(message: Descriptor) -> set[str]:
    return {field.name for field in message.oneofs_by_name["kind"].fields}
