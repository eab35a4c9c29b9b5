"""Wires between simulated processes: the calls of gRPC's stubs, with delays, and they can be cut.

Every message is serialized and arrives a random time later, in order within its call. A wire that
is cut loses what is on its way, in both directions; each side learns that the other is gone, and
neither what became of it.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from google.protobuf.message import Message

from tests.model.histories.simulated_time import Process
from tidemark.clock import Clock
from tidemark.errors import TidemarkError, Unavailable

DELAY_MS_MAX: Final = 6
_STREAMING: Final = ("Session", "Exchange")
_BUSY: Final = 0.3
"""How often a message is delayed at all."""


Metadata = Sequence[tuple[str, str]]


class Context:
    """What a servicer asks about its call: there is no deadline."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self._metadata = metadata

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> Metadata:
        return self._metadata


class Wire:
    """From one process to the servicer of another; stands for the servicer's stub."""

    def __init__(self, servicer: Any, server: Process, clock: Clock, chance: random.Random) -> None:
        self._servicer = servicer
        self._server = server
        self._clock = clock
        self._chance = chance
        self._calls: dict[Call, None] = {}
        self._cut = False
        self.slow_ms = 0
        """How much longer than usual a message may take."""

    def reach(self, servicer: Any, server: Process) -> None:
        """The server was started again: new calls go to it."""
        self._servicer, self._server = servicer, server

    def cut(self) -> None:
        """Break all calls under way, and new ones until `mend`."""
        self._cut = True
        self.interrupt()

    def mend(self) -> None:
        self._cut = False

    def interrupt(self) -> None:
        """Break all calls under way; new ones go through."""
        for call in list(self._calls):
            call.fail(Unavailable("the wire was cut"))

    def __getattr__(self, method: str) -> Callable[..., "Call"]:
        def call(
            request: Message | Iterable[Message] | None = None, metadata: Metadata = ()
        ) -> "Call":
            return self._open(getattr(self._servicer, method), method, request, metadata)

        return call

    def _open(
        self,
        handler: Any,
        method: str,
        request: Message | Iterable[Message] | None,
        metadata: Metadata = (),
    ) -> "Call":
        call = Call(self._clock, self._delay_ms)
        if self._cut or self._server.dead:
            call.fail(Unavailable("no server is there"))
            return call
        self._calls[call] = None
        call.ended.add_done_callback(lambda _: self._calls.pop(call, None))
        streaming = method in _STREAMING
        asked: Message | Pipe = call.requests
        if isinstance(request, Message):
            asked = _copy(request)
        elif request is not None:
            call.send_all(request)
        context = Context(metadata)
        serving = self._server.start(call.serve(handler, asked, context, streaming=streaming))
        call.ended.add_done_callback(lambda _: serving.cancel())
        return call

    def _delay_ms(self) -> int:
        slow_ms = self._chance.randint(0, self.slow_ms) if self.slow_ms else 0
        busy = self._chance.random() < _BUSY
        return slow_ms + (self._chance.randint(1, DELAY_MS_MAX) if busy else 0)


class Call:
    """One call, as its client sees it."""

    def __init__(self, clock: Clock, delay_ms: Callable[[], int]) -> None:
        self.requests = Pipe(clock, delay_ms)
        self.answers = Pipe(clock, delay_ms)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- the client's side ---------------------------------------------------------------------

    def __await__(self) -> Any:
        return anext(self.answers).__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.answers

    async def write(self, message: Message) -> None:
        self.requests.put(message)

    async def done_writing(self) -> None:
        self.requests.end()

    def cancel(self) -> None:
        self.fail(Unavailable("the call was cancelled"))

    def send_all(self, messages: Iterable[Message]) -> None:
        for each in messages:
            self.requests.put(each)
        self.requests.end()

    # --- the wire and the server ---------------------------------------------------------------

    def fail(self, error: TidemarkError) -> None:
        """Both sides are notified that it has ended."""
        self.requests.fail(Unavailable("the client is gone"))
        self.answers.fail(error)
        self._end()

    async def serve(
        self, handler: Any, asked: "Message | Pipe", context: Context, *, streaming: bool
    ) -> None:
        try:
            if streaming:
                async with aclosing(handler(asked, context)) as frames:
                    async for frame in frames:
                        self.answers.put(frame)
            else:
                # Arrives late, or not at all, as its answer may.
                await self.requests.delay()
                self.answers.put(await handler(asked, context))
            self.answers.end()
        except TidemarkError as error:
            self.answers.end(error)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Pipe:
    """Messages one way."""

    def __init__(self, clock: Clock, delay_ms: Callable[[], int]) -> None:
        self._clock = clock
        self._delay_ms = delay_ms
        self._waiting: deque[tuple[int, Message | TidemarkError | None]] = deque()
        self._last_ms = 0
        self._failed: TidemarkError | None = None
        self._changed = asyncio.Event()

    def put(self, message: Message) -> None:
        self._send(_copy(message))

    async def delay(self) -> None:
        """Wait as long as a message would take."""
        await self._clock.sleep_ms(self._delay_ms())

    def end(self, error: TidemarkError | None = None) -> None:
        self._send(error)

    def fail(self, error: TidemarkError) -> None:
        """What is on its way is lost."""
        if self._failed is None:
            self._failed = error
            self._changed.set()

    def __aiter__(self) -> "Pipe":
        return self

    async def __anext__(self) -> Any:
        while True:
            if self._failed is not None:
                raise self._failed
            now_ms = self._clock.monotonic_ms()
            if self._waiting and self._waiting[0][0] <= now_ms:
                _, message = self._waiting[0]
                if isinstance(message, Message):
                    self._waiting.popleft()
                    return message
                if message is None:  # the end stays for the next read
                    raise StopAsyncIteration
                raise message
            self._changed.clear()
            timeout_ms = self._waiting[0][0] - now_ms if self._waiting else None
            with suppress(TimeoutError):
                await self._clock.wait_for(self._changed.wait(), timeout_ms)

    def _send(self, message: Message | TidemarkError | None) -> None:
        if self._failed is not None:
            return
        self._last_ms = max(self._last_ms, self._clock.monotonic_ms() + self._delay_ms())
        self._waiting.append((self._last_ms, message))
        self._changed.set()


def _copy(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())
