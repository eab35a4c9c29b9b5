"""The lifecycle API: translates between protos and the sweepers of this replica."""

from typing import Any

import grpc

from lifecycle_svc.sweeper import Sweeper, SweeperState
from lifecycle_svc.sweepers import Sweepers
from tidemark.api.lifecycle.v1 import lifecycle_pb2, lifecycle_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class LifecycleService(lifecycle_pb2_grpc.LifecycleServiceServicer):
    """One lifecycle replica."""

    def __init__(self, sweepers: Sweepers) -> None:
        self._sweepers = sweepers

    async def AnnouncePartition(
        self, request: lifecycle_pb2.AnnouncePartitionRequest, context: Context
    ) -> lifecycle_pb2.AnnouncePartitionResponse:
        sweeper = self._sweepers.announce(
            request.partition, request.storage_address, request.opening_id
        )
        sweeps = sweeper.state is not SweeperState.STANDING_BY
        return lifecycle_pb2.AnnouncePartitionResponse(sweeps=sweeps)

    async def WakePartition(
        self, request: lifecycle_pb2.WakePartitionRequest, context: Context
    ) -> lifecycle_pb2.WakePartitionResponse:
        self._sweepers.get(request.partition).wake(request.in_ms)
        return lifecycle_pb2.WakePartitionResponse()

    async def ListSweepers(
        self, request: lifecycle_pb2.ListSweepersRequest, context: Context
    ) -> lifecycle_pb2.ListSweepersResponse:
        return lifecycle_pb2.ListSweepersResponse(sweepers=map(_status, self._sweepers))


def _status(sweeper: Sweeper) -> lifecycle_pb2.SweeperStatus:
    status = lifecycle_pb2.SweeperStatus(
        partition=sweeper.partition,
        state=lifecycle_pb2.SweeperState.Value(f"SWEEPER_STATE_{sweeper.state.value}"),
        next_in_ms=sweeper.next_in_ms,
        failures=sweeper.failures,
        last_error=sweeper.error,
    )
    if sweeper.last is not None:
        status.last_sweep_time.FromMilliseconds(sweeper.last.begin_ms)
        status.last_duration_ms = sweeper.last.duration_ms
        status.last_found = sweeper.last.found
        status.last_done = sweeper.last.done
        status.last_stale = sweeper.last.stale
        status.last_refused = sweeper.last.refused
    return status
