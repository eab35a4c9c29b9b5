"""The master of a partition in a cluster, while servers of the URL hang, are gone, or are wrong."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest
import redis

from storage_svc.engines.engine import Table
from storage_svc.engines.redis import address as address_module
from storage_svc.engines.redis import server as server_module
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngine, RedisEngines
from storage_svc.engines.redis.layout import mark_key
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import puts
from tests.support.local_broker import until
from tests.support.valkey_cluster import SLOTS, ValkeyCluster
from tidemark.local.ports import free_ports

StartServer = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts a server that gives the same answer to everything, or none; returns its address."""
    async with AsyncExitStack() as stack:

        async def start(answer: bytes) -> str:
            async def serve(sender: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
                while await sender.read(1 << 16):
                    answers.write(answer)
                answers.close()

            server = await stack.enter_async_context(
                await asyncio.start_server(serve, "127.0.0.1", 0)
            )
            stack.callback(server.close)
            host, port = server.sockets[0].getsockname()
            return f"{host}:{port}"

        yield start


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trip has the time for a few servers that hang, and not for all of them."""
    monkeypatch.setattr(address_module, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_module, "TRIP_TIMEOUT_S", 1.2)


async def opened(engines: RedisEngines) -> RedisEngine:
    """Tries again, as a partition does."""
    engine: list[RedisEngine] = []

    async def is_open() -> bool:
        with suppress(ConnectionError):
            engine.append(await engines.open(IDENTITY))
        return bool(engine)

    await until(is_open)
    return engine[0]


async def test_redis_servers_that_hang_do_not_keep_others_from_being_asked(
    moving_cluster: ValkeyCluster, start_server: StartServer, impatient: None
) -> None:
    """S9: a machine that is gone answers no connection, and may have the first of the URL."""
    hanging = [await start_server(b"") for _ in range(5)]
    url = moving_cluster.url.replace("://", "://" + ",".join(hanging) + ",")

    engine = await opened(RedisEngines(ServerUrl.parse(url)))

    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.close()


async def test_a_redis_server_that_names_a_master_of_old_is_not_believed_twice(
    moving_cluster: ValkeyCluster, start_server: StartServer, impatient: None
) -> None:
    """S9: one that is cut off from the others knows a master that is gone."""
    (gone,) = free_ports("127.0.0.1", 1)
    slots = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (SLOTS - 1, gone)
    wrong = await start_server(slots)
    url = moving_cluster.url.replace("://", f"://{wrong},")

    engine = await opened(RedisEngines(ServerUrl.parse(url)))

    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.close()


async def test_redis_servers_that_the_url_does_not_name_are_asked_as_well(
    moving_cluster: ValkeyCluster, impatient: None
) -> None:
    """S9: the one that it names is gone when the connection to the master has to be made again."""
    master = moving_cluster.master_of(mark_key(IDENTITY))
    named = next(each for each in moving_cluster.servers if each is not master)
    url = f"redis+cluster://127.0.0.1:{named.port}"
    engine = await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)
    moving_cluster.pause(named)
    try:
        with redis.Redis(host="127.0.0.1", port=master.port) as client:
            client.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")

        await engine.commit(puts(Table.GROUPS, b"a"))
        assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]
    finally:
        moving_cluster.resume(named)
    await engine.close()
