"""The clients of benchmark `many-queues`: programs that run rounds on demand.

`client.py tidemark HOST:PORT` and `client.py valkey HOST:PORT`. For each line `QUEUES ROUNDS` on
stdin, the program sends one message to each of so many queues, takes and acknowledges it, that many
times, and prints the seconds that it took. It is started by its path and imports nothing of
`bench`, so that it can run on the client of another checkout.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

PAYLOAD: Final = bytes(100)
TOPIC: Final = "many"
GROUP: Final = "bench"

_CREDIT = 200_000
_BLOCK_MS = 10_000

RunRound = Callable[[], Awaitable[None]]
"""Runs one round; returns once every message is acknowledged."""

Open = Callable[[Sequence[str]], Awaitable[RunRound]]
"""Prepares the rounds over these queues."""


@asynccontextmanager
async def tidemark_client(address: str) -> AsyncIterator[Open]:
    """One connection with a publisher and a subscription to each queue."""
    import tidemark  # only here: the client of Valkey needs no part of it

    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(tidemark.connect(address))
        await client.create_topic(TOPIC)

        async def open_queues(names: Sequence[str]) -> RunRound:
            publishers = [await client.publisher(name) for name in names]
            deliveries = await opened.enter_async_context(
                client.subscribe(names, group=GROUP, credit=_CREDIT)
            )
            batches = deliveries.batches()

            async def take() -> None:
                left = len(names)
                while left:
                    batch = await anext(batches)
                    await batch.ack()
                    left -= batch.count
                await deliveries.flush()

            async def run_round() -> None:
                await asyncio.gather(take(), *(each.publish(PAYLOAD) for each in publishers))

            return run_round

        yield open_queues


@asynccontextmanager
async def valkey_client(address: str) -> AsyncIterator[Open]:
    """Pipelines over one connection, and a second one that waits in a read."""
    import redis.asyncio  # only here: another checkout need not have it

    host, _, port = address.rpartition(":")
    async with redis.asyncio.Redis(host=host, port=int(port)) as connected:
        client: Any = connected  # redis-py types what it returns as either a value or an awaitable
        assert (await client.config_get("appendfsync")) == {"appendfsync": "always"}

        async def open_queues(names: Sequence[str]) -> RunRound:
            for name in names:
                await client.xgroup_create(name, GROUP, mkstream=True)
            wanted: dict[str, str] = dict.fromkeys(names, ">")

            async def publish() -> None:
                async with client.pipeline(transaction=False) as pipeline:
                    for name in names:
                        pipeline.xadd(name, {"p": PAYLOAD})
                    await pipeline.execute()

            async def take() -> None:
                left = len(names)
                while left:
                    taken = await client.xreadgroup(GROUP, "taker", wanted, block=_BLOCK_MS)
                    async with client.pipeline(transaction=False) as pipeline:
                        for name, entries in taken:
                            pipeline.xack(name, GROUP, *(entry_id for entry_id, _ in entries))
                            left -= len(entries)
                        await pipeline.execute()

            async def run_round() -> None:
                await asyncio.gather(take(), publish())

            return run_round

        yield open_queues


CLIENTS: Final = {"tidemark": tidemark_client, "valkey": valkey_client}


async def main(system: str, address: str) -> None:
    opened: dict[int, RunRound] = {}
    async with CLIENTS[system](address) as open_queues:
        while line := await asyncio.to_thread(sys.stdin.readline):
            queues, rounds = map(int, line.split())
            if queues not in opened:
                names = [f"{TOPIC}/{queues}-{number}" for number in range(queues)]
                opened[queues] = await open_queues(names)
            begin_s = time.perf_counter()
            for _ in range(rounds):
                await opened[queues]()
            print(time.perf_counter() - begin_s, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
