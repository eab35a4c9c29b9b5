"""A registry on a cluster of Valkeys, of which its URL names one."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from tests.support.local_broker import until
from tests.support.valkey import KIND
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.errors import RegistryUnavailable
from tidemark.registry.protocol import Assignment, Member, Timers
from tidemark.registry.redis_registry import RedisRegistry

CLUSTER_ID = "cluster-a"
KEY = f"{{tidemark/{CLUSTER_ID}}}/{KIND}/members".encode()
A, B = Member("a", "host-a:7400", 1), Member("b", "host-b:7400", 2)
PATIENT = Timers(time_to_live_ms=600_000)


async def test_a_registry_in_a_redis_cluster_is_found_at_every_server_and_after_a_failover(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """S8: members follow the master of the slot; a notice reaches those at other servers."""
    if not request.config.option.redis:
        pytest.skip("part of make test-redis")
    with ValkeyCluster.running(tmp_path, masters=3, replicas=3) as cluster:
        async with AsyncExitStack() as stack:
            master = await asyncio.to_thread(cluster.master_of, KEY)
            others = [each for each in cluster.servers if each is not master]
            registries = []
            for server in others:
                url = server.connection_url
                registries.append(RedisRegistry(url, CLUSTER_ID, KIND, PATIENT))
                stack.push_async_callback(registries[-1].close)
            first, second = registries[:2]
            await first.beat(A, 0)
            notices = aiter(second.changes())
            await anext(notices)
            assert await first.assign(Assignment(1, {0: "a"}), 0)
            async with asyncio.timeout(60):
                await anext(notices)
            for each in registries:
                assert (await each.look()).assignment.holders == {0: "a"}

            await asyncio.to_thread(cluster.kill, master)

            async def are_back() -> bool:
                with suppress(RegistryUnavailable):
                    await second.beat(B, 0)
                    return set((await first.look()).members) == {"a", "b"}
                return False

            await until(are_back)
