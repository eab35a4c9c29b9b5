"""Brokers whose exchange breaks, as storage reports them to the registry."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.support.local_broker import in_time, until
from tests.support.storage_client import CLUSTER_ID, INCARNATION, RunningStorage
from tests.support.storage_fixtures import StartStorage
from tests.support.valkey import KIND, PATIENT, valkey
from tidemark.registry.protocol import Member
from tidemark.registry.redis_registry import RedisRegistry

BROKER = Member("broker-a", "127.0.0.1:1", INCARNATION)
OTHER = Member("broker-b", "127.0.0.1:2", INCARNATION + 1)


class Suspicions:
    """A registry with two brokers, and whom it suspects."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def ids(self) -> set[str]:
        found = await self._server.hkeys(f"{{tidemark/{CLUSTER_ID}}}/{KIND}/suspected")
        return {each.decode() for each in found}

    async def until_ids(self, expected: set[str]) -> None:
        async def are_so() -> bool:
            return await self.ids() == expected

        await until(are_so)


@pytest.fixture
async def registry_url(tmp_path: Path) -> AsyncIterator[str]:
    with valkey(tmp_path / "valkey") as server:
        yield server.connection_url


@pytest.fixture
async def suspicions(registry_url: str) -> AsyncIterator[Suspicions]:
    registry = RedisRegistry(registry_url, CLUSTER_ID, KIND, PATIENT)
    await registry.beat(BROKER, 0)
    await registry.beat(OTHER, 0)
    async with redis.asyncio.Redis.from_url(registry_url) as server:
        yield Suspicions(server)
    await registry.close()


@pytest.fixture
async def storage(start_storage: StartStorage, registry_url: str) -> RunningStorage:
    return await start_storage(registry_url=registry_url, partitions=2)


@pytest.mark.rocksdb(reason="its clock is not that of a server")
async def test_a_broker_is_suspected_when_its_exchange_breaks_while_it_holds_partitions(
    storage: RunningStorage, suspicions: Suspicions
) -> None:
    """S8: others need not wait for its time to live. Those whose exchange goes on are not."""
    async with storage.exchange(1, broker_id=OTHER.member_id, incarnation=OTHER.incarnation):
        async with storage.exchange(0) as breaking:
            await in_time(breaking.healths.get())  # it is bound
            assert await suspicions.ids() == set()

        await suspicions.until_ids({BROKER.member_id})


@pytest.mark.rocksdb(reason="its clock is not that of a server")
async def test_a_broker_that_has_given_its_partitions_away_is_not_suspected(
    storage: RunningStorage, suspicions: Suspicions
) -> None:
    """S8: neither one that has unbound, nor one that another has fenced."""
    async with storage.exchange(0) as unbound:
        await unbound.unbind()
        await unbound.done_writing()
        await in_time(unbound.ended)
    async with storage.exchange(1) as fenced:
        other = {"broker_id": OTHER.member_id, "incarnation": OTHER.incarnation}
        async with storage.exchange(1, **other) as holding:
            await in_time(fenced.ended)
            await in_time(holding.healths.get())  # it is bound

    await suspicions.until_ids({OTHER.member_id})


@pytest.mark.rocksdb(reason="its clock is not that of a server")
async def test_a_registry_that_is_away_does_not_hold_storage_up(
    start_storage: StartStorage,
) -> None:
    """S8: nothing listens at its address."""
    storage = await start_storage(registry_url="redis://127.0.0.1:1")
    for _ in range(3):
        async with storage.exchange():
            pass

    assert (await storage.info()).broker_id == BROKER.member_id
