"""The codec of the exchange: operations, results and health to and from protos.

Finds the subject of an operation; how each is decoded and encoded is in `operations/`.
"""

from storage_svc.operations import ACTIONS, OPERATIONS
from storage_svc.operations.operation import Acted, ExchangeResult, Operation
from storage_svc.partition.health import Health
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import action_pb2, exchange_pb2, partition_pb2
from tidemark.errors import InvalidArgument, TidemarkError
from tidemark.rpc.statuses import to_status


def decode_operation(proto: exchange_pb2.Operation) -> Operation[ExchangeResult]:
    """Raises InvalidArgument or InvalidName for a malformed operation."""
    kind = proto.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("an operation without a kind", field="kind")
    try:
        return _OPERATIONS[kind](getattr(proto, kind))
    except ValueError as error:  # a time out of range, for example
        raise InvalidArgument(f"{kind}: {error}", field=kind) from None


def decode_action(proto: action_pb2.Action) -> Operation[Acted]:
    kind = proto.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("an action without a kind", field="kind")
    return ACTIONS[kind](getattr(proto, kind))


_OPERATIONS = {**OPERATIONS, "action": decode_action}


def write_result(
    proto: exchange_pb2.OperationResult, result: ExchangeResult | TidemarkError
) -> None:
    """The answer to one operation."""
    if isinstance(result, TidemarkError):
        proto.error.CopyFrom(to_status(result))
    else:
        result.write_to(proto)


def encode_action_result(result: Acted | TidemarkError) -> action_pb2.ActionResult:
    """The answer to one delegated action; an error means that it was refused."""
    if isinstance(result, TidemarkError):
        refused = action_pb2.ACTION_OUTCOME_REFUSED
        return action_pb2.ActionResult(outcome=refused, error=to_status(result))
    return result.to_proto()


def encode_health(health: Health) -> partition_pb2.PartitionHealth:
    proto = partition_pb2.PartitionHealth(
        state=topic_pb2.PartitionState.Value(f"PARTITION_STATE_{health.state.value}"),
        openings=health.openings,
    )
    for fault in health.faults:
        added = proto.faults.add(reason=fault.reason.value, detail=fault.detail, alarm=fault.alarm)
        added.since_time.FromMilliseconds(fault.since_ms)
    return proto
