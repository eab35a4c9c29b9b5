"""The gRPC server that every Tidemark service runs in: options, health, reflection, graceful stop.

A service adds its servicers, starts the server and sets its health. `tidemark.rpc.interceptors`
wraps each call; `tidemark.service.signals` handles signals.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from tidemark.clock import Clock, SystemClock
from tidemark.errors import Unavailable
from tidemark.limits import GRPC_RECEIVE_BYTES_MAX
from tidemark.rpc.deadline import UNARY_DEADLINE_MS_DEFAULT, DefaultDeadline
from tidemark.rpc.health import Health
from tidemark.rpc.interceptors import CallsInProgress, Handler, Interception
from tidemark.rpc.keepalive import KEEPALIVE, KEEPALIVE_TIME_MS

OPTIONS: Final = (
    ("grpc.max_receive_message_length", GRPC_RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_RECEIVE_BYTES_MAX),
    *KEEPALIVE,
    # Clients ping as often as this, also when idle; by default gRPC treats that as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 4),
    # Two servers on one port would share its connections at random. Reject the second one.
    ("grpc.so_reuseport", 0),
)

S = TypeVar("S")


class AddressInUse(OSError):
    """Another process listens on the address. The text is one line, for operators."""


class RpcServer:
    """One gRPC server. Add servicers, then `start`, then `stop` once."""

    def __init__(
        self,
        listen: str,
        *,
        clock: Clock | None = None,
        unary_deadline_ms: int | None = UNARY_DEADLINE_MS_DEFAULT,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`listen` is `host:port`; port 0 picks a free port. Without credentials: plain text."""
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._credentials = credentials
        self._calls = CallsInProgress()
        self._deadline = (
            None
            if unary_deadline_ms is None
            else DefaultDeadline(clock or SystemClock(), unary_deadline_ms)
        )
        self._interception = Interception(self._calls, self._deadline)
        self._services: dict[str, grpc.GenericRpcHandler] = {}
        self._health = Health()
        self._server: grpc.aio.Server | None = None
        self.stopping = asyncio.Event()
        """Set when the stop begins: handlers of long streams wait for it and then end."""

    @property
    def port(self) -> int:
        """The port; before `start`, the requested one."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port` with the actual port."""
        return f"{self._host}:{self._port}"

    @property
    def calls_in_progress(self) -> int:
        """The number of running handlers, open streams included."""
        return len(self._calls)

    def add(self, add_to_server: Callable[[S, Any], None], servicer: S) -> None:
        """Add a servicer with its generated `add_XServicer_to_server`, before `start` or announced
        to it."""
        add_to_server(servicer, _Registrar(self))

    def add_service(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add the handlers of one service by method name, before `start` or announced to it."""
        wrapped = {
            name: self._interception.wrap(f"/{service}/{name}", handler)
            for name, handler in handlers.items()
        }
        handler = grpc.method_handlers_generic_handler(service, wrapped)
        self._services[service] = handler
        if self._server is not None:
            self._server.add_generic_rpc_handlers((handler,))
            if not self._health.knows(service):
                self._health.set(service, True)

    def set_serving(self, service: str, serving: bool) -> None:
        """Set the health of a service. A service that is never set is SERVING from `start` on."""
        self._health.set(service, serving)

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    async def start(self, later: Iterable[str] = ()) -> None:
        """Listen and serve; raises AddressInUse or another OSError.

        `later` names services that are added afterwards. Until then, their calls fail with
        UNAVAILABLE, and callers try again.
        """
        later = tuple(later)
        for service in self._services:
            if not self._health.knows(service):
                self._health.set(service, True)
        self.add(add_HealthServicer_to_server, self._health)
        names = (*self._services, *later, reflection.SERVICE_NAME)
        self.add(add_ServerReflectionServicer_to_server, reflection.aio.ReflectionServicer(names))

        handlers = [*self._services.values()]
        if later:
            handlers.append(_Later(later, self._services, self._interception))
        server = grpc.aio.server(handlers=handlers, options=OPTIONS)
        await self._listen(server)
        await server.start()
        self._server = server
        self._health.set("", True)

    async def stop(self, grace_ms: int) -> None:
        """Accept no new calls, give running ones up to `grace_ms`, then cancel them.

        When it returns, no handler is running. A second call with a shorter grace period shortens
        the first.
        """
        self._health.shut_down()
        self.stopping.set()
        if self._server is not None:
            await self._server.stop(grace_ms / 1000 if grace_ms > 0 else None)
            # gRPC is done once the last status is sent; handlers may still be cleaning up.
            await self._calls.ended()
        if self._deadline is not None:
            self._deadline.close()

    async def wait_stopped(self) -> None:
        """Return once the server has stopped and no handler is running; raises if it failed."""
        assert self._server is not None, "start() comes first"
        # Without the shield, cancelling the waiter would cancel gRPC's own shutdown.
        await asyncio.shield(self._server.wait_for_termination())
        await self._calls.ended()

    async def _listen(self, server: grpc.aio.Server) -> None:
        if self._port:
            await _check_free(self._host, self._port)
        try:
            if self._credentials is None:
                self._port = server.add_insecure_port(self.address)
            else:
                self._port = server.add_secure_port(self.address, self._credentials)
        except RuntimeError:  # without a reason
            raise OSError(f"cannot listen on {self.address}") from None


class _Later(grpc.GenericRpcHandler):
    """Answers the calls of services that are not added yet."""

    def __init__(
        self, names: Iterable[str], added: Mapping[str, object], interception: Interception
    ) -> None:
        self._names = frozenset(names)
        self._added = added
        self._interception = interception

    def service(self, details: grpc.HandlerCallDetails) -> Handler | None:
        service = details.method.strip("/").partition("/")[0]
        if service in self._added or service not in self._names:
            return None
        # Calls of all four kinds: the caller only sees how the call ends.
        refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
        return self._interception.wrap(details.method, refusal)


async def _refuse(_requests: object, _context: object) -> None:
    raise Unavailable("this process is still starting")


class _Registrar:
    """Stands in for the server that a generated `add_XServicer_to_server` expects.

    Methods are registered with gRPC as generic handlers only. With its "registered" methods, the
    asyncio server waits on a future per method for every call: 10 % of an empty unary call with
    forty methods.
    """

    def __init__(self, server: RpcServer) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignored: the same handlers as below, without their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self._server.add_service(service, handlers)


async def _check_free(host: str, port: int) -> None:
    """Raise the reason why an address cannot be bound: gRPC fails without one."""
    loop = asyncio.get_running_loop()
    address = f"{host}:{port}"
    try:
        found = await loop.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as unknown:
        raise OSError(unknown.errno, f"cannot listen on {address}: {unknown.strerror}") from None
    failures = [error for info in found if (error := _bind_error(info)) is not None]
    for error in failures:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(error.errno, f"cannot listen on {address}: already in use")
    if len(failures) == len(found):
        raise OSError(failures[0].errno, f"cannot listen on {address}: {failures[0].strerror}")


def _bind_error(info: tuple[Any, Any, int, str, Any]) -> OSError | None:
    family, kind, protocol, _, address = info
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
