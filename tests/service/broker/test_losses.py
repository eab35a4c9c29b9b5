"""A broker is a witness of what storage has answered: lost commits are noticed (S9)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.cli_process import Cli
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    payloads_of,
    reason_of,
    run_of,
    until,
)
from tests.support.shared_engine import SharedEngines, SharedStore
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import SystemClock
from tidemark.errors import InvalidArgument


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    """A broker over storage on a shared store."""
    local = LocalBroker(tmp_path, SystemClock(), partitions=1)
    try:
        yield local
    finally:
        await local.close()


async def faults(local: LocalBroker) -> list[str]:
    answer = await local.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
    return [fault.reason for each in answer.partitions for fault in each.faults]


async def test_a_tail_that_is_lost_while_storage_is_away_is_not_served_quietly(
    local: LocalBroker,
) -> None:
    """S9: storage starts again and cannot know; its broker does. An operator lets it go on."""
    store = SharedStore()
    local.wrap = lambda _: SharedEngines(store)
    await local.start_storage()
    await local.start_broker()
    await local.create_topic()
    await local.publish(run_of(QUEUE, b"kept"))
    await local.publish(run_of(QUEUE, b"lost"))
    await local.stop_storage()
    store.lose_tail(0, 1)
    await local.start_storage()

    async def is_noticed() -> bool:
        return await faults(local) == ["DATA_LOST"]

    await until(is_noticed)
    (refused,) = await local.publish(run_of(QUEUE, b"early"))
    cli = Cli({"TIDEMARK_ADDRESS": local.address})
    asked = await asyncio.to_thread(cli.run, "cluster", "confirm-loss", "0")
    confirm = ("cluster", "confirm-loss", "0", "--yes", "--json")
    lost = (await asyncio.to_thread(cli.ok, *confirm)).json
    again = await asyncio.to_thread(cli.run, *confirm)

    async def is_published() -> bool:
        (result,) = await local.publish(run_of(QUEUE, b"later"))
        return not reason_of(result)

    await until(is_published)
    assert reason_of(refused) in ("PARTITION_FAULTY", "UNAVAILABLE")
    witnessed, found = lost["witnessed_commit"], lost["found_commit"]
    assert witnessed > found > 0
    assert asked.code == 2
    assert f"commit {witnessed} was answered" in asked.err
    assert f"stored is {found}" in asked.err
    assert (again.code, "has lost nothing" in again.err) == (1, True)
    assert await faults(local) == []
    assert payloads_of(await local.pull(QUEUE, max_messages=9)) == [b"kept", b"later"]


async def test_nothing_is_confirmed_where_nothing_is_lost(local: LocalBroker) -> None:
    """S9."""
    await local.start_storage()
    await local.start_broker()

    with pytest.raises(InvalidArgument, match="has lost nothing"):
        await local.topics.ConfirmLoss(topic_pb2.ConfirmLossRequest(partition=0))
