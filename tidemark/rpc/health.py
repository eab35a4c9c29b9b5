"""The standard gRPC health service, with one state per registered service.

It differs from the library's in two points. When the server shuts down, watchers are told
NOT_SERVING and their streams end, instead of holding a graceful stop up for its whole grace. And it
knows two more names, for supervisors that must tell a process that hangs from one that only does
not serve now. It only reports what it was told; it checks nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

LIVENESS: Final = "liveness"
"""Serves for as long as the process answers, also while it drains: restart it if this fails."""

READINESS: Final = "readiness"
"""Serves while the server and every service in it do: send it no calls while this fails."""

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
        """Set one state. Ignored once the server shuts down."""
        if self._shut_down:
            return
        self._serving[service] = serving
        self._wake_watchers()

    def knows(self, service: str) -> bool:
        """Whether the service has a state."""
        return self._state(service) is not None

    def shut_down(self) -> None:
        """Everything is NOT_SERVING from now on, and watches end."""
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
        # A fresh event per change: whoever held the old one sees it set, however late it looks.
        self._changed.set()
        self._changed = asyncio.Event()
