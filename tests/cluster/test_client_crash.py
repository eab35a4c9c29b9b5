"""The client in the middle of work while broker and storage are killed with `kill -9` around it."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final

import tidemark
from tests.cluster.conftest import StartCluster
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.local.cluster import LocalCluster, ServiceName

MESSAGES: Final = 100_000
WRITERS: Final = 40
MANY: Final = 24
QUEUES: Final = [f"jobs/{number}" for number in range(8)]
VISIBILITY_MS: Final = 3_000
ENDS_WITHIN_MS: Final = 400_000
KILLS: Final[tuple[tuple[int, ServiceName], ...]] = (
    (15_000, "broker"),
    (35_000, "storage"),
    (55_000, "broker"),
    (75_000, "storage"),
)
"""After how many answered publishes who is killed."""


class Ledger:
    """What was published and what came, by the number in each message."""

    def __init__(self) -> None:
        self.published = 0
        self.places: dict[bytes, set[tuple[str, int]]] = {}
        self.deliveries = 0
        self.more = asyncio.Event()

    def answered(self, messages: int) -> None:
        self.published += messages
        self.more.set()

    def came(self, batch: tidemark.DeliveryBatch) -> None:
        for index, payload in enumerate(batch.payloads):
            self.deliveries += 1
            self.places.setdefault(payload, set()).add((batch.lmq_name, batch.offset + index))

    async def until_published(self, messages: int) -> None:
        while self.published < messages:
            self.more.clear()
            await self.more.wait()


async def test_no_message_is_lost_or_published_twice_while_services_are_killed(
    start_cluster: StartCluster,
) -> None:
    """S2, S11, V4, V6: 100 000 publishes and consumes over four `kill -9`."""
    cluster: LocalCluster = await start_cluster(partitions=2)
    ledger = Ledger()

    async with tidemark.connect(
        cluster.address("broker"), client_id="survivor", publish_timeout_ms=ENDS_WITHIN_MS
    ) as client:
        await client.create_topic("jobs", visibility_timeout_ms=VISIBILITY_MS)

        await in_time(
            asyncio.gather(
                write(client, ledger),
                read(client, ledger),
                kill(cluster, ledger),
            )
        )

    assert len(ledger.places) == MESSAGES, "lost"
    twice = {payload: places for payload, places in ledger.places.items() if len(places) > 1}
    assert not twice, "published twice"
    assert ledger.published == MESSAGES


async def write(client: tidemark.Client, ledger: Ledger) -> None:
    """Many callers at once: half of them message by message, half in batches."""
    publishers = [await client.publisher(lmq_name) for lmq_name in QUEUES]
    share = MESSAGES // WRITERS
    await asyncio.gather(
        *(
            one_writer(publishers[number % len(QUEUES)], number * share, share, ledger)
            for number in range(WRITERS)
        )
    )


async def one_writer(publisher: tidemark.Publisher, first: int, count: int, ledger: Ledger) -> None:
    payloads = [b"%d" % number for number in range(first, first + count)]
    while payloads:
        await publisher.publish(payloads[0])
        many, payloads = payloads[1 : 1 + MANY], payloads[1 + MANY :]
        await publisher.publish_many(many)
        ledger.answered(1 + len(many))


async def read(client: tidemark.Client, ledger: Ledger) -> None:
    async with client.subscribe(QUEUES, credit=5_000) as deliveries:
        async for batch in deliveries.batches():
            ledger.came(batch)
            await batch.ack()
            if len(ledger.places) == MESSAGES:
                break
        with suppress(TidemarkError):  # acks that came too late for their reservations
            await deliveries.flush()


async def kill(cluster: LocalCluster, ledger: Ledger) -> None:
    for published, service in KILLS:
        await ledger.until_published(published)
        await cluster.kill(service)
        await cluster.restart(service)


async def in_time(work: Awaitable[object]) -> None:
    """A hang is a failure, not a long test."""
    await SystemClock().wait_for(work, ENDS_WITHIN_MS)
