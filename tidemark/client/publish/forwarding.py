"""Runs for a holder that cannot be reached from here, by unary calls that home forwards (S8)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from tidemark.api.broker.v1.message_pb2 import PublishResult, PublishRun
from tidemark.clock import Clock
from tidemark.errors import TidemarkError, Unavailable
from tidemark.rpc.callbacks import Done, pass_on
from tidemark.rpc.statuses import to_status

ASK_HOME_MS: Final = 5_000
"""How often the client asks home for the holder: by a run in its session, which it refuses."""

Publish: TypeAlias = Callable[[Sequence[PublishRun]], Awaitable[Sequence[PublishResult]]]
"""One unary call at home, without repeats."""


class ForwardedCall:
    """The runs of one call."""

    def __init__(self) -> None:
        self._runs: list[PublishRun] = []
        self._dones: list[Done[PublishResult]] = []

    def send_run(self, run: PublishRun, done: Done[PublishResult]) -> None:
        self._runs.append(run)
        self._dones.append(done)

    async def make(self, publish: Publish) -> None:
        """Publish the runs; a call that fails is a refusal of each of them, which may pass."""
        if not self._runs:
            return
        try:
            results = await publish(self._runs)
        except TidemarkError as error:
            refusal = error if error.answered else Unavailable(f"not forwarded: {error.detail}")
            results = [PublishResult(error=to_status(refusal)) for _ in self._runs]
        for done, result in zip(self._dones, results, strict=True):
            pass_on(done, result)


class ForwardedCalls:
    """The calls under way, and for which partitions home has been asked for the holder."""

    def __init__(self, publish: Publish, clock: Clock) -> None:
        self._publish = publish
        self._clock = clock
        self._asked_ms: dict[int, int] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def knows_holder(self, partition: int) -> bool:
        """False now and then, so that home is asked in its session: the holder may change."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._asked_ms.setdefault(partition, now_ms) < ASK_HOME_MS:
            return True
        self._asked_ms[partition] = now_ms
        return False

    def make(self, call: ForwardedCall) -> None:
        making = asyncio.create_task(call.make(self._publish))
        self._under_way.add(making)
        making.add_done_callback(self._under_way.discard)

    def close(self) -> None:
        for making in self._under_way:
            making.cancel()
