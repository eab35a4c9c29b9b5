"""Commits that are too large for one script: the server is held for a piece at a time, and still
all of it is applied or nothing."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage_svc.engines.engine import Batch, EngineFenced, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import (
    SCRIPT_US_MAX,
    WRITE_US,
    Kind,
    base_key,
    mark_key,
)
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import Servers, puts
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.clock import SystemClock
from tidemark.errors import FormatNotSupported

PIECE_ROWS = SCRIPT_US_MAX // WRITE_US[Kind.ORDERED]
ROWS = 6 * PIECE_ROWS + 1
STAGED = base_key(IDENTITY) + b":staged"
CATALOG = base_key(IDENTITY) + b":catalog"


def large(first: int = 0) -> Batch:
    return puts(Table.CATALOG, *(u64(number) for number in range(first, first + ROWS)))


async def until(servers: Servers, *, sealed: bool) -> None:
    """Until a commit is staged in part, or sealed; everything stands still at that moment."""
    while True:
        is_sealed = servers.redis.hexists(mark_key(IDENTITY), "staged")
        if is_sealed if sealed else servers.redis.llen(STAGED) > 1:
            assert sealed is is_sealed
            return
        await SystemClock().sleep_ms(0)


def taken_over_meanwhile(servers: Servers) -> int:
    """Another node opens the partition while this event loop stands still; the rows it found."""

    async def rows() -> int:
        engine = await RedisEngines(ServerUrl.parse(servers.url)).open(IDENTITY)
        found = len(await engine.scan(Table.CATALOG, b"", None, limit=2 * ROWS))
        await engine.close()
        return found

    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, rows()).result()


async def test_a_large_commit_is_many_small_scripts(servers: Servers) -> None:
    """S9: the server is never held for more than the rows of one piece."""
    engine = await servers.open()
    batch = large()
    batch.delete_range(Table.CATALOG, u64(1), u64(ROWS - 1))
    servers.redis.config_set("slowlog-log-slower-than", 0)
    servers.redis.slowlog_reset()

    await engine.commit(batch)

    commands = [each["command"] for each in servers.redis.slowlog_get(1000)]
    servers.redis.config_set("slowlog-log-slower-than", -1)
    scripts = [each for each in commands if each.startswith(b"EVAL")]
    pieces = ROWS // PIECE_ROWS + 1
    assert len(scripts) >= 2 * pieces + 1 + ROWS // PIECE_ROWS
    rows = await engine.scan(Table.CATALOG, b"", None, limit=10)
    assert [key for key, _ in rows] == [u64(0), u64(ROWS - 1)]
    assert not servers.redis.exists(STAGED)
    assert servers.redis.hget(mark_key(IDENTITY), "sequence") == b"1"


async def test_a_sealed_commit_is_finished_by_the_node_that_takes_over(servers: Servers) -> None:
    """S2, S9: it counts from its seal on, and either node may apply its pieces."""
    old = await servers.open()
    commit = asyncio.ensure_future(old.commit(large()))
    await until(servers, sealed=True)

    found = taken_over_meanwhile(servers)

    assert found == ROWS
    await commit
    with pytest.raises(EngineFenced):
        await old.verify()
    new = await servers.open()
    await new.commit(large(ROWS))
    assert len(await new.scan(Table.CATALOG, b"", None, limit=3 * ROWS)) == 2 * ROWS


async def test_a_commit_that_is_not_sealed_leaves_nothing(servers: Servers) -> None:
    """S9: the node that staged it is fenced, and its pieces are gone."""
    old = await servers.open()
    commit = asyncio.ensure_future(old.commit(large()))
    await until(servers, sealed=False)

    found = taken_over_meanwhile(servers)

    assert found == 0
    with pytest.raises(EngineFenced):
        await commit
    assert not servers.redis.exists(STAGED, CATALOG)


async def test_a_large_commit_survives_connections_that_break(servers: Servers) -> None:
    """S9: at any point; pieces are staged and applied once."""
    engine = await servers.open()
    for number in range(3):
        commit = asyncio.ensure_future(engine.commit(large(number * ROWS)))
        await until(servers, sealed=False)
        servers.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")
        await until(servers, sealed=True)
        servers.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")
        await commit

    assert servers.redis.hlen(CATALOG) == 3 * ROWS
    assert servers.redis.hget(mark_key(IDENTITY), "sequence") == b"3"


@pytest.mark.parametrize("what", ["load", "scan", "commit", "large commit"])
async def test_pieces_whose_application_a_failover_lost_are_applied_before_anything_else(
    servers: Servers, what: str
) -> None:
    """C6, S9: the replica that was promoted has the sealed commit, and lacks what was applied of it
    and answered. The node goes on, and must neither read rows from before it nor write them."""
    engine = await servers.open()
    await engine.commit(puts(Table.GROUPS, b"before"))
    committing = asyncio.create_task(engine.commit(large()))
    await until(servers, sealed=True)
    replica = {key: servers.redis.dump(key) for key in servers.redis.scan_iter()}
    await committing
    last = u64(ROWS - 1)
    promoted(servers, replica)
    changed = Batch()
    changed.put(Table.CATALOG, last, b"changed")

    if what == "load":
        assert await engine.load(Table.CATALOG, [last]) == [b"value of " + last]
    elif what == "scan":
        assert len(await engine.scan(Table.CATALOG, b"", None, limit=2 * ROWS)) == ROWS
    else:
        if what == "large commit":
            for key in range(ROWS, 3 * ROWS):
                changed.put(Table.CATALOG, u64(key), b"new")
        await engine.commit(changed)
        assert await engine.load(Table.CATALOG, [last]) == [b"changed"]

    rows = await engine.scan(Table.CATALOG, b"", u64(ROWS), limit=2 * ROWS)
    assert [key for key, _ in rows] == [u64(number) for number in range(ROWS)]
    assert not servers.redis.exists(STAGED)
    await engine.commit(puts(Table.GROUPS, b"after"))


def promoted(servers: Servers, replica: dict[bytes, bytes]) -> None:
    """The server is as its replica was."""
    servers.redis.flushall()
    for key, value in replica.items():
        servers.redis.restore(key, 0, value)


async def test_pieces_that_a_failover_lost_are_staged_again(servers: Servers) -> None:
    """S9: a replica that lagged has the mark, and not all pieces."""
    engine = await servers.open()
    commit = asyncio.ensure_future(engine.commit(large()))
    await until(servers, sealed=False)
    servers.redis.delete(STAGED)

    await commit

    assert len(await engine.scan(Table.CATALOG, b"", None, limit=2 * ROWS)) == ROWS


async def test_reads_of_many_rows_are_many_small_scripts(servers: Servers) -> None:
    """S9: what one script has no time for is answered by the next."""
    engine = await servers.open()
    keys = [u64(number) for number in range(2000)]
    starts = keys[:1000:20]
    await engine.commit(puts(Table.CATALOG, *keys))
    servers.redis.config_resetstat()

    scans, loads = await asyncio.gather(
        asyncio.gather(*(engine.scan(Table.CATALOG, first, None, limit=300) for first in starts)),
        asyncio.gather(*(engine.load(Table.CATALOG, [key]) for key in keys)),
    )

    assert [len(page) for page in scans] == [300] * len(starts)
    assert [page[0][0] for page in scans] == starts
    assert loads == [[b"value of " + key] for key in keys]
    scripts = servers.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert scripts >= len(starts) * 300 * 3 // SCRIPT_US_MAX


async def test_reads_of_large_rows_are_many_small_scripts(servers: Servers) -> None:
    """S9: the server copies a MiB in about 4 ms, so that few of them are read by one script."""
    engine = await servers.open()
    bodies = {b"%02d" % number: bytes([number]) * (1 << 20) for number in range(16)}
    for key, body in bodies.items():
        batch = Batch()
        batch.put(Table.RUN_BODIES, key, body)
        await engine.commit(batch)
    servers.redis.config_resetstat()

    loads = await asyncio.gather(*(engine.load(Table.RUN_BODIES, [key]) for key in bodies))
    scans = await asyncio.gather(
        *(engine.scan(Table.RUN_BODIES, key, None, limit=1) for key in bodies)
    )

    assert loads == [[body] for body in bodies.values()]
    assert scans == [[row] for row in bodies.items()]
    scripts = servers.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert scripts >= len(bodies)  # two of them in each


async def test_another_layout_is_refused(servers: Servers) -> None:
    """S5: with both versions; data of the first one has none."""
    await (await servers.open()).commit(puts(Table.CATALOG, b"a"))
    servers.redis.hdel(mark_key(IDENTITY), "layout")

    with pytest.raises(FormatNotSupported, match="layout 1 of the redis engine"):
        await servers.open()


async def test_a_large_commit_follows_a_slot_of_a_redis_cluster(
    moving_cluster: ValkeyCluster,
) -> None:
    """S9: its scripts declare the keys that they reach, also while the slot moves."""
    engine = await RedisEngines(ServerUrl.parse(moving_cluster.url)).open(IDENTITY)

    commit = asyncio.ensure_future(engine.commit(large()))
    await asyncio.to_thread(moving_cluster.move, mark_key(IDENTITY))
    await commit

    assert len(await engine.scan(Table.CATALOG, b"", None, limit=2 * ROWS)) == ROWS
    await engine.close()
