"""The standard gRPC health service, with one state per registered service.

It differs from the library's implementation in two ways. On shutdown, watchers receive NOT_SERVING
and their streams end, instead of delaying a graceful stop for its whole grace period. And it has
two more names, `liveness` and `readiness`, so that supervisors can distinguish a hanging process
from one that is temporarily not serving. It reports states that are set; it checks nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

LIVENESS: Final = "liveness"
"""SERVING while the process answers, also while it drains: restart the process if this fails."""

READINESS: Final = "readiness"
"""SERVING while the server and all its services are: send no calls while this fails."""

_SERVING = HealthCheckResponse.SERVING
_NOT_SERVING = HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Health(HealthServicer):
    """States by service name; the empty name stands for the whole server."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {"": False}
        self._changed = asyncio.Event()
        self._shut_down = False

    def set(self, service: str, serving: bool) -> None:
        """Set the state of a service. Ignored once the server is shutting down."""
        if self._shut_down:
            return
        self._serving[service] = serving
        self._wake_watchers()

    def knows(self, service: str) -> bool:
        """Whether the service has a state."""
        return self._state(service) is not None

    def shut_down(self) -> None:
        """Report NOT_SERVING for everything from now on, and end all watches."""
        self._serving = dict.fromkeys(self._serving, False)
        self._shut_down = True
        self._wake_watchers()

    async def Check(self, request: HealthCheckRequest, context: _Context) -> HealthCheckResponse:
        if not self.knows(request.service):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._answer(request.service)

    async def Watch(
        self, request: HealthCheckRequest, context: _Context
    ) -> AsyncIterator[HealthCheckResponse]:
        last = None
        while True:
            changed, ending = self._changed, self._shut_down
            answer = self._answer(request.service)
            if answer != last:
                yield answer
                last = answer
            if ending:
                return
            await changed.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        serving = self._state(service)
        if serving is None:
            return HealthCheckResponse(status=_SERVICE_UNKNOWN)
        return HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    def _state(self, service: str) -> bool | None:
        if service == LIVENESS:
            return True
        if service == READINESS:
            return all(self._serving.values())
        return self._serving.get(service)

    def _wake_watchers(self) -> None:
        # A new event per change: a watcher that waits on the old one cannot miss that it was set.
        self._changed.set()
        self._changed = asyncio.Event()
