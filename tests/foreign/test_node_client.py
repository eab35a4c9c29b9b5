"""Node.js with nothing but the contract, at a broker that holds none of its queues."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time
from tests.support.repository import ROOT

PROGRAM = ROOT / "examples" / "node" / "unary_client.mjs"
CALLED = 0
"""The broker that the program calls, of three; each holds one of three partitions."""


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with several_brokers(tmp_path, nodes=2, brokers=3, partitions=3) as several:
        yield several


async def run_node(*arguments: str) -> list[str]:
    """The lines that the program prints; raises with its errors if it fails."""
    node = shutil.which("node")
    assert node is not None, "node is not installed"
    process = await asyncio.create_subprocess_exec(
        node,
        str(PROGRAM),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"]},  # noqa: TID251 - handed on, not read
    )
    try:
        out, errors = await in_time(process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return out.decode().splitlines()


@pytest.mark.parametrize("partition", [1, 2])
async def test_unary_calls_of_node_work_at_a_broker_that_holds_none_of_its_queues(
    brokers: Brokers, partition: int
) -> None:
    """S8, E3: publish, pull, settle, and exclusive ownership with a takeover."""
    (jobs,), (chat,) = (brokers.names_in(partition, 1, topic) for topic in ("jobs", "chats"))

    lines = await run_node(brokers.members[CALLED][1], jobs, chat)

    assert lines[:3] == [
        f"published to partition {partition}",
        "pulled resize cat.png",
        "acknowledged 1",
    ]
    assert lines[3:7] == [
        "laptop: Hi Ada (SUBSCRIPTION_STATE_ACTIVE)",
        "the phone's epoch is higher: true",
        "laptop: 0 messages (SUBSCRIPTION_STATE_EVICTED)",
        "phone: Hi Ada, acknowledged 1",
    ]
    assert lines[7].startswith("laptop: too late, ")
    assert "unknown" in lines[8]
    for name in (jobs, chat):
        queue = await brokers.queue(name)
        assert queue.messages == 0, name
