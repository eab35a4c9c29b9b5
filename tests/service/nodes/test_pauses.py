"""Pauses where several brokers share the partitions, and where one takes over (L10)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tidemark
from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time
from tests.support.sdk_calls import publish
from tests.support.valkey import valkey


async def pulled(client: tidemark.Client, lmq_name: str) -> list[bytes]:
    return [each.payload for each in await in_time(client.pull(lmq_name, wait_ms=0))]


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    with valkey(tmp_path / "valkey") as registry:
        async with several_brokers(
            tmp_path / "storage", nodes=1, brokers=2, partitions=2, registry=registry
        ) as several:
            await several.until_held_by(0, 1)
            yield several


async def test_a_pause_holds_at_every_broker_and_over_a_takeover(brokers: Brokers) -> None:
    """L10: asked for at any broker, and kept when the holder of the queue leaves."""
    queues = [f"jobs/{number}" for number in range(6)]  # in both partitions
    async with (
        tidemark.connect(brokers.members[0][1]) as one,
        tidemark.connect(brokers.members[1][1]) as other,
    ):
        await one.admin.create_topic("jobs")
        await one.admin.create_topic("own")
        for lmq_name in [*queues, "own/a"]:
            await publish(one, lmq_name, b"0")

        await one.admin.pause_topic("jobs")
        await other.admin.pause_queue("own/a")

        for client in (one, other):
            for lmq_name in [*queues, "own/a"]:
                assert await pulled(client, lmq_name) == []

        await brokers.stop_member(1)
        await brokers.until_held_by(0)
        for lmq_name in [*queues, "own/a"]:
            assert await pulled(one, lmq_name) == []

        await one.admin.resume_topic("jobs")
        await one.admin.resume_queue("own/a")
        for lmq_name in [*queues, "own/a"]:
            assert await pulled(one, lmq_name) == [b"0"]
