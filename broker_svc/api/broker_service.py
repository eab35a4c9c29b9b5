"""The broker API: sessions, and unary calls for clients without one.

Translates and checks requests; the components carry them out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import grpc

from broker_svc.api.pull import Pull
from broker_svc.api.request_checks import check_held
from broker_svc.api.session import Session
from broker_svc.api.session_consumers import DEFAULT_GROUP
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.components import BrokerComponents
from broker_svc.links.partition_link import PartitionLink
from broker_svc.publish.publishers import PublisherCache
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, broker_pb2_grpc, message_pb2
from tidemark.errors import InvalidArgument, QuotaExceeded, ShuttingDown
from tidemark.field_checks import check_visibility
from tidemark.names import LmqName, validate_client_id, validate_group, validate_producer_id
from tidemark.rpc.deadline import remaining_ms
from tidemark.telemetry import leave_trace

Context = grpc.aio.ServicerContext[Any, Any]

UNARY_PUBLISHERS_MAX = 1_000_000
_PULL_MESSAGES_DEFAULT = 100
_DEADLINE_MARGIN_MS = 100
_DRAIN_MS = 1_000

R = TypeVar("R")


class BrokerService(broker_pb2_grpc.BrokerServiceServicer):
    """The calls of clients."""

    def __init__(
        self, components: BrokerComponents, clients: UnaryClients, first_session_id: int
    ) -> None:
        self._components = components
        self._clients = clients
        self._unary_publishers = PublisherCache(components.publishers, UNARY_PUBLISHERS_MAX)
        self._sessions: dict[int, Session] = {}
        self._last_session_id = first_session_id
        self._draining = False

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def drain(self) -> None:
        """The broker is stopping: notify every client, and accept no new sessions."""
        if self._draining:
            return
        self._draining = True
        for session in self._sessions.values():
            session.drain(_DRAIN_MS)

    def partition_moved(self, link: PartitionLink) -> None:
        """Another broker has claimed a partition: notify every client where it is."""
        for session in self._sessions.values():
            session.partition_moved(link)

    def expire(self, now_ms: int) -> None:
        """Drop publishers and clients that were unused for too long. Called periodically."""
        settings = self._components.settings
        self._unary_publishers.expire(now_ms, settings.unary_publisher_idle_timeout_ms)
        self._clients.expire(now_ms, settings.client_timeout_ms)
        for session in list(self._sessions.values()):
            session.check_alive(now_ms)
            if settings.publisher_cache_idle_timeout_ms:
                session.expire_publishers(now_ms, settings.publisher_cache_idle_timeout_ms)

    async def Session(
        self, request_iterator: AsyncIterator[broker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[broker_pb2.SessionResponse]:
        leave_trace()  # requests of a session belong to other traces than its opening
        if self._draining:
            raise ShuttingDown("the broker is stopping")
        if len(self._sessions) >= limits.OPEN_STREAMS_MAX:
            raise QuotaExceeded(f"at most {limits.OPEN_STREAMS_MAX} sessions a broker")
        self._last_session_id += 1
        session = Session(self._last_session_id, self._components)
        self._sessions[session.session_id] = session
        try:
            async with aclosing(session.frames(request_iterator)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            del self._sessions[session.session_id]

    async def Publish(
        self, request: broker_pb2.PublishRequest, context: Context
    ) -> broker_pb2.PublishResponse:
        if not 1 <= len(request.runs) <= limits.FRAME_RUNS_MAX:
            raise InvalidArgument(f"1 to {limits.FRAME_RUNS_MAX} runs a call", field="runs")
        if request.client_id:
            validate_client_id(request.client_id)
        producer_id = request.producer_id or request.client_id
        if producer_id:
            validate_producer_id(producer_id)
        collected = _Collected[message_pb2.PublishResult](len(request.runs))
        for at, run in enumerate(request.runs):
            self._components.publish_path.submit(
                run, self._unary_publishers, producer_id, collected.at(at)
            )
        return broker_pb2.PublishResponse(results=await collected.all())

    async def Pull(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        validate_client_id(request.client_id)
        LmqName.parse(request.lmq_name)
        group = request.group or DEFAULT_GROUP
        validate_group(group)
        messages_max = request.max_messages or _PULL_MESSAGES_DEFAULT
        _at_most("max_messages", messages_max, limits.PULL_MESSAGES_MAX)
        _at_most("wait_ms", request.wait_ms, limits.PULL_WAIT_MS_MAX)
        check_visibility(request.visibility_ms)
        # The answer must be sent before the deadline cancels the call.
        left_ms = remaining_ms(context)
        wait_ms = request.wait_ms
        if left_ms is not None:
            left_ms = max(0, left_ms - _DEADLINE_MARGIN_MS)
            wait_ms = min(wait_ms, left_ms)
        client = self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        pull = Pull(self._components, client)
        client.calls += 1
        try:
            deliveries, state = await pull.messages(request, group, messages_max, wait_ms, left_ms)
        finally:
            client.calls -= 1
            self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        return broker_pb2.PullResponse(deliveries=deliveries, subscription_state=state)

    async def Settle(
        self, request: broker_pb2.SettleRequest, context: Context
    ) -> broker_pb2.SettleResponse:
        validate_client_id(request.client_id)
        if not 1 <= len(request.settlements) <= limits.SETTLEMENTS_PER_FRAME_MAX:
            raise InvalidArgument(
                f"1 to {limits.SETTLEMENTS_PER_FRAME_MAX} settlements a call", field="settlements"
            )
        self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        collected = _Collected[message_pb2.SettleResult](len(request.settlements))
        for at, settlement in enumerate(request.settlements):
            self._components.settlements.submit(
                settlement, request.client_id, None, collected.at(at)
            )
        return broker_pb2.SettleResponse(results=await collected.all())

    async def SyncSubscriptions(
        self, request: broker_pb2.SyncSubscriptionsRequest, context: Context
    ) -> broker_pb2.SyncSubscriptionsResponse:
        validate_client_id(request.client_id)
        group = request.sync.group or DEFAULT_GROUP
        validate_group(group)
        client = self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        client.calls += 1
        try:
            result = await self._components.subscriptions.sync(
                client.subscriber, request.sync, group, consumer=None
            )
        finally:
            client.calls -= 1
            self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        return broker_pb2.SyncSubscriptionsResponse(result=result)

    async def Heartbeat(
        self, request: broker_pb2.HeartbeatRequest, context: Context
    ) -> broker_pb2.HeartbeatResponse:
        validate_client_id(request.client_id)
        check_held(request.held)
        client = self._clients.touch(request.client_id, self._components.clock.monotonic_ms())
        response = broker_pb2.HeartbeatResponse(
            client_timeout_ms=self._components.settings.client_timeout_ms
        )
        for held in request.held:
            group = held.group or DEFAULT_GROUP
            response.unsubscribed.extend(
                self._components.subscriptions.heartbeat(client.subscriber, group, held.entries)
            )
        return response

    async def DestroyPublisher(
        self, request: broker_pb2.DestroyPublisherRequest, context: Context
    ) -> broker_pb2.DestroyPublisherResponse:
        self._components.publishers.destroy(request.publisher_id)
        return broker_pb2.DestroyPublisherResponse()


class _Collected(Generic[R]):
    """Results that arrive one by one, awaited together and kept in order."""

    def __init__(self, count: int) -> None:
        self._results: list[R | None] = [None] * count
        self._missing = count
        self._complete = asyncio.Event()

    def at(self, index: int) -> Callable[[R], None]:
        def put(result: R) -> None:
            self._results[index] = result
            self._missing -= 1
            if not self._missing:
                self._complete.set()

        return put

    async def all(self) -> list[R]:
        await self._complete.wait()
        return [result for result in self._results if result is not None]


def _at_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidArgument(f"{field} is at most {most}, not {value}", field=field)
