"""An operator moves partitions and drains brokers through the registry, by RPC and command."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tidemark
from tests.support.brokers import Brokers
from tests.support.cli_process import Cli, Finished
from tests.support.local_broker import in_time, until
from tests.support.valkey import valkey
from tidemark.errors import InvalidArgument

PARTITIONS = 4


class Operated:
    """Two brokers with a registry, and an operator."""

    def __init__(self, brokers: Brokers, client: tidemark.Client) -> None:
        self.brokers = brokers
        self.client = client
        self._cli = Cli(
            {
                "TIDEMARK_ADDRESS": brokers.members[0][1],
                "TIDEMARK_STORAGE_ADDRESSES": ",".join(brokers.addresses),
            }
        )

    async def cli(self, *arguments: str) -> Finished:
        return await asyncio.to_thread(self._cli.run, *arguments)

    async def held(self) -> dict[int, str]:
        """The broker that has claimed each partition."""
        partitions = await self.client.admin.list_partitions()
        return {each.partition: each.broker_id for each in partitions}

    async def is_balanced(self) -> bool:
        described = await self.client.admin.describe_cluster()
        assigned = {number: each.broker_id for number, each in described.assigned.items()}
        shares = Counter(assigned.values())
        return sorted(shares.values()) == [2, 2] and await self.held() == assigned

    async def until_held(self, expected: dict[int, str]) -> None:
        async def is_held() -> bool:
            return (await self.held()).items() >= expected.items()

        await until(is_held)


@pytest.fixture
async def operated(tmp_path: Path) -> AsyncIterator[Operated]:
    brokers = Brokers(tmp_path / "storage", nodes=1, brokers=2, partitions=PARTITIONS)
    with valkey(tmp_path / "valkey") as server:
        try:
            await brokers.start_node(0)
            found = {"brokers": (), "registry_url": server.connection_url}
            await asyncio.gather(*(brokers.start_member(number, **found) for number in range(2)))
            async with tidemark.connect(brokers.members[0][1]) as client:
                operated = Operated(brokers, client)
                await until(operated.is_balanced)
                yield operated
        finally:
            await brokers.close()


async def test_an_operator_moves_a_partition_and_drains_a_broker(operated: Operated) -> None:
    """S8: the other broker takes over, and `tidemark cluster` shows both."""
    client = operated.client
    before = await operated.held()
    moving = next(number for number, holder in before.items() if holder == "broker-0")
    described = await client.admin.describe_cluster()
    assert not described.static_members
    assert described.registry_error == ""
    assert {n: each.broker_id for n, each in described.assigned.items()} == before

    moved = await operated.cli("cluster", "move", str(moving), "broker-1")
    assert moved.code == 0, moved.err
    assert f"Partition {moving} moves to broker-1 (assignment " in moved.out
    await operated.until_held({moving: "broker-1"})  # another one may move back, for balance
    shown = (await operated.cli("cluster", "--json")).json
    assert shown["assignment"]["version"] > described.assignment_version
    assert [each["partition"] for each in shown["partitions"] if each["pinned"]] == [moving]

    drained = await operated.cli("cluster", "drain", "broker-1")
    assert drained.code == 0, drained.err
    await operated.until_held(dict.fromkeys(before, "broker-0"))
    text = (await operated.cli("cluster")).out
    assert "drained" in text
    assert ", registry" in text
    await client.admin.create_topic("orders")
    publisher = await client.publisher("orders")
    await in_time(publisher.publish(b"served"))


async def test_an_impossible_move_or_drain_is_refused_with_its_reason(operated: Operated) -> None:
    """S8, S3."""
    admin = operated.client.admin
    with pytest.raises(InvalidArgument, match="no partition 4"):
        await admin.move_partition(PARTITIONS, "broker-1")
    with pytest.raises(InvalidArgument, match="no member unknown"):
        await admin.move_partition(0, "unknown")
    with pytest.raises(InvalidArgument, match="no member unknown"):
        await admin.drain_member("unknown")
    storage = await operated.cli("cluster", "drain", operated.brokers.addresses[0])
    assert (storage.code, "rocksdb" in storage.err) == (1, True)

    await admin.drain_member("broker-0")
    with pytest.raises(InvalidArgument, match="no other member"):
        await admin.drain_member("broker-1")
