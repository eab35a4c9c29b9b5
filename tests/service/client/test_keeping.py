"""Messages in hand are kept for their handler when a topic changes or its partition moves (K1)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.service.client.test_attempts import QUEUE, VISIBILITY_MS, pass_time
from tests.service.client.test_consuming import publish, take
from tests.support.local_broker import LocalBroker, in_time, local_broker
from tidemark.clock import ManualClock

pytestmark = pytest.mark.slow


@pytest.fixture
async def clock() -> ManualClock:
    """Time of the broker, its storage and the client that works."""
    return ManualClock()


@pytest.fixture
async def local(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, clock, partitions=1, client_timeout_ms=3_600_000) as local:
        yield local


async def test_a_shorter_visibility_timeout_of_the_topic_takes_nothing_from_a_handler(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, S7: what was reserved before is renewed in time, though each renewal lasts less."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE]) as deliveries:
        (first,) = await take(deliveries, 1)
        await client.admin.update_topic("orders", {"visibility_timeout_ms": VISIBILITY_MS // 6})
        await pass_time(clock, 4 * VISIBILITY_MS, slow)

        await in_time(first.ack(wait=True))
