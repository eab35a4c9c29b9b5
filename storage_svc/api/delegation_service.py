"""Phase two of a sweep where no broker holds the partition: storage acts itself (L2).

While a broker holds the exchange of the partition the answer is NOT_OWNER with its address, so that
lifecycle asks there and the action is batched with the broker's other work.
"""

from typing import Any

import grpc

from storage_svc.api import codec
from storage_svc.partition.partitions import Partitions
from tidemark import limits
from tidemark.api.storage.v1 import action_pb2, action_pb2_grpc
from tidemark.errors import InvalidArgument, NotOwner

Context = grpc.aio.ServicerContext[Any, Any]


class DelegationService(action_pb2_grpc.DelegationServiceServicer):
    """Delegated actions on partitions without a broker."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    async def DelegateActions(
        self, request: action_pb2.DelegateActionsRequest, context: Context
    ) -> action_pb2.DelegateActionsResponse:
        if not 1 <= len(request.actions) <= limits.PAGE_SIZE_MAX:
            raise InvalidArgument(f"1 to {limits.PAGE_SIZE_MAX} actions a call", field="actions")
        partition = self._partitions.get(request.partition)
        if partition.has_connected_broker:
            claim = partition.state.claim
            raise NotOwner(
                f"{claim.broker_id} holds partition {partition.number}", owner=claim.address
            )
        results = await partition.submit([codec.decode_action(each) for each in request.actions])
        return action_pb2.DelegateActionsResponse(results=map(codec.encode_action_result, results))
