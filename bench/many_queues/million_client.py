"""The client of benchmark `many-queues-million`: one message to each of very many queues, in waves.

`million_client.py HOST:PORT`. A connection has at most 10 000 publishers and subscriptions, so that
the queues take turns. For each line `QUEUES` on stdin, the program opens so many queues that were
never used, sends one message to each, takes and acknowledges it, closes them, and prints the
seconds of each step as JSON.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Final, TypeVar

import tidemark

PAYLOAD: Final = bytes(100)
TOPIC: Final = "million"
GROUP: Final = "bench"

_CREDIT = 200_000

T = TypeVar("T")


class Steps:
    """The seconds of each step."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}

    async def time(self, name: str, step: Awaitable[T]) -> T:
        begin_s = time.perf_counter()
        result = await step
        self.took_s[name] = time.perf_counter() - begin_s
        return result


async def _run_wave(client: tidemark.Client, names: Sequence[str]) -> dict[str, float]:
    steps = Steps()
    opening = asyncio.gather(*(client.publisher(name) for name in names))
    publishers = await steps.time("publishers", opening)
    subscription = client.subscribe(names, group=GROUP, credit=_CREDIT)
    deliveries = await steps.time("subscribe", subscription.__aenter__())

    async def take() -> None:
        left = len(names)
        async for batch in deliveries.batches():
            await batch.ack()
            left -= batch.count
            if not left:
                break
        await deliveries.flush()

    published = [each.publish(PAYLOAD) for each in publishers]
    await steps.time("cycles", asyncio.gather(take(), *published))
    await steps.time("unsubscribe", subscription.__aexit__(None, None, None))
    return steps.took_s


def _names() -> Iterator[str]:
    return (f"{TOPIC}/{number}" for number in itertools.count())


async def main(address: str) -> None:
    names = _names()
    async with tidemark.connect(address) as client:
        await client.create_topic(TOPIC)
        while line := await asyncio.to_thread(sys.stdin.readline):
            wave = list(itertools.islice(names, int(line)))
            print(json.dumps(await _run_wave(client, wave)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
