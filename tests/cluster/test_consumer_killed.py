"""A message that kills its consumer: it alone is charged for that, and it alone dies (K1, V8)."""

import asyncio
import sys
from pathlib import Path
from typing import Final

import pytest

import tidemark
from tests.cluster.conftest import StartCluster
from tests.support.local_broker import in_time, until
from tidemark.local.cluster import LocalCluster

MESSAGES: Final = 60
POISON: Final = 20
ENDS_WITHIN_MS: Final = 60_000

CONSUMER: Final = """
import asyncio, os, signal, sys, time
import tidemark

async def main() -> None:
    async with tidemark.connect(sys.argv[1]) as client, client.subscribe(["jobs/a"]) as deliveries:
        async for delivery in deliveries:
            if delivery.payload == b"poison":
                os.kill(os.getpid(), signal.SIGKILL)
            print(delivery.payload.decode(), delivery.attempt, flush=True)
            await delivery.ack()

asyncio.run(main())
"""


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_only_the_message_that_kills_its_consumer_is_dead_lettered(
    start_cluster: StartCluster, tmp_path: Path, max_attempts: int
) -> None:
    """K1, V8, L6: a consumer is killed with `kill -9` on receipt of one message of its buffer."""
    cluster: LocalCluster = await start_cluster(partitions=1)
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    payloads = [b"poison" if number == POISON else b"%d" % number for number in range(MESSAGES)]
    async with tidemark.connect(cluster.address("broker")) as client:
        await client.create_topic("dead")
        await client.create_topic("jobs", max_attempts=max_attempts, dead_letter_topic="dead")
        await (await client.publisher("jobs/a")).publish_many(payloads)

        killed, handled = 0, []
        while killed < max_attempts:
            process = await start(script, cluster)
            output, _ = await in_time(process.communicate())
            assert process.returncode == -9
            handled += output.decode().splitlines()
            killed += 1
        survivor = await start(script, cluster)

        async def only_dead_letters() -> bool:
            queue = await client.admin.get_queue("jobs/a")
            return queue.queue.messages == 0

        await until(only_dead_letters)
        survivor.kill()
        output, _ = await in_time(survivor.communicate())
        handled += output.decode().splitlines()
        dead = await client.pull("dead", max_messages=MESSAGES, wait_ms=30_000)

    assert dead.payloads == [b"poison"]
    assert {line.split()[0] for line in handled} == {p.decode() for p in payloads} - {"poison"}
    # Neighbours may have been reported ahead once, while none of them had failed before.
    assert max(int(line.split()[1]) for line in handled) <= min(1, max_attempts - 1)


async def start(script: Path, cluster: LocalCluster) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(script), cluster.address("broker"), stdout=asyncio.subprocess.PIPE
    )
