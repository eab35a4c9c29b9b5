"""Delegated actions: a sweep sends them to the broker that holds a partition (L2, L3).

Each action shares frames and commits with the other operations of the link, and is answered after
its commit.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc

from broker_svc.links.partition_link import PartitionLink
from tidemark import limits
from tidemark.api.storage.v1 import action_pb2, action_pb2_grpc, exchange_pb2
from tidemark.errors import InvalidArgument, PartitionNotFound

Context = grpc.aio.ServicerContext[Any, Any]


class DelegationService(action_pb2_grpc.DelegationServiceServicer):
    """Actions on the partitions of this broker."""

    def __init__(self, links: Mapping[int, PartitionLink]) -> None:
        self._links = links

    async def DelegateActions(
        self, request: action_pb2.DelegateActionsRequest, context: Context
    ) -> action_pb2.DelegateActionsResponse:
        if not 1 <= len(request.actions) <= limits.PAGE_SIZE_MAX:
            raise InvalidArgument(f"1 to {limits.PAGE_SIZE_MAX} actions a call", field="actions")
        link = self._links.get(request.partition)
        if link is None:
            raise PartitionNotFound(
                f"there is no partition {request.partition}", partition=str(request.partition)
            )
        answers = await asyncio.gather(
            *(link.send(exchange_pb2.Operation(action=action)) for action in request.actions)
        )
        response = action_pb2.DelegateActionsResponse()
        for answer in answers:
            if answer.HasField("error"):
                refused = action_pb2.ACTION_OUTCOME_REFUSED
                response.results.add(outcome=refused, error=answer.error)
            else:
                response.results.append(answer.action)
        return response
