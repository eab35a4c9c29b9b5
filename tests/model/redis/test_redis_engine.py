"""What the redis engine adds to the promises of every engine: servers that are not fit, answers
that are lost, tails that are lost, and users with few rights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_svc.engines.engine import Batch, EngineDataLost, EngineFailed, EngineFenced, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis import server as server_module
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import KINDS, Kind, base_key, mark_key
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import MasterAndReplica, Servers, puts
from tests.support.valkey import valkey
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt, StoreNotFit


@pytest.fixture(scope="session")
def forgetful_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("forgetful")) as server:
        yield server.connection_url


# --- servers that are not fit ---------------------------------------------------------------------


async def test_a_server_that_evicts_keys_is_refused(servers: Servers) -> None:
    """S9: it would delete messages when its memory is full."""
    servers.redis.config_set("maxmemory", 1 << 30)
    servers.redis.config_set("maxmemory-policy", "allkeys-lru")

    with pytest.raises(StoreNotFit, match="noeviction"):
        await servers.open()

    servers.redis.config_set("maxmemory-policy", "noeviction")
    engine = await servers.open()
    assert 0 < await engine.free_bytes() < 1 << 30


async def test_a_server_that_does_not_sync_is_taken_only_as_it_is(
    servers: Servers, forgetful_valkey: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: durability is checked when a partition is opened, never assumed."""
    with pytest.raises(StoreNotFit, match="appendonly no"):
        await servers.open(url=forgetful_valkey)

    engine = await servers.open(Durability.AS_IS, forgetful_valkey)

    await engine.commit(puts(Table.GROUPS, b"a"))
    assert "commits may be lost" in caplog.text


@pytest.mark.parametrize(
    ("setting", "bad", "good"),
    [
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ("appendfsync", "everysec", "always"),
        ("appendonly", "no", "yes"),
    ],
)
async def test_a_setting_that_is_changed_under_an_open_partition_is_noticed(
    servers: Servers, setting: str, bad: str, good: str
) -> None:
    """S9: at the next look at its memory, without a new connection."""
    servers.redis.config_set("maxmemory", 1 << 30)
    node = servers.node()
    engine = await node.open()
    await engine.free_bytes()
    servers.redis.config_set(setting, bad)
    try:
        with pytest.raises(EngineFailed, match=f"{setting}.*set it to {good}"):
            await engine.free_bytes()

        await engine.wait_failed()
        with pytest.raises(EngineFailed):
            await engine.verify()
        with pytest.raises(StoreNotFit, match=setting):
            await node.open()
    finally:
        servers.redis.config_set(setting, good)

    await (await node.open()).commit(puts(Table.GROUPS, b"a"))


async def test_commits_that_must_be_replicated_need_a_replica(servers: Servers) -> None:
    """S9: it is no wrong setting, since a failover leaves a server without one for a while."""
    with pytest.raises(ConnectionError, match="no replica"):
        await servers.open(Durability.REPLICATED)


async def test_a_server_that_nobody_answers_for_is_an_error_without_the_url() -> None:
    """S5: the URL may hold a password."""
    engines = RedisEngines(ServerUrl.parse("redis://user:secret@127.0.0.1:1"))

    with pytest.raises(ConnectionError) as refused:
        await engines.open(IDENTITY)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis://",
        "redis://a,b",
        "redis+other://a",
        "redis+sentinel://a,b",
        "redis+cluster://a/0/1",
        "redis://host:port",
        "redis://host:99999",
        "redis://user:secret@[::1",
    ],
)
def test_a_wrong_url_is_refused_and_not_repeated(url: str) -> None:
    """S5."""
    with pytest.raises(StoreNotFit) as refused:
        ServerUrl.parse(url)

    assert "secret" not in refused.value.detail
    assert "TIDEMARK_REDIS_URL" in refused.value.detail


@pytest.mark.parametrize("missing", ["wait", "waitaof"])
async def test_a_user_that_may_not_wait_for_replicas_is_refused_with_the_reason(
    servers: Servers, missing: str
) -> None:
    """S5, S9: otherwise it would look as if no replica ever confirmed anything."""
    servers.redis.execute_command(f"ACL SETUSER waiting on >secret ~* +@all -{missing}")
    host = servers.url.removeprefix("redis://")

    with pytest.raises(StoreNotFit, match=f"no permissions to run the '{missing}' command"):
        await servers.open(Durability.REPLICATED, f"redis://waiting:secret@{host}")

    servers.redis.execute_command("ACL DELUSER waiting")


# --- faults ---------------------------------------------------------------------------------------


async def test_a_commit_survives_connections_that_break_and_is_applied_once(
    servers: Servers,
) -> None:
    """S9: an answer that is lost is asked for again."""
    engine = await servers.open()
    for number in range(20):
        commit = asyncio.ensure_future(engine.commit(puts(Table.HISTORY, u64(number))))
        await asyncio.wait({commit}, timeout=0)
        servers.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")
        await commit

    rows = await engine.scan(Table.HISTORY, b"", None, limit=100)
    assert [key for key, _ in rows] == [u64(number) for number in range(20)]
    assert servers.redis.hget(mark_key(IDENTITY), "sequence") == b"20"


async def test_a_server_that_stands_still_leaves_the_outcome_unknown_and_the_next_opening_decides(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2, S9: whatever was on its way is applied before the next opening, or never."""
    engine = await servers.open()
    servers.redis.execute_command("CLIENT PAUSE 60000 WRITE")

    with monkeypatch.context() as impatient:
        impatient.setattr(server_module, "TRIP_TIMEOUT_S", 0.1)
        impatient.setattr("storage_svc.engines.redis.engine.COMMIT_WITHIN_MS", 300)
        with pytest.raises(CommitOutcomeUnknown):
            await engine.commit(puts(Table.HISTORY, b"unknown"))
        with pytest.raises(CommitOutcomeUnknown):
            await engine.commit(puts(Table.HISTORY, b"after it"))

    servers.redis.execute_command("CLIENT UNPAUSE")
    again = await servers.open()
    found = await again.scan(Table.HISTORY, b"", None, limit=10)
    await again.commit(puts(Table.HISTORY, b"z"))
    rows = await again.scan(Table.HISTORY, b"", None, limit=10)
    assert [key for key, _ in rows] == [key for key, _ in found] + [b"z"]


async def test_a_script_that_the_server_forgot_is_sent_again(servers: Servers) -> None:
    """A server that was restarted or failed over knows no scripts."""
    engine = await servers.open()
    servers.redis.script_flush()

    await engine.commit(puts(Table.GROUPS, b"a"))
    servers.redis.script_flush()

    assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]


@pytest.mark.parametrize("writes", [True, False], ids=["commit", "verify"])
async def test_a_mark_that_went_back_is_a_lost_tail(servers: Servers, writes: bool) -> None:
    """S9: what a failover to a lagging replica loses is noticed by the node that wrote it."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    mark = servers.redis.hgetall(mark_key(IDENTITY))
    await engine.commit(puts(Table.GROUPS, b"b"))
    servers.redis.hset(mark_key(IDENTITY), mapping=mark)

    with pytest.raises(EngineDataLost):
        await (engine.commit(puts(Table.GROUPS, b"c")) if writes else engine.verify())

    with pytest.raises(EngineDataLost):
        await engine.commit(puts(Table.GROUPS, b"d"))
    groups = base_key(IDENTITY) + b":" + Table.GROUPS.encode()
    assert servers.redis.hmget(groups, "c", "d") == [None, None]


@pytest.mark.parametrize("emptied", [True, False], ids=["emptied", "went back"])
async def test_what_is_stored_after_a_loss_is_there_for_the_next_opening(
    servers: Servers, emptied: bool
) -> None:
    """S9: the next node finds what the first one knew, also on a server that was emptied."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    mark = servers.redis.hgetall(mark_key(IDENTITY))
    await engine.commit(puts(Table.GROUPS, b"b"))
    if emptied:
        servers.redis.flushall()
    else:
        servers.redis.hset(mark_key(IDENTITY), mapping=mark)
    with pytest.raises(EngineDataLost):
        await engine.verify()

    await engine.store_after_loss(puts(Table.META, b"loss"))

    with pytest.raises(EngineDataLost):  # and it commits nothing else
        await engine.commit(puts(Table.GROUPS, b"c"))
    opened = await servers.open()
    assert await opened.load(Table.META, [b"loss"]) == [b"value of loss"]
    assert await opened.load(Table.GROUPS, [b"c"]) == [None]


async def test_nothing_is_stored_after_a_loss_where_another_node_has_opened(
    servers: Servers,
) -> None:
    """S9: the store has lost the opening of the first node, and the second one has its epoch."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    servers.redis.flushall()
    other = await servers.open()
    assert other.storage_epoch == engine.storage_epoch

    with pytest.raises(EngineFenced):
        await engine.store_after_loss(puts(Table.META, b"loss"))

    assert await other.load(Table.META, [b"loss"]) == [None]


@pytest.mark.parametrize("emptied", [True, False], ids=["emptied", "went back"])
async def test_nothing_is_stored_after_a_loss_where_another_node_has_a_lower_epoch(
    servers: Servers, emptied: bool
) -> None:
    """S9: the store has lost several openings of the first node. An operator may have confirmed the
    loss at the second one already."""
    node = servers.node()
    await node.open()
    mark = servers.redis.hgetall(mark_key(IDENTITY))
    await node.open()
    engine = await node.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    if emptied:
        servers.redis.flushall()
    else:
        servers.redis.delete(mark_key(IDENTITY))
        servers.redis.hset(mark_key(IDENTITY), mapping=mark)
    other = await servers.open()
    assert other.storage_epoch < engine.storage_epoch

    with pytest.raises(EngineFenced):
        await engine.store_after_loss(puts(Table.META, b"loss"))

    assert await other.load(Table.META, [b"loss"]) == [None]


async def test_no_loss_is_stored_where_the_commits_are_there_again(servers: Servers) -> None:
    """S9: a master that lacked them was promoted, and the former one is back."""
    engine = await servers.open()
    mark = servers.redis.hgetall(mark_key(IDENTITY))
    await engine.commit(puts(Table.GROUPS, b"a"))
    whole = servers.redis.hgetall(mark_key(IDENTITY))
    servers.redis.delete(mark_key(IDENTITY))
    servers.redis.hset(mark_key(IDENTITY), mapping=mark)
    with pytest.raises(EngineDataLost):
        await engine.verify()
    servers.redis.hset(mark_key(IDENTITY), mapping=whole)

    await engine.store_after_loss(puts(Table.META, b"loss"))

    assert await (await servers.open()).load(Table.META, [b"loss"]) == [None]


async def test_a_server_that_was_emptied_is_noticed(servers: Servers) -> None:
    """S9."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    servers.redis.flushall()

    with pytest.raises(EngineDataLost):
        await engine.verify()


async def test_data_without_its_identity_is_reported(servers: Servers) -> None:
    """V3: it is not taken for a new partition."""
    await (await servers.open()).commit(puts(Table.META, b"a"))
    servers.redis.hdel(base_key(IDENTITY) + b":" + Table.META.encode(), "identity")

    with pytest.raises(DataCorrupt, match="identity"):
        await servers.open()


async def test_a_row_that_lost_its_value_is_reported(servers: Servers) -> None:
    """V3: reads leave nothing out."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a", b"b"))
    servers.redis.hdel(base_key(IDENTITY) + b":" + Table.GROUPS.encode(), "a")

    with pytest.raises(DataCorrupt):
        await engine.scan(Table.GROUPS, b"", None, limit=10)


async def test_commits_go_through_while_the_memory_is_full(servers: Servers) -> None:
    """S9: the watermark refuses publishes before; a settlement must never be half written."""
    engine = await servers.open()
    servers.redis.config_set("maxmemory", 1)

    await engine.commit(puts(Table.GROUPS, b"a"))

    assert await engine.free_bytes() == 0
    servers.redis.config_set("maxmemory", 0)
    assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.ORDERED, Kind.PACKED])
async def test_rows_change_and_scans_continue_where_they_stopped(
    servers: Servers, kind: Kind
) -> None:
    """Every kind of table keeps the promises of the others."""
    table = next(table for table in Table if KINDS[table] is kind)
    engine = await servers.open()
    batch = Batch()
    for number in range(300):
        batch.put(table, u64(number), b"\xff" * (number % 7))
    await engine.commit(batch)
    batch = Batch()
    for number in range(0, 300, 3):
        batch.put(table, u64(number), b"changed")
    batch.delete_range(table, u64(100), u64(200))
    batch.put(table, u64(150), b"\x00")
    await engine.commit(batch)

    with engine.reader() as reader:
        chunks = [chunk async for chunk in reader.scan_chunks(table, b"", None, chunk_rows=50)]

    rows = [row for chunk in chunks for row in chunk]
    expected = {
        u64(number): b"changed" if number % 3 == 0 else b"\xff" * (number % 7)
        for number in [*range(100), *range(200, 300)]
    }
    assert rows == sorted((expected | {u64(150): b"\x00"}).items())
    assert await engine.load(table, [u64(3), u64(4), u64(150), u64(151)]) == [
        b"changed",
        b"\xff" * 4,
        b"\x00",
        None,
    ]


async def test_reads_of_one_turn_share_a_trip(servers: Servers) -> None:
    """S9: a hundred queues that are not loaded cost a few trips."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, *(b"%d" % number for number in range(100))))
    await engine.load(Table.GROUPS, [b"a"])  # the server knows the script
    before = servers.redis.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)

    loaded = await asyncio.gather(
        *(engine.load(Table.GROUPS, [b"%d" % number]) for number in range(100)),
        *(engine.scan(Table.GROUPS, b"%d" % number, None, limit=1) for number in range(100)),
    )

    assert loaded[42] == [b"value of 42"]
    assert loaded[142] == [(b"42", b"value of 42")]
    after = servers.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before <= 4


# --- a replica ------------------------------------------------------------------------------------


async def test_a_replicated_commit_is_on_the_replica_when_it_is_answered(
    with_replica: MasterAndReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: and its outcome is unknown while the replica does not confirm."""
    url, replica = with_replica.url, with_replica.replica
    engine = await RedisEngines(ServerUrl.parse(url), Durability.REPLICATED).open(IDENTITY)

    await engine.commit(puts(Table.GROUPS, b"a"))

    table = base_key(IDENTITY) + b":" + Table.GROUPS.encode()
    assert replica.hget(table, "a") == b"value of a"
    monkeypatch.setattr("storage_svc.engines.redis.engine.COMMIT_WITHIN_MS", 300)
    replica.execute_command("REPLICAOF", "NO", "ONE")
    with pytest.raises(CommitOutcomeUnknown, match="no replica"):
        await engine.commit(puts(Table.GROUPS, b"b"))
    await engine.close()


async def test_a_second_redis_replica_is_a_warning(
    with_replica: MasterAndReplica, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: a commit waits for one of them, and the other may be promoted."""
    engines = RedisEngines(ServerUrl.parse(with_replica.url), Durability.REPLICATED)
    await (await engines.open(IDENTITY)).close()
    assert "waits for one replica" not in caplog.text
    with valkey(tmp_path / "second", durable=True) as second:
        MasterAndReplica(with_replica.master_server, second).join()

        await (await engines.open(IDENTITY)).close()

    assert "waits for one replica" in caplog.text


# --- a cluster ------------------------------------------------------------------------------------


async def test_a_redis_cluster_may_move_a_partition_while_it_is_written(
    moving_cluster: ValkeyCluster,
) -> None:
    """S9: commits and reads follow the slot to its new server; none is lost or applied twice."""
    engines = RedisEngines(ServerUrl.parse(moving_cluster.url))
    engine = await engines.open(IDENTITY)
    await engine.commit(puts(Table.HISTORY, u64(0)))

    for number in range(1, 40):
        commit = asyncio.ensure_future(engine.commit(puts(Table.HISTORY, u64(number))))
        if number % 10 == 5:
            await asyncio.to_thread(moving_cluster.move, mark_key(IDENTITY))
        await commit
        await engine.verify()

    rows = await engine.scan(Table.HISTORY, b"", None, limit=100)
    assert [key for key, _ in rows] == [u64(number) for number in range(40)]
    await engine.close()


async def test_a_redis_node_is_deposed_across_a_move(moving_cluster: ValkeyCluster) -> None:
    """S9: the epoch travels with the slot."""
    old = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    await asyncio.to_thread(moving_cluster.move, mark_key(IDENTITY))
    new = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)

    with pytest.raises(EngineFenced):
        await old.verify()

    await new.commit(puts(Table.GROUPS, b"a"))
    await old.close()
    await new.close()
