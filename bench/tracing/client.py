"""The client of benchmark `tracing`: a program that uses the SDK, with or without tracing.

It runs one round for each line on stdin and prints the seconds that it took.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import tidemark
from tidemark import telemetry
from tidemark.settings import BrokerSettings

_QUEUES = [f"bench/{number}" for number in range(10)]
"""Queues with one run in flight each, so that the machine is busy."""
_PAYLOAD = bytes(100)


async def main(address: str, cycles: int, run_messages: int) -> None:
    async with tidemark.connect(address, client_id="bench") as client:
        await client.create_topic("bench")
        publishers = [await client.publisher(lmq_name) for lmq_name in _QUEUES]
        async with client.subscribe(_QUEUES, credit=100 * run_messages) as deliveries:
            batches = deliveries.batches()
            while await asyncio.to_thread(sys.stdin.readline):
                begin_s = time.perf_counter()
                share = cycles // len(publishers)
                await asyncio.gather(
                    *(_publish(each, share, run_messages) for each in publishers),
                    _consume(batches, share * len(publishers) * run_messages),
                )
                await deliveries.flush()
                print(time.perf_counter() - begin_s, flush=True)


async def _publish(publisher: tidemark.Publisher, runs: int, run_messages: int) -> None:
    for _ in range(runs):
        await publisher.publish_many([_PAYLOAD] * run_messages)


async def _consume(batches: AsyncIterator[tidemark.DeliveryBatch], messages: int) -> None:
    while messages:
        batch = await anext(batches)
        with batch.span():
            await batch.ack()
        messages -= batch.count


if __name__ == "__main__":
    # Any service will do: all of them have the telemetry settings.
    running = telemetry.setup("bench", BrokerSettings.from_environment().telemetry)
    try:
        asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:4])))
    finally:
        running.shutdown()
