"""A rolling update under load: every service is stopped with SIGTERM and started again, in turn."""

import asyncio
from typing import Final

import tidemark
from tests.cluster.conftest import StartCluster
from tidemark.clock import SystemClock
from tidemark.local.cluster import LocalCluster

PARTITIONS: Final = 3
ROUNDS: Final = 2
WRITERS: Final = 16
QUEUES: Final = [f"jobs/{number}" for number in range(8)]
LAST: Final = b"the last"
ENDS_WITHIN_MS: Final = 400_000
BETWEEN: Final = 500
"""Publishes that are answered between two restarts: the update is always under load."""


class Ledger:
    """What was answered and what came, by the number in each message."""

    def __init__(self) -> None:
        self.answered: dict[bytes, tuple[str, int]] = {}
        self.came: dict[bytes, list[tuple[str, int, int]]] = {}
        """Queue, offset and attempt of each delivery."""
        self.more = asyncio.Event()
        self.updated = False

    async def until_answered(self, more: int) -> None:
        wanted = len(self.answered) + more
        while len(self.answered) < wanted:
            self.more.clear()
            await self.more.wait()


async def test_a_rolling_update_under_load_fails_no_publish_and_loses_and_doubles_nothing(
    start_cluster: StartCluster,
) -> None:
    """S5, S8, S11: publishers and consumers use the SDK as it comes and see nothing of it."""
    cluster: LocalCluster = await start_cluster(partitions=PARTITIONS)
    ledger = Ledger()

    async with tidemark.connect(cluster.address("broker"), client_id="user") as client:
        await client.create_topic("jobs")
        reading = asyncio.create_task(read(client, ledger))
        writing = [asyncio.create_task(write(client, ledger, number)) for number in range(WRITERS)]
        async with asyncio.timeout(ENDS_WITHIN_MS / 1000):
            exit_codes = await update(cluster, ledger)
            await asyncio.gather(*writing)  # raises what a publish failed with
            await publish(await client.publisher(QUEUES[0]), LAST, ledger)
            await reading

    assert exit_codes == [0] * len(cluster.services) * ROUNDS
    assert ledger.came.keys() == ledger.answered.keys(), "lost, or stored and not answered"
    for payload, deliveries in ledger.came.items():
        places = {(queue, offset) for queue, offset, _ in deliveries}
        assert places == {ledger.answered[payload]}, "stored twice"
        assert {attempt for *_, attempt in deliveries} == {0}, "no attempt failed"
        assert len(deliveries) == 1, "handled twice"


async def update(cluster: LocalCluster, ledger: Ledger) -> list[int]:
    """Restart every service, each under load; how they ended."""
    exit_codes = []
    for service in cluster.services * ROUNDS:
        await ledger.until_answered(BETWEEN)
        exit_codes.append(await cluster.terminate(service))
        await cluster.restart(service)
    await ledger.until_answered(BETWEEN)
    ledger.updated = True
    return exit_codes


async def write(client: tidemark.Client, ledger: Ledger, writer: int) -> None:
    publisher = await client.publisher(QUEUES[writer % len(QUEUES)])
    number = 0
    while not ledger.updated:
        await publish(publisher, b"%d-%d" % (writer, number), ledger)
        number += 1
        await SystemClock().sleep_ms(5)  # a steady load, not all that the machine can do


async def publish(publisher: tidemark.Publisher, payload: bytes, ledger: Ledger) -> None:
    receipt = await publisher.publish(payload)
    ledger.answered[payload] = (publisher.lmq_name, receipt.offset)
    ledger.more.set()


async def read(client: tidemark.Client, ledger: Ledger) -> None:
    async with client.subscribe(QUEUES) as deliveries:
        async for batch in deliveries.batches():
            for index, payload in enumerate(batch.payloads):
                delivery = (batch.lmq_name, batch.offset + index, batch.attempt)
                ledger.came.setdefault(payload, []).append(delivery)
            await batch.ack()
            if LAST in ledger.came and ledger.answered.keys() <= ledger.came.keys():
                break
        await deliveries.flush()
