"""One random history: clients and faults by chance, then calm, and an owner that drains it all.

Everything is drawn from the given chance, so that on a simulated cluster a seed is a history.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tests.model.histories.clients import (
    PLENTY,
    Client,
    Cluster,
    SessionClient,
    UnaryClient,
    publish,
)
from tests.model.histories.history import Disturbed, History, Outcome, Published, Settled
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.errors import TidemarkError

TOPIC: Final = "own"
QUEUES: Final = (f"{TOPIC}/a", f"{TOPIC}/b")


class Disturb(Protocol):
    """Records what breaks or is mended, and which queues that may delay; "" for all."""

    def __call__(self, what: str, queues: Sequence[str] = ("",)) -> None: ...


class FaultyCluster(Cluster, Protocol):
    """A cluster that can be hurt, and healed."""

    async def hurt(self, chance: random.Random, disturbed: Disturb) -> None:
        """Break something, and mend it after a while; both are recorded."""

    async def ready(self) -> None:
        """Return once everything is mended."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a history is, and how much happens in it."""

    steps: int
    gap_ms_max: int
    visibility_ms: int
    bound_ms: int
    """Within which a new owner that nothing disturbs has its first message."""
    calm_ms: int
    """After which everything that was on its way has arrived."""
    drain_ms: int
    """Within which the last owner has acknowledged everything that is left."""
    calm_takeovers: float
    """How often, per step, all clients pause for a takeover."""


async def record(
    cluster: FaultyCluster, chance: random.Random, pace: Pace, queues: Sequence[str] = QUEUES
) -> History:
    """Let it happen; the history ends drained."""
    history = History()
    scenario = _Scenario(cluster, history, chance, pace, queues)
    await scenario.run()
    await scenario.drain()
    return history


class _Scenario:
    def __init__(
        self,
        cluster: FaultyCluster,
        history: History,
        chance: random.Random,
        pace: Pace,
        queues: Sequence[str],
    ) -> None:
        self._cluster = cluster
        self._history = history
        self._chance = chance
        self._pace = pace
        self._queues = queues
        self._published = 0
        self._acting: dict[asyncio.Task[None], None] = {}
        self._sessions = [self._session_client("a", PLENTY), self._session_client("b", 2)]
        self._unary = [UnaryClient("u", *self._parts(), deaf=chance.random() < 0.5)]
        self._clients: list[Client] = [*self._sessions, *self._unary]

    async def run(self) -> None:
        """Act at random; most of it at the same time."""
        actions: Sequence[tuple[Callable[[], Awaitable[Any]], int]] = (
            (self._publish, 6),
            (self._subscribe, 8),
            (self._settle, 10),
            (self._pull, 6),
            (self._resync, 3),
            (self._unsubscribe, 1),
            (self._heartbeat, 2),
            (self._leave, 2),
            (self._hurt, 2),
        )
        acts, weights = zip(*actions, strict=True)
        for _ in range(self._pace.steps):
            if self._chance.random() < self._pace.calm_takeovers:
                await self._take_over_in_calm()
            (act,) = self._chance.choices(acts, weights)
            task = asyncio.create_task(_whatever_comes(act()))
            self._acting[task] = None
            task.add_done_callback(self._acting.pop)
            if self._chance.random() < 0.7:
                await self._cluster.clock.sleep_ms(self._chance.randint(0, self._pace.gap_ms_max))

    async def _take_over_in_calm(self) -> None:
        """Nothing else begins meanwhile: whatever the old owner holds, the new one is served."""
        await self._cluster.clock.sleep_ms(2 * self._pace.bound_ms)
        waiting = self._chance.choice([each for each in self._sessions if each.waits])
        await _whatever_comes(waiting.subscribe(self._chance.choice(self._queues)))
        await self._cluster.clock.sleep_ms(2 * self._pace.bound_ms)

    async def drain(self) -> None:
        """Mend everything, disconnect all clients, and have one owner acknowledge what is left."""
        while self._acting:
            await asyncio.wait(list(self._acting))
        for client in self._clients:
            await client.leave()
        await self._cluster.ready()
        await self._cluster.clock.sleep_ms(self._pace.calm_ms)
        last = self._session_client("last", PLENTY)
        while not await self._takes_everything(last):
            await self._cluster.clock.sleep_ms(self._pace.calm_ms)
        deadline_ms = last.now_ms + self._pace.drain_ms
        while last.now_ms < deadline_ms:
            for held in list(last.held):
                await last.settle(held, Ack())
            if not self._unsettled():
                break
            await self._cluster.clock.sleep_ms(self._pace.gap_ms_max)
        await last.leave()

    async def _takes_everything(self, client: Client) -> bool:
        for queue in self._queues:
            if not await _whatever_comes(client.subscribe(queue)):
                return False
        return True

    def _unsettled(self) -> bool:
        settled = {
            event.message
            for event in self._history.events
            if isinstance(event, Settled) and event.acked and event.outcome is not Outcome.REFUSED
        }
        return any(
            isinstance(event, Published) and event.message not in settled
            for event in self._history.events
        )

    # --- what happens --------------------------------------------------------------------------

    async def _publish(self) -> None:
        first = self._published + 1
        self._published += self._chance.randint(1, 3)
        messages = range(first, self._published + 1)
        await publish(self._cluster, self._history, self._chance.choice(self._queues), messages)

    async def _subscribe(self) -> None:
        await self._chance.choice(self._clients).subscribe(self._chance.choice(self._queues))

    async def _settle(self) -> None:
        await self._chance.choice(self._clients).settle_one()

    async def _pull(self) -> None:
        wait_ms = self._chance.choice([0, self._pace.gap_ms_max, 4 * self._pace.gap_ms_max])
        await self._chance.choice(self._unary).pull(self._chance.choice(self._queues), wait_ms)

    async def _resync(self) -> None:
        await self._chance.choice(self._clients).resync()

    async def _unsubscribe(self) -> None:
        await self._chance.choice(self._clients).unsubscribe(self._chance.choice(self._queues))

    async def _heartbeat(self) -> None:
        await self._chance.choice(self._clients).heartbeat()

    async def _leave(self) -> None:
        """Some come back at once, and report the queues that they held before."""
        client = self._chance.choice(self._sessions)
        await client.leave()
        if self._chance.random() < 0.7:
            await client.resync()

    async def _hurt(self) -> None:
        def disturbed(what: str, queues: Sequence[str] = ("",)) -> None:
            for queue in queues:
                now_ms = self._cluster.clock.monotonic_ms()
                self._history.add(Disturbed(now_ms, what, queue=queue))

        await self._cluster.hurt(self._chance, disturbed)

    # --- inside --------------------------------------------------------------------------------

    def _parts(self) -> tuple[Cluster, History, random.Random]:
        return self._cluster, self._history, self._chance

    def _session_client(self, name: str, credit: int) -> SessionClient:
        return SessionClient(
            name,
            *self._parts(),
            credit=credit,
            visibility_ms=self._pace.visibility_ms,
            deaf=self._chance.random() < 0.5,
        )


async def _whatever_comes(act: Awaitable[Any]) -> Any:
    """A client that is refused, or gets no answer, goes on."""
    with suppress(TidemarkError):
        return await act
