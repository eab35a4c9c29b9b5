"""Faults between a node and its server: lost answers, servers that lag, slots that are half way."""

import asyncio

import pytest

from storage_svc.engines.engine import (
    Batch,
    EngineClosed,
    EngineDataLost,
    EngineFailed,
    EngineFenced,
    Table,
)
from storage_svc.engines.keys import u64
from storage_svc.engines.redis import engine as engine_module
from storage_svc.engines.redis import reads as reads_module
from storage_svc.engines.redis import server as server_module
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import (
    KINDS,
    SCRIPT_US_MAX,
    WRITE_US,
    Kind,
    base_key,
    key_types,
    mark_key,
    write_pieces,
)
from storage_svc.engines.redis.scripts import COMMIT, OPEN, READ
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import MasterAndReplica, Servers, puts
from tests.support.local_broker import in_time, until
from tests.support.lossy_wire import LossyWire
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt

# --- answers that are lost ------------------------------------------------------------------------


async def test_a_node_is_not_fenced_by_its_own_opening_whose_answer_was_lost(
    servers: Servers, wire: LossyWire
) -> None:
    """S9: it tries again, and finds the epoch that it has raised itself."""
    node = servers.node(url=wire.url)
    await (await node.open()).commit(puts(Table.GROUPS, b"a"))
    wire.lose_answer(OPEN.digest)

    with pytest.raises(ConnectionError):
        await node.open()
    again = await node.open()

    await again.commit(puts(Table.GROUPS, b"b"))
    assert await again.load(Table.GROUPS, [b"a", b"b"]) == [b"value of a", b"value of b"]


async def test_an_opening_that_arrives_late_does_not_depose_the_node_that_sent_it(
    servers: Servers, wire: LossyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: it was in the buffers of a server that stood still, and was given up long ago."""
    node = servers.node(url=wire.url)
    await (await node.open()).commit(puts(Table.GROUPS, b"a"))
    wire.hold_request(OPEN.digest)
    with monkeypatch.context() as impatient:
        impatient.setattr(server_module, "TRIP_TIMEOUT_S", 0.2)
        with pytest.raises(ConnectionError):
            await node.open()
    again = await node.open()
    await again.commit(puts(Table.GROUPS, b"b"))

    wire.release()
    await in_time(wire.arrived.wait())

    await again.verify()
    await again.commit(puts(Table.GROUPS, b"c"))


async def test_a_read_that_is_under_way_ends_with_its_engine(
    servers: Servers, wire: LossyWire
) -> None:
    """S3: its caller must not wait for an answer that no longer comes."""
    engine = await servers.open(url=wire.url)
    await engine.load(Table.GROUPS, [b"a"])
    wire.hold_request(READ.digest)
    under_way = asyncio.ensure_future(engine.load(Table.GROUPS, [b"a"]))
    await in_time(wire.held.wait())
    gathered = asyncio.ensure_future(engine.load(Table.GROUPS, [b"b"]))
    await asyncio.wait({gathered}, timeout=0)  # a turn, in which it asks

    await engine.close()

    for each in (under_way, gathered):
        with pytest.raises(EngineClosed):
            await in_time(each)


async def test_a_commit_whose_answer_was_lost_is_no_lost_tail_to_what_verifies_beside_it(
    servers: Servers, wire: LossyWire
) -> None:
    """S9: the mark is ahead of what the node knows, and is its own."""
    engine = await servers.open(url=wire.url)
    await engine.commit(puts(Table.GROUPS, b"a"))
    wire.lose_answer(COMMIT.digest)
    commit = asyncio.create_task(engine.commit(puts(Table.GROUPS, b"b")))
    await in_time(wire.lost.wait())

    await engine.verify()

    await commit
    assert servers.redis.hget(mark_key(IDENTITY), "sequence") == b"2"


async def test_a_deposed_node_knows_the_outcome_however_much_the_other_has_written(
    servers: Servers,
) -> None:
    """S9: nothing was written, so that the caller may repeat it elsewhere."""
    old = await servers.open()
    await old.commit(puts(Table.GROUPS, b"a"))
    new = await servers.open()
    for number in range(3):
        await new.commit(puts(Table.GROUPS, b"%d" % number))

    with pytest.raises(EngineFenced):
        await old.commit(puts(Table.GROUPS, b"b"))


@pytest.mark.parametrize("durability", [Durability.LOCAL, Durability.AS_IS])
async def test_an_idle_partition_notices_what_becomes_of_it(
    servers: Servers, durability: Durability
) -> None:
    """C6, C4: nothing is committed or verified, and its free memory is asked for every second."""
    engine = await servers.open(durability)
    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.free_bytes()
    await servers.open(durability)

    with pytest.raises(EngineFenced):
        await engine.free_bytes()
    await engine.wait_failed()

    other = await servers.open(durability)
    servers.redis.flushall()
    with pytest.raises(EngineDataLost):
        await other.free_bytes()
    await other.wait_failed()
    with pytest.raises(EngineDataLost):
        await other.verify()


async def test_what_is_committed_meanwhile_is_no_loss_to_an_idle_look(servers: Servers) -> None:
    """S9: the mark moves on while its memory is asked for."""
    engine = await servers.open()

    async def commit_all() -> None:
        for number in range(200):
            await engine.commit(puts(Table.GROUPS, b"%d" % number))

    async def look() -> None:
        while not committing.done():
            await engine.free_bytes()

    committing = asyncio.create_task(commit_all())
    await asyncio.gather(committing, look(), look())

    await engine.verify()


async def test_a_node_whose_opening_the_server_lost_opens_again_and_the_one_before_does_not(
    servers: Servers,
) -> None:
    """S9, C4: a lagging replica was promoted, which knows the first of two nodes only."""
    first, second = servers.node(), servers.node()
    await (await first.open()).commit(puts(Table.GROUPS, b"a"))
    mark = servers.redis.hgetall(mark_key(IDENTITY))
    new = await second.open()
    servers.redis.hset(mark_key(IDENTITY), mapping=mark)
    await first.open()
    old = await first.open()
    with pytest.raises(EngineFenced):
        await new.commit(puts(Table.GROUPS, b"b"))

    again = await second.open()

    await again.commit(puts(Table.GROUPS, b"c"))
    with pytest.raises(EngineFenced):
        await old.commit(puts(Table.GROUPS, b"d"))
    with pytest.raises(EngineFenced):
        await first.open()
    assert await again.load(Table.GROUPS, [b"b", b"c", b"d"]) == [None, b"value of c", None]


async def test_what_verifies_survives_a_connection_that_breaks(servers: Servers) -> None:
    """S9."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    for _ in range(10):
        verifying = asyncio.ensure_future(engine.verify())
        await asyncio.wait({verifying}, timeout=0)
        servers.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")

        await verifying


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_is_not_lost_on_the_way_to_a_server(
    servers: Servers, turns: int
) -> None:
    """S5: a partition that is closed waits for its housekeeping to end."""
    engine = await servers.open()
    await engine.free_bytes()
    ended = asyncio.Event()

    async def keep_house() -> None:
        await engine.free_bytes()
        await ended.wait()

    task = asyncio.create_task(keep_house())
    for _ in range(turns):
        await SystemClock().sleep_ms(0)
    task.cancel()

    await asyncio.wait({task}, timeout=20)
    is_cancelled = task.cancelled()
    ended.set()
    await asyncio.wait({task})
    assert is_cancelled


# --- servers that lag -----------------------------------------------------------------------------


async def test_a_server_that_lacks_commits_is_not_read(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: a former master still answers those who only read."""
    monkeypatch.setattr(reads_module, "_BEHIND_WITHIN_MS", 100)
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.commit(puts(Table.GROUPS, b"b"))
    servers.redis.hset(mark_key(IDENTITY), "sequence", 1)

    with pytest.raises(EngineFailed, match="BEHIND"):
        await engine.load(Table.GROUPS, [b"a"])

    servers.redis.hset(mark_key(IDENTITY), "sequence", 2)
    assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]


# --- keys that are not what they should be --------------------------------------------------------


@pytest.mark.parametrize("key", [*key_types(IDENTITY)][::10])
async def test_a_key_of_another_type_is_reported_when_the_partition_is_opened(
    servers: Servers, key: bytes
) -> None:
    """V3."""
    servers.redis.set(key, "not ours")

    with pytest.raises(DataCorrupt, match="string"):
        await servers.open()


async def test_a_commit_that_stops_half_way_has_an_unknown_outcome_and_is_not_built_upon(
    servers: Servers,
) -> None:
    """S2, V3: a script keeps what it wrote before a command of it was refused."""
    node = servers.node()
    engine = await node.open()
    broken = base_key(IDENTITY) + b":" + Table.RUN_BODIES.encode()
    batch = puts(Table.GROUPS, b"a")
    batch.put(Table.RUN_BODIES, b"a", b"body")
    servers.redis.set(broken, "not ours")

    with pytest.raises(CommitOutcomeUnknown):
        await engine.commit(batch)

    with pytest.raises(DataCorrupt):
        await node.open()
    servers.redis.delete(broken)
    await (await node.open()).commit(batch)


# --- replicas -------------------------------------------------------------------------------------


async def _until_stored(with_replica: MasterAndReplica, sequence: bytes) -> None:
    async def is_stored() -> bool:
        return bool(with_replica.master.hget(mark_key(IDENTITY), "sequence") == sequence)

    await until(is_stored)


async def test_a_redis_commit_that_is_sent_again_still_waits_for_the_replica(
    with_replica: MasterAndReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: WAITAOF waits for the writes of its own connection, and a new one has written nothing."""
    engines = RedisEngines(ServerUrl.parse(with_replica.url), Durability.REPLICATED)
    engine = await engines.open(IDENTITY)
    monkeypatch.setattr(engine_module, "COMMIT_WITHIN_MS", 1_000)
    monkeypatch.setattr(engine_module, "_WAIT_AOF", ((b"WAITAOF", 1, 1, 200),))
    with_replica.stop_replica()
    commit = asyncio.ensure_future(engine.commit(puts(Table.GROUPS, b"a")))
    await _until_stored(with_replica, b"1")
    with_replica.master.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")

    with pytest.raises(CommitOutcomeUnknown):
        await commit

    await engine.close()


async def test_redis_commits_do_not_wait_for_the_periodic_answers_of_a_replica(
    with_replica: MasterAndReplica,
) -> None:
    """S9: a replica reports by itself once a second, which each of these commits would wait for."""
    engines = RedisEngines(ServerUrl.parse(with_replica.url), Durability.REPLICATED)
    engine = await engines.open(IDENTITY)

    async with asyncio.timeout(25):
        for number in range(50):
            await engine.commit(puts(Table.GROUPS, b"%d" % number))

    await engine.close()


async def test_a_redis_master_that_was_made_a_replica_verifies_nothing(
    with_replica: MasterAndReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: the connection to it stays. It has not heard of the node that has opened the partition at
    the new master."""
    old = await RedisEngines(ServerUrl.parse(with_replica.url)).open(IDENTITY)
    await old.commit(puts(Table.GROUPS, b"a"))
    await old.verify()
    with_replica.cut_off_replica()
    with_replica.replica.execute_command("REPLICAOF NO ONE")
    with_replica.master.execute_command("REPLICAOF 127.0.0.1 1")
    at = with_replica.replica.connection_pool.connection_kwargs
    new_url = f"redis://{at['host']}:{at['port']}"
    new = await RedisEngines(ServerUrl.parse(new_url)).open(IDENTITY)
    monkeypatch.setattr(engine_module, "COMMIT_WITHIN_MS", 300)

    with pytest.raises(EngineFailed, match="is a replica"):
        await old.verify()

    await new.verify()
    await new.close()
    await old.close()


async def test_a_redis_master_without_its_replica_verifies_nothing(
    with_replica: MasterAndReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: the replica may be the master by now, and have another node."""
    engines = RedisEngines(ServerUrl.parse(with_replica.url), Durability.REPLICATED)
    engine = await engines.open(IDENTITY)
    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.verify()
    monkeypatch.setattr(engine_module, "COMMIT_WITHIN_MS", 500)
    monkeypatch.setattr(engine_module, "_WAIT", (b"WAIT", 1, 100))
    with_replica.stop_replica()

    with pytest.raises(EngineFailed, match="no replica"):
        await engine.verify()

    with_replica.continue_replica()
    await engine.verify()
    await engine.close()


# --- slots that move key by key -------------------------------------------------------------------


@pytest.mark.parametrize("moved_first", ["the mark", "a table"])
async def test_a_redis_commit_waits_while_its_slot_is_half_way(
    moving_cluster: ValkeyCluster, moved_first: str
) -> None:
    """S9: as `redis-cli --cluster reshard` moves slots, a few keys at a time."""
    engine = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    tables = (Table.GROUPS, Table.RUN_BODIES, Table.HISTORY)
    for number in range(3):
        batch = Batch()
        for table in tables:
            batch.put(table, u64(number), b"before")
        await engine.commit(batch)
    batch = Batch()
    for table in tables:
        batch.put(table, u64(1), b"after")
        batch.delete(table, u64(2))
        batch.put(table, u64(3), b"after")

    with moving_cluster.moving(mark_key(IDENTITY)) as moving:
        mark = mark_key(IDENTITY)
        first = mark if moved_first == "the mark" else base_key(IDENTITY) + b":run_bodies"
        moving.move([first])
        commit = asyncio.ensure_future(engine.commit(batch))
        read = asyncio.ensure_future(engine.load(Table.RUN_BODIES, [u64(0)]))
        await asyncio.wait({commit, read}, timeout=0.3)
        moving.move([key for key in moving.left() if key != first])

    await commit
    assert await read == [b"before"]
    for table in tables:
        rows = await engine.scan(table, b"", None, limit=10)
        assert rows == [(u64(0), b"before"), (u64(1), b"after"), (u64(3), b"after")]
    await engine.close()


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "emptied"])
@pytest.mark.parametrize("kind", Kind)
async def test_a_redis_commit_that_empties_a_table_of_a_moving_slot_is_whole_or_not_there(
    moving_cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch, kind: Kind, is_replaced: bool
) -> None:
    """S2, S9: also if its node is gone then, and sends it no second time."""
    monkeypatch.setattr(engine_module, "is_moved_away", lambda _error: False)
    emptied = next(each for each in Table if KINDS[each] is kind and each is not Table.META)
    engine = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    await engine.commit(puts(Table.LANES, b"before"))
    await engine.commit(puts(emptied, u64(0)))
    batch = puts(Table.LANES, b"after")
    rows_max = SCRIPT_US_MAX // WRITE_US[kind] - 10
    batch.delete_all(emptied, [u64(number) for number in range(rows_max)])
    if is_replaced:
        batch.put(emptied, u64(1_000_000), b"after")
    assert len(write_pieces(batch)) == 1

    with moving_cluster.moving(mark_key(IDENTITY)) as moving:
        await engine.commit(batch)  # by the server that still has all keys
        moving.move(moving.left())
    await engine.close()

    again = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    lanes = await again.load(Table.LANES, [b"before", b"after"])
    rows = await again.load(emptied, [u64(0), u64(1_000_000)])
    assert lanes == [b"value of before", b"value of after"]
    assert rows == [None, b"after" if is_replaced else None]
    await again.close()


async def test_a_redis_slot_that_moves_as_a_whole_is_followed(
    moving_cluster: ValkeyCluster,
) -> None:
    """S9: as Valkey 9 moves slots. Commits go on meanwhile."""
    engines = RedisEngines(ServerUrl.parse(moving_cluster.url))
    engine = await engines.open(IDENTITY)
    await engine.commit(puts(Table.HISTORY, u64(0)))

    for number in range(1, 31):
        commit = asyncio.ensure_future(engine.commit(puts(Table.HISTORY, u64(number))))
        if number % 10 == 5:
            await asyncio.to_thread(moving_cluster.migrate, mark_key(IDENTITY))
        await commit
        await engine.verify()

    rows = await engine.scan(Table.HISTORY, b"", None, limit=100)
    assert [key for key, _ in rows] == [u64(number) for number in range(31)]
    await engine.close()


async def test_a_redis_master_that_is_replaced_by_force_is_fenced_with_its_node(
    moving_cluster: ValkeyCluster,
) -> None:
    """S9: the second node opens beside the first, on whichever server has the slot."""
    first = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    await first.commit(puts(Table.GROUPS, b"a"))
    second = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)
    await asyncio.to_thread(moving_cluster.migrate, mark_key(IDENTITY))

    with pytest.raises(EngineFenced):
        await first.commit(puts(Table.GROUPS, b"b"))

    await second.commit(puts(Table.GROUPS, b"c"))
    assert await second.load(Table.GROUPS, [b"b", b"c"]) == [None, b"value of c"]
    await first.close()
    await second.close()
