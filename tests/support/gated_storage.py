"""A storage service behind gates: a real gRPC proxy that holds frames back until a test lets go.

Everything passes unchanged, and in the order of its partition. An exchange is taken apart: what it
carries for a partition waits at the gate of that partition while it is closed, in either direction;
and the part of one partition can be broken, or the whole stream.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from tests.support.split_columns import split_operations, split_results
from tidemark.api.storage.v1.exchange_pb2 import (
    ExchangeRequest,
    ExchangeResponse,
    PartitionResponse,
    Unbind,
)
from tidemark.errors import Unavailable
from tidemark.limits import GRPC_RECEIVE_BYTES_MAX
from tidemark.rpc.statuses import to_status

_EXCHANGE: Final = "/tidemark.api.storage.v1.StorageService/Exchange"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", GRPC_RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_RECEIVE_BYTES_MAX),
    # Brokers ping every 2 s, which gRPC treats as abuse by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
)


class Gate:
    """Frames that go one way. Open until it is closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._waiting = False
        self._changed = asyncio.Event()
        self.arrived = 0
        """Frames that have come so far, also those that wait."""

    def close(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def until_held(self) -> None:
        """Return once a frame waits here."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def until_arrived(self, frames: int) -> None:
        """Return once so many frames have come."""
        while self.arrived < frames:
            self._changed.clear()
            await self._changed.wait()

    def came(self) -> None:
        self.arrived += 1
        self._changed.set()

    async def passed(self) -> None:
        if not self._open.is_set():
            self._waiting = True
            self._changed.set()
            try:
                await self._open.wait()
            finally:
                self._waiting = False


class GatedLink:
    """The way between a broker and one partition."""

    def __init__(self) -> None:
        self.requests = Gate()
        self.answers = Gate()
        self._parts: _Parts | None = None
        self._partition = 0

    def carry(self, parts: "_Parts", partition: int) -> None:
        self._parts, self._partition = parts, partition

    async def break_now(self) -> None:
        """End the partition's part; what is held at the gates is lost. The gates stay as they are.

        The partition's exchange with storage ends, and the broker gets the end of the part.
        """
        assert self._parts is not None, "there is no exchange to break"
        await self._parts.break_part(self._partition)


class _Way:
    """One partition, one direction: frames that wait for their turn at the gate."""

    def __init__(self, gate: Gate, forward: Callable[[bytes], Awaitable[None]]) -> None:
        self._gate = gate
        self._forward = forward
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._ended = False
        self._writing = False
        self._passing = asyncio.create_task(self._pass())
        self._passing.add_done_callback(_retrieve)

    def put(self, frame: bytes) -> None:
        self._gate.came()
        self._frames.put_nowait(frame)

    def end(self) -> None:
        """What waits here is lost."""
        self._ended = True
        if not self._writing:  # gRPC ends the whole call when a write is cancelled
            self._passing.cancel()

    async def _pass(self) -> None:
        while not self._ended:
            frame = await self._frames.get()
            await self._gate.passed()
            self._writing = True
            await self._forward(frame)
            self._writing = False


def _retrieve(passing: asyncio.Task[None]) -> None:
    """A frame could not be passed on because its call has ended: it is lost, as is the call."""
    if not passing.cancelled():
        passing.exception()


class _Parts:
    """One exchange, taken apart into its partitions."""

    def __init__(self, links: dict[int, GatedLink], call: Any, context: Any) -> None:
        self._links = links
        self._call = call
        self._context = context
        self._epochs: dict[int, int] = {}
        """Under which epoch the broker last bound each partition."""
        self._broken: dict[int, int] = {}
        """The epoch of each part that was broken: what the broker still sends under it is lost."""
        self._requests: dict[int, _Way] = {}
        self._answers: dict[int, _Way] = {}
        self._asking, self._answering = asyncio.Lock(), asyncio.Lock()

    async def carry(self, requests: AsyncIterator[bytes]) -> None:
        """Until storage ends the stream; raises its status."""
        asking = asyncio.create_task(self._ask(requests))
        try:
            async for answer in self._call:
                response = ExchangeResponse.FromString(answer)
                for part in response.parts:
                    self._put_answer(part.partition, ExchangeResponse(parts=[part]))
                for partition, columns in split_results(response.columns):
                    self._put_answer(partition, ExchangeResponse(columns=columns))
        finally:
            asking.cancel()
            for way in [*self._requests.values(), *self._answers.values()]:
                way.end()
            self._call.cancel()

    async def break_part(self, partition: int) -> None:
        for ways in (self._requests, self._answers):
            if (way := ways.pop(partition, None)) is not None:
                way.end()
        epoch = self._broken[partition] = self._epochs[partition]
        unbind = Unbind(partition=partition, broker_epoch=epoch)
        await self._write(ExchangeRequest(unbinds=[unbind]).SerializeToString())
        end = PartitionResponse(partition=partition, broker_epoch=epoch)
        end.end.CopyFrom(to_status(Unavailable("the link was broken")))
        await self._answer(ExchangeResponse(parts=[end]).SerializeToString())

    async def _ask(self, requests: AsyncIterator[bytes]) -> None:
        async for frame in requests:
            request = ExchangeRequest.FromString(frame)
            for unbind in request.unbinds:
                if not self._is_lost(unbind.partition, unbind.broker_epoch):
                    self._put(unbind.partition, ExchangeRequest(unbinds=[unbind]))
            for bind in request.binds:
                self._epochs[bind.partition] = bind.broker_epoch
                self._links[bind.partition].carry(self, bind.partition)
                self._put(bind.partition, ExchangeRequest(binds=[bind]))
            for part in request.parts:
                if not self._is_lost(part.partition, part.broker_epoch):
                    self._put(part.partition, ExchangeRequest(parts=[part]))
            for partition, epoch, columns in split_operations(request.columns):
                if not self._is_lost(partition, epoch):
                    self._put(partition, ExchangeRequest(columns=columns))
        await self._call.done_writing()

    def _is_lost(self, partition: int, broker_epoch: int) -> bool:
        return self._broken.get(partition) == broker_epoch

    def _put(self, partition: int, request: ExchangeRequest) -> None:
        self._way(self._requests, partition).put(request.SerializeToString())

    def _put_answer(self, partition: int, response: ExchangeResponse) -> None:
        self._way(self._answers, partition).put(response.SerializeToString())

    def _way(self, ways: dict[int, _Way], partition: int) -> _Way:
        if partition not in ways:
            link = self._links[partition]
            ways[partition] = (
                _Way(link.requests, self._write)
                if ways is self._requests
                else _Way(link.answers, self._answer)
            )
        return ways[partition]

    async def _write(self, frame: bytes) -> None:
        async with self._asking:  # gRPC takes one write at a time
            await self._call.write(frame)

    async def _answer(self, frame: bytes) -> None:
        async with self._answering:
            await self._context.write(frame)


class _Proxy(grpc.GenericRpcHandler):
    """Takes every call for a stream of bytes: that is what all kinds of calls look like inside."""

    def __init__(self, upstream: Any, links: dict[int, GatedLink]) -> None:
        self._upstream = upstream
        self._links = links
        self.exchanges: set[asyncio.Task[None]] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            metadata = context.invocation_metadata()
            if path == _EXCHANGE:
                call = self._upstream.stream_stream(path)(metadata=metadata)
                parts = _Parts(self._links, call, context)
                carrying = asyncio.create_task(parts.carry(requests))
                self.exchanges.add(carrying)
                carrying.add_done_callback(self.exchanges.discard)
            else:
                call = self._upstream.stream_stream(path)(requests, metadata=metadata)
                carrying = asyncio.create_task(_answer_all(call, context))
            try:
                await asyncio.wait({carrying})
            finally:
                carrying.cancel()
            if carrying.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was broken")
            error = carrying.exception()
            if isinstance(error, grpc.aio.AioRpcError):
                context.set_trailing_metadata(tuple(error.trailing_metadata()))
                await context.abort(error.code(), error.details())
            carrying.result()

        return grpc.stream_stream_rpc_method_handler(forward)


async def _answer_all(call: Any, context: Any) -> None:
    try:
        async for answer in call:
            await context.write(answer)
    finally:
        call.cancel()


class GatedStorage:
    """Where brokers connect to, and the gates of each partition."""

    def __init__(
        self, address: str, links: dict[int, GatedLink], exchanges: set[asyncio.Task[None]]
    ) -> None:
        self.address = address
        self.links = links
        self._exchanges = exchanges

    @property
    def streams(self) -> int:
        """How many exchanges are open."""
        return len(self._exchanges)

    async def break_streams(self) -> None:
        """Break every exchange, and with it the links of all partitions."""
        broken = set(self._exchanges)
        for each in broken:
            each.cancel()
        await asyncio.wait(broken)


@asynccontextmanager
async def gated_storage(upstream_address: str, partitions: int) -> AsyncIterator[GatedStorage]:
    """A proxy in front of a storage service, until the block ends."""
    links = {number: GatedLink() for number in range(partitions)}
    async with grpc.aio.insecure_channel(upstream_address, options=_OPTIONS) as upstream:
        proxy = _Proxy(upstream, links)
        server = grpc.aio.server(handlers=(proxy,), options=_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield GatedStorage(f"127.0.0.1:{port}", links, proxy.exchanges)
        finally:
            await server.stop(None)
