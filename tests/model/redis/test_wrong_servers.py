"""Servers that an operator has set up wrongly: the error names the setting to change."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import redis

from storage_svc.engines.engine import EngineFailed, Table
from storage_svc.engines.redis import engine as engine_module
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngines
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import MasterAndReplica, Servers, puts
from tests.support.local_broker import until
from tests.support.valkey import valkey
from tidemark.errors import StoreNotFit
from tidemark.local.ports import free_ports

TLS_HINT: Final = "rediss in the URL"


def _with_scheme(url: str, scheme: str) -> str:
    return url.replace("redis://", scheme)


async def _refusal(url: str) -> str:
    with pytest.raises(ConnectionError) as refused:
        await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)
    return str(refused.value)


# --- the URL --------------------------------------------------------------------------------------


async def test_a_missing_or_wrong_password_is_a_matter_of_the_url(tmp_path: Path) -> None:
    """S5, S9: and no matter of TLS."""
    with valkey(tmp_path, durable=True) as server:
        url = server.connection_url
        with redis.Redis.from_url(url) as client:
            client.config_set("requirepass", "right")

            missing = await _refusal(url)
            wrong = await _refusal(_with_scheme(url, "redis://:wrong@"))

            client.config_set("requirepass", "")  # or the server cannot be stopped

    assert "requires a password, and TIDEMARK_REDIS_URL has none" in missing
    assert "check the user and the password in TIDEMARK_REDIS_URL" in wrong
    assert TLS_HINT not in missing + wrong
    assert "wrong@" not in wrong


async def test_a_port_without_a_server_is_named() -> None:
    """S9."""
    (port,) = free_ports("127.0.0.1", 1)

    refused = await _refusal(f"redis://127.0.0.1:{port}")

    assert f"connecting to 127.0.0.1:{port}" in refused
    assert TLS_HINT not in refused


@pytest.mark.parametrize(
    ("scheme", "path", "why"),
    [
        ("redis+cluster://", "", "TIDEMARK_REDIS_URL must begin with redis://"),
        ("redis+sentinel://", "/main", "TIDEMARK_REDIS_URL must name Sentinels"),
    ],
)
async def test_a_server_alone_is_neither_a_cluster_nor_a_sentinel(
    servers: Servers, scheme: str, path: str, why: str
) -> None:
    """S9."""
    refused = await _refusal(_with_scheme(servers.url, scheme) + path)

    assert why in refused
    assert TLS_HINT not in refused


async def test_a_replica_in_the_url_is_refused_with_the_advice_to_name_the_master(
    with_replica: MasterAndReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: it is not refused at once, since it may be promoted. One that takes writes is refused as
    well: it loses them when it synchronizes with its master."""
    monkeypatch.setattr(engine_module, "COMMIT_WITHIN_MS", 200)
    replica = with_replica.replica.connection_pool.connection_kwargs
    for read_only in ("yes", "no"):
        with_replica.replica.config_set("replica-read-only", read_only)

        refused = await _refusal("redis://{host}:{port}".format_map(replica))

        assert "is a replica (TIDEMARK_REDIS_URL must name the master)" in refused


# --- the server -----------------------------------------------------------------------------------


async def test_a_server_that_wants_replicas_for_its_writes_names_the_setting(
    servers: Servers,
) -> None:
    """S9: nothing is written, and nothing is wrong once they are there."""
    engine = await servers.open()
    servers.redis.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(EngineFailed, match="min-replicas-to-write"):
            await engine.commit(puts(Table.GROUPS, b"a"))
        with pytest.raises(ConnectionError, match="min-replicas-to-write"):
            await servers.open()
    finally:
        servers.redis.config_set("min-replicas-to-write", 0)

    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))


async def test_a_server_that_cannot_save_names_the_setting(tmp_path: Path) -> None:
    """S9: MISCONF, of a server whose directory is gone."""
    directory = tmp_path / "valkey"
    with valkey(directory) as server:
        engines = RedisEngines(ServerUrl.parse(server.connection_url), Durability.AS_IS)
        engine = await engines.open(IDENTITY)
        with redis.Redis.from_url(server.connection_url) as client:
            client.config_set("save", "3600 1")
            shutil.rmtree(directory)
            client.bgsave()

            async def has_failed() -> bool:
                return bool(client.info("persistence")["rdb_last_bgsave_status"] == "err")

            await until(has_failed)

            with pytest.raises(EngineFailed, match=r"MISCONF .*stop-writes-on-bgsave-error"):
                await engine.commit(puts(Table.GROUPS, b"a"))
            with pytest.raises(ConnectionError, match=r"MISCONF .*stop-writes-on-bgsave-error"):
                await engines.open(IDENTITY)
            await engine.close()
            directory.mkdir()
            client.config_set("save", "")  # or it does not stop


async def test_an_eviction_policy_that_has_no_effect_yet_is_a_warning(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: without a limit of its memory, a server evicts nothing."""
    await servers.open()
    assert "maxmemory-policy" not in caplog.text
    servers.redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        await servers.open()
    finally:
        servers.redis.config_set("maxmemory-policy", "noeviction")

    assert "set maxmemory-policy to noeviction" in caplog.text


async def test_a_server_that_is_too_old_is_refused(servers: Servers) -> None:
    """S9: as a Valkey that reports the version of an older Redis."""
    port = int(servers.url.rpartition(":")[2])

    async with _reporting(port, b"6") as url:
        with pytest.raises(StoreNotFit, match=r"compatible with Redis 6\..*7\.0 or newer"):
            await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)


@asynccontextmanager
async def _reporting(port: int, major: bytes) -> AsyncIterator[str]:
    """The URL of a wire to a server, on which its major version is another one."""
    serving: set[asyncio.Task[None]] = set()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 20):
                before, name, version = data.partition(b"redis_version:")
                sink.write(before + name + (major + version[1:] if name else b""))
        finally:
            sink.close()
            with suppress(OSError):
                await sink.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        for way in (pass_on(reader, to_server), pass_on(from_server, writer)):
            serving.add(asyncio.create_task(way))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
