"""Servers and settings that are wrong, busy, full or changed: a clear error, and nothing lost."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from storage_svc.engines.engine import Batch, EngineFailed, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import mark_key
from storage_svc.engines.redis.scripts import COMMIT
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import Servers, puts
from tests.support.local_broker import in_time, until
from tests.support.lossy_wire import LossyWire
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.errors import CommitOutcomeUnknown, StoreNotFit

LOGIN = "nobody:secret@"


@contextmanager
def _setting(servers: Servers, name: str, value: object) -> Iterator[None]:
    """A setting of the server, which tests share."""
    (before,) = servers.redis.config_get(name).values()
    servers.redis.config_set(name, value)
    try:
        yield
    finally:
        servers.redis.config_set(name, before)


def _break_connections(servers: Servers) -> None:
    servers.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://host?decode_responses=true",
        "redis://host?socket_timeout=1",
        "redis://host?protocol=3",
        "redis://host?username=other",
        "redis+cluster://host?db=1",
        "redis://host/1",
        "redis+cluster://host/1",
    ],
)
def test_an_option_that_would_change_how_servers_are_used_is_refused(url: str) -> None:
    """S5, S9: redis-py takes many from a URL, and answers would come in another form."""
    with pytest.raises(StoreNotFit, match="TIDEMARK_REDIS_URL"):
        ServerUrl.parse(url)


async def test_a_database_of_one_server_can_be_chosen(servers: Servers) -> None:
    """S9."""
    engine = await servers.open(url=servers.url + "?db=3")

    await engine.commit(puts(Table.GROUPS, b"a"))

    with redis.Redis.from_url(servers.url, db=3) as chosen:
        assert chosen.hget(mark_key(IDENTITY), "sequence") == b"1"
    assert not servers.redis.exists(mark_key(IDENTITY))


async def test_a_wrong_password_is_named_as_such(servers: Servers) -> None:
    """S5: and is not repeated in the error."""
    with pytest.raises(ConnectionError, match="invalid username-password") as refused:
        await servers.open(url=servers.url.replace("redis://", f"redis://{LOGIN}"))

    assert "secret" not in str(refused.value)


async def test_a_server_alone_is_no_cluster(servers: Servers) -> None:
    """S5: the error has the reason of each server that was asked."""
    with pytest.raises(ConnectionError, match="cluster support disabled"):
        await servers.open(url=servers.url.replace("redis://", "redis+cluster://"))


async def test_a_redis_cluster_that_refuses_the_password_is_not_a_missing_master(
    moving_cluster: ValkeyCluster,
) -> None:
    """S5."""
    url = moving_cluster.url.replace("://", f"://{LOGIN}")

    with pytest.raises(ConnectionError, match="invalid username-password") as refused:
        await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)

    assert "secret" not in str(refused.value)


# --- servers that change --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("appendfsync", "everysec", "appendfsync everysec"),
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
    ],
)
@pytest.mark.parametrize("writes", [True, False], ids=["commit", "verify"])
async def test_a_server_that_takes_the_place_of_another_is_checked_as_well(
    servers: Servers, name: str, value: str, why: str, writes: bool
) -> None:
    """S9, C6: a replica that is promoted has settings of its own, which may lose commits."""
    node = servers.node()
    engine = await node.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    with _setting(servers, "maxmemory", 1 << 30), _setting(servers, name, value):
        _break_connections(servers)

        with pytest.raises((EngineFailed, CommitOutcomeUnknown), match=why):
            await (engine.commit(puts(Table.GROUPS, b"b")) if writes else engine.verify())
        with pytest.raises(StoreNotFit, match=why):
            await node.open()

    again = await node.open()
    await again.commit(puts(Table.GROUPS, b"c"))
    assert await again.load(Table.GROUPS, [b"a", b"b", b"c"]) == [
        b"value of a",
        None,
        b"value of c",
    ]


# --- servers that are busy or full ----------------------------------------------------------------


async def test_a_script_of_another_user_delays_commits_and_fails_none(servers: Servers) -> None:
    """S9: the server refuses everything while it runs, until an operator ends it."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    with _setting(servers, "busy-reply-threshold", 10), redis.Redis.from_url(servers.url) as other:

        def hang() -> None:
            with pytest.raises(redis.ResponseError):
                other.eval("while true do end", 0)

        hanging = threading.Thread(target=hang)
        hanging.start()

        async def is_busy() -> bool:
            try:
                return not servers.redis.ping()
            except redis.ResponseError as error:
                return "BUSY" in str(error)

        await until(is_busy)
        commit = asyncio.ensure_future(engine.commit(puts(Table.GROUPS, b"b")))
        await asyncio.wait({commit}, timeout=0.3)
        is_early = commit.done()
        servers.redis.execute_command("SCRIPT KILL")
        hanging.join()
        await commit

    assert not is_early
    assert await engine.load(Table.GROUPS, [b"a", b"b"]) == [b"value of a", b"value of b"]


async def test_a_server_without_room_for_connections_keeps_those_that_are_there(
    servers: Servers,
) -> None:
    """S9: others are unharmed, and the error has the reason."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.load(Table.GROUPS, [b"a"])
    with _setting(servers, "maxclients", len(servers.redis.client_list())):
        with pytest.raises(ConnectionError, match="max number of clients"):
            await servers.open()

        await engine.commit(puts(Table.GROUPS, b"b"))
        assert await engine.load(Table.GROUPS, [b"b"]) == [b"value of b"]

    await servers.open()


async def test_a_partition_opens_while_the_memory_is_full(servers: Servers) -> None:
    """S9: to settle what is there; publishes are refused by the watermark."""
    await (await servers.open()).commit(puts(Table.GROUPS, b"a"))
    with _setting(servers, "maxmemory", 1):
        servers.redis.script_flush()
        engine = await servers.open()

        await engine.commit(puts(Table.GROUPS, b"b"))

        assert await engine.load(Table.GROUPS, [b"a", b"b"]) == [b"value of a", b"value of b"]


# --- users whose rights change --------------------------------------------------------------------


@pytest.fixture
def limited_url(servers: Servers) -> Iterator[str]:
    """The URL of a user who has all rights until a test withdraws some."""
    servers.redis.execute_command("ACL SETUSER limited on >secret ~* +@all")
    yield servers.url.replace("redis://", "redis://limited:secret@")
    servers.redis.execute_command("ACL DELUSER limited")


def _two_kinds_of_rows(value: bytes) -> Batch:
    """Every command of a commit takes part in it."""
    batch = Batch()
    batch.put(Table.GROUPS, b"a", value)
    batch.put(Table.RUN_HEADERS, u64(1), value)
    batch.delete(Table.LANES, b"gone")
    return batch


@pytest.mark.parametrize("right", ["hset", "hdel", "zadd", "zrem", "zcard", "zremrangebylex"])
async def test_a_right_that_is_withdrawn_leaves_no_half_commit(
    servers: Servers, limited_url: str, right: str
) -> None:
    """S2, V3: a script keeps what it wrote before a command of it was refused."""
    node = servers.node(url=limited_url)
    engine = await node.open()
    await engine.commit(_two_kinds_of_rows(b"before"))
    servers.redis.execute_command(f"ACL SETUSER limited -{right}")

    with pytest.raises(EngineFailed, match=f"may not run the command '{right}'"):
        await engine.commit(_two_kinds_of_rows(b"after"))
    with pytest.raises(StoreNotFit, match=f"may not run the command '{right}'"):
        await node.open()

    servers.redis.execute_command("ACL SETUSER limited +@all")
    again = await node.open()
    assert await again.load(Table.GROUPS, [b"a"]) == [b"before"]
    assert await again.load(Table.RUN_HEADERS, [u64(1)]) == [b"before"]


@pytest.mark.parametrize("right", ["type", "hmget", "evalsha", "rpush", "zrangebylex"])
async def test_a_user_with_too_few_rights_opens_nothing(
    servers: Servers, limited_url: str, right: str
) -> None:
    """S5: it is found before the commit that needs the right, and the error names it."""
    servers.redis.execute_command(f"ACL SETUSER limited -{right}")

    with pytest.raises(StoreNotFit, match=f"'{right}'"):
        await servers.open(url=limited_url)

    assert not servers.redis.exists(mark_key(IDENTITY))


async def test_a_refusal_after_a_lost_answer_leaves_the_outcome_unknown(
    servers: Servers, wire: LossyWire, limited_url: str
) -> None:
    """S2, S9: the commit is stored. Callers who are told otherwise would repeat it."""
    host = servers.url.removeprefix("redis://")
    engine = await servers.open(url=limited_url.replace(host, wire.url.removeprefix("redis://")))
    wire.lose_answer(COMMIT.digest)
    commit = asyncio.ensure_future(engine.commit(puts(Table.GROUPS, b"a")))
    await in_time(wire.lost.wait())
    servers.redis.execute_command("ACL SETUSER limited -evalsha")

    with pytest.raises(CommitOutcomeUnknown):
        await commit

    assert servers.redis.hget(mark_key(IDENTITY), "sequence") == b"1"
