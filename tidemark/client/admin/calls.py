"""How administrative calls reach a broker: over a channel of the caller, again where that is safe.

It keeps no state and closes no channel.
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc

from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.client.transport.repeater import Repeater

Q = TypeVar("Q")
R = TypeVar("R")
_Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Q, R]"


class Calls:
    """Calls of `TopicService`."""

    def __init__(self, channel: Callable[[], grpc.aio.Channel], repeater: Repeater) -> None:
        """`channel` is called before every try and returns a channel to the broker to use now."""
        self._channel = channel
        self._repeater = repeater

    async def _repeat(self, method: Callable[[TopicServiceStub], "_Method[Q, R]"], request: Q) -> R:
        return await self._repeater.repeat(lambda left_ms: self._try(method, request, left_ms))

    def _repeated(
        self, method: Callable[[TopicServiceStub], "_Method[Q, R]"]
    ) -> Callable[[Q], Awaitable[R]]:
        return lambda request: self._repeat(method, request)

    async def _once(self, method: Callable[[TopicServiceStub], "_Method[Q, R]"], request: Q) -> R:
        return await self._repeater.once(lambda left_ms: self._try(method, request, left_ms))

    async def _try(
        self,
        method: Callable[[TopicServiceStub], "_Method[Q, R]"],
        request: Q,
        left_ms: int | None,
    ) -> R:
        call = method(TopicServiceStub(self._channel()))
        return await call(request, timeout=None if left_ms is None else left_ms / 1000)
