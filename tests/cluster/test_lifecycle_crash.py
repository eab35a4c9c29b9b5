"""Messages on their way to a dead-letter topic and back, while services are killed at random.

Every message may be tried once, so whatever becomes of a delivery, it dies. In between, and while
dead letters are brought back, one, two or all three services are killed with `kill -9` at random
moments and started again. In the end each message is where it belongs, exactly once (L6, L8).

A second lifecycle replica is never killed, so that either of the two may hold a lease when storage
is started again (L11). `--long` makes it fifty rounds instead of a few.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.conftest import StartCluster
from tests.support.lifecycle_client import (
    PARTITIONS,
    Client,
    another_replica,
    client_of,
    payloads,
    until,
)
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING, ListPartitionsRequest
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_ATTEMPTS_EXHAUSTED, SCAN_KIND_OUTBOX
from tidemark.clock import SystemClock
from tidemark.errors import ReservationNotFound, TidemarkError
from tidemark.local.cluster import SERVICES, LocalCluster
from tidemark.receipts import Receipt

ROUNDS, ROUNDS_LONG = 2, 50
STRIKES = 2
SEED = 20_261_116
QUEUES = [f"jobs/{number}" for number in range(2 * PARTITIONS)]
RUNS_PER_ROUND = 12
RUN_MESSAGES_MAX = 5
VISIBILITY_MS = 500
"""Of deliveries that never reach their consumer, or that die with their broker."""

ROUND_MS = 120_000


class Messages:
    """What was published, and how it is brought to its death and back."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self.published: Counter[bytes] = Counter()
        self._client = client
        self._rng = rng

    async def publish(self) -> None:
        """Some more, while no process is killed: each publish has an answer."""
        for _ in range(RUNS_PER_ROUND):
            first = self.published.total()
            count = self._rng.randrange(1, RUN_MESSAGES_MAX + 1)
            messages = [b"%d" % number for number in range(first, first + count)]
            await self._client.publish(self._rng.choice(QUEUES), *messages)
            self.published.update(messages)

    async def nack_all(self) -> None:
        """Take and nack until cancelled; what is not answered expires."""
        async with asyncio.TaskGroup() as tasks:
            for lmq_name in QUEUES:
                tasks.create_task(_for_ever(partial(self._nack_some, lmq_name)))

    async def redrive_all(self) -> None:
        """Bring everything back, again and again."""
        await _for_ever(lambda: self._client.redrive("dead"))

    async def _nack_some(self, lmq_name: str) -> None:
        for delivery in await self._client.pull(lmq_name, wait_ms=200, max_messages=3):
            await self._client.nack(delivery)

    async def have_come_to(self, *queues: str) -> bool:
        """Whether nothing is on its way any more and every message is in these queues."""
        for partition in range(PARTITIONS):
            for kind in (SCAN_KIND_ATTEMPTS_EXHAUSTED, SCAN_KIND_OUTBOX):
                if (await self._client.storage.scan(kind, partition)).facts:
                    return False
        return (await self._count(queues)).keys() >= self.published.keys()

    async def check(self, *queues: str) -> None:
        assert await self._count(queues) == self.published, "each exactly once"

    async def _count(self, queues: tuple[str, ...]) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        for lmq_name in queues:
            found.update(payloads(await self._client.stored(lmq_name)))
        return found


async def _for_ever(step: Callable[[], Awaitable[object]]) -> None:
    while True:
        with suppress(TidemarkError):  # the service is dead, or the reservation is
            await step()
        await SystemClock().sleep_ms(20)


@asynccontextmanager
async def going_on(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled(), task.exception()


async def strike(cluster: LocalCluster, rng: random.Random) -> None:
    """Kill some services at a random moment, and start them again."""
    await SystemClock().sleep_ms(rng.randrange(300))
    struck = rng.sample(SERVICES, rng.randrange(1, len(SERVICES) + 1))
    for name in struck:
        await cluster.kill(name)
    await asyncio.gather(*(cluster.restart(name) for name in struck))


async def until_serving(client: Client) -> None:
    """Every partition serves, and the broker has its link to it again."""

    async def serves() -> bool:
        answer = await client.topics.ListPartitions(ListPartitionsRequest())
        if [each.state for each in answer.partitions] != [PARTITION_STATE_SERVING] * PARTITIONS:
            return False
        for partition in range(PARTITIONS):
            with suppress(ReservationNotFound):  # that is what storage answers, over the link
                await client.settle(Receipt(partition, 0, 0).encode(), Ack())
        return True

    await until(serves)


@pytest.mark.timeout(3600)
async def test_kill_9_between_any_two_steps_neither_loses_nor_doubles_a_dead_letter(
    start_cluster: StartCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """L6, L8, L11: on the way to the dead-letter topic, and on the way back."""
    rounds = ROUNDS_LONG if request.config.getoption("--long") else ROUNDS
    rng = random.Random(SEED)
    cluster = await start_cluster()
    replica = another_replica(cluster, tmp_path / "replica.log")
    async with AsyncExitStack() as running:
        running.push_async_callback(replica.kill)
        await replica.start()
        client = await running.enter_async_context(client_of(cluster))
        await client.create_topic("dead")
        await client.create_topic(
            "jobs", max_attempts=1, dead_letter_topic="dead", visibility_timeout_ms=VISIBILITY_MS
        )
        messages = Messages(client, rng)
        for _ in range(rounds):
            await until_serving(client)
            await messages.publish()

            async with going_on(messages.nack_all()):
                for _ in range(STRIKES):
                    await strike(cluster, rng)
                await until(lambda: messages.have_come_to("dead"), within_ms=ROUND_MS)
            await messages.check("dead")

            async with going_on(messages.redrive_all()):
                await strike(cluster, rng)
                await until(lambda: messages.have_come_to(*QUEUES), within_ms=ROUND_MS)
            await messages.check(*QUEUES)

    assert messages.published.total() >= rounds * RUNS_PER_ROUND
