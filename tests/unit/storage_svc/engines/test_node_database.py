"""One database for the partitions of a node: what they share, and what each has alone."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Cache, WriteBatch

from storage_svc.engines import rocksdb, rocksdb_files
from storage_svc.engines.engine import Batch, EngineFailed, Identity, Row, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.rocksdb import RocksEngine, RocksEngines
from storage_svc.engines.rocksdb_files import Memory
from tests.support.refusing_disk import no_file_grows
from tidemark.errors import (
    ClusterMismatch,
    CommitOutcomeUnknown,
    DataCorrupt,
    DataDirectoryInUse,
    FormatNotSupported,
)

NODE = Identity(cluster_id="cluster-a", partition=0, partitions=3)
ROWS = [(u64(number), os.urandom(100)) for number in range(3_000)]


async def put(engine: RocksEngine, *rows: Row) -> None:
    batch = Batch()
    for key, value in rows:
        batch.put(Table.RUN_HEADERS, key, value)
    await engine.commit(batch)


async def everything(engine: RocksEngine) -> list[Row]:
    return await engine.scan(Table.RUN_HEADERS, b"", None, limit=1_000_000)


@asynccontextmanager
async def opened(engines: RocksEngines) -> AsyncIterator[list[RocksEngine]]:
    """All partitions of the node."""
    held = [await engines.open(replace(NODE, partition=number)) for number in range(3)]
    yield held
    await asyncio.gather(*(engine.close() for engine in held))


def bytes_read() -> int:
    """What this process has read from files so far."""
    (line,) = [each for each in Path("/proc/self/io").read_text().splitlines() if "rchar" in each]
    return int(line.partition(":")[2])


def test_a_read_that_misses_the_cache_loads_some_blocks_and_no_filter_of_a_whole_file(
    tmp_path: Path,
) -> None:
    """One idle queue among a million costs what one among a thousand costs (I1)."""
    rows, reads = 400_000, 100
    # A cache that no filter fits in, and a file too large to be kept in it like a new one.
    memory = Memory(Cache(rocksdb_files.MIB // 4), rocksdb_files.MIB)
    db = rocksdb_files.open_database(tmp_path, memory)
    catalog, handle = (
        db.get_column_family(Table.CATALOG),
        db.get_column_family_handle(Table.CATALOG),
    )
    batch = WriteBatch(raw_mode=True)
    for number in range(rows):
        batch.put(u64(number), b"queue", handle)
    db.write(batch)
    catalog.compact_range(None, None)
    before = bytes_read()

    for number in range(0, rows, rows // reads):
        assert catalog.get([u64(number)]) == [b"queue"]

    filter_bytes = rows * 10 // 8
    assert (bytes_read() - before) // reads < filter_bytes // 10
    for each in (catalog, db):
        each.close()


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The openings of a database, as they happen."""
    openings: list[Path] = []
    really_open = rocksdb_files.open_database

    def open_database(directory: Path, *rest: Any, **options: Any) -> Any:
        openings.append(directory)
        return really_open(directory, *rest, **options)

    monkeypatch.setattr(rocksdb, "open_database", open_database)
    return openings


def damage(directory: Path, at: float) -> None:
    """Alter a byte of the largest table, at a share of its length."""
    table = max(directory.glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(table.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    table.write_bytes(data)


# --- what is shared -------------------------------------------------------------------------------


async def test_partitions_have_one_database_while_one_of_them_is_open(
    tmp_path: Path, openings: list[Path]
) -> None:
    engines = RocksEngines(tmp_path)
    identities = [replace(NODE, partition=number) for number in range(3)]
    first, *others = await asyncio.gather(*map(engines.open, identities))
    await put(first, (b"a", b"first"))
    await asyncio.gather(*(engine.close() for engine in others))

    again = await engines.open(identities[1])

    assert await everything(first) == [(b"a", b"first")]
    assert await everything(again) == []
    assert openings == [tmp_path / "node"]
    await first.close()
    await again.close()
    await (await RocksEngines(tmp_path).open(NODE)).close()  # it was released


async def test_a_range_delete_ends_with_its_partition(tmp_path: Path) -> None:
    """S2: also one up to the highest key there is."""
    async with opened(RocksEngines(tmp_path)) as held:
        for engine in held:
            await put(engine, (b"a", b"1"), (b"\xff" * 20, b"2"))
        batch = Batch()
        batch.delete_range(Table.RUN_HEADERS, b"", b"\xff" * 30)

        await held[1].commit(batch)

        assert [len(await everything(engine)) for engine in held] == [2, 0, 2]


async def test_a_partition_cannot_be_opened_twice_in_one_process(tmp_path: Path) -> None:
    engines = RocksEngines(tmp_path)
    engine = await engines.open(NODE)

    with pytest.raises(DataDirectoryInUse, match="partition 0 is open already"):
        await engines.open(NODE)

    await put(engine, (b"still", b"works"))
    await engine.close()
    await (await engines.open(NODE)).close()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"cluster_id": "cluster-b"}, {"partitions": 4}])
async def test_a_new_partition_of_another_cluster_is_refused_as_well(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """S2: the database of a node belongs to one cluster, also where a partition is not in it."""
    await (await RocksEngines(tmp_path).open(NODE)).close()

    with pytest.raises(ClusterMismatch, match="'cluster-a' with 3 partitions"):
        await RocksEngines(tmp_path).open(replace(NODE, partition=2, **change))


async def test_directories_of_an_older_layout_are_refused_and_left_alone(tmp_path: Path) -> None:
    """S2: formats before 5 had a database per partition."""
    older = tmp_path / "partition-00000"
    older.mkdir()
    (older / "CURRENT").write_text("MANIFEST-000005\n")

    with pytest.raises(FormatNotSupported, match="before 5") as refused:
        await RocksEngines(tmp_path).open(NODE)

    assert str(older) in refused.value.detail
    assert f"move these directories out of {tmp_path}" in refused.value.detail
    assert not (tmp_path / "node").exists()


async def test_a_partition_that_has_lost_its_identity_is_reported(tmp_path: Path) -> None:
    async with opened(RocksEngines(tmp_path)) as held:
        batch = Batch()
        batch.put(Table.META, b"counters", b"x")
        batch.delete(Table.META, b"identity")
        await held[1].commit(batch)

    engines = RocksEngines(tmp_path)
    with pytest.raises(DataCorrupt, match="partition 1 has lost its identity"):
        await engines.open(replace(NODE, partition=1))
    await (await engines.open(NODE)).close()


# --- bad blocks -----------------------------------------------------------------------------------


async def test_a_bad_block_concerns_only_the_partition_whose_keys_it_holds(tmp_path: Path) -> None:
    """L1: reads of the others never touch it."""
    async with opened(RocksEngines(tmp_path)) as held:
        for engine in held:
            await put(engine, *ROWS)
    damage(tmp_path / "node", at=0.5)

    async with opened(RocksEngines(tmp_path)) as held:
        with pytest.raises(DataCorrupt, match=r"\.sst"):
            await everything(held[1])

        assert await everything(held[0]) == await everything(held[2]) == ROWS
        assert await held[2].load(Table.RUN_HEADERS, [ROWS[7][0]]) == [ROWS[7][1]]
        await asyncio.gather(*(put(engine, (b"new", b"")) for engine in held))


async def test_a_compaction_that_meets_a_bad_block_does_not_end_the_commits_of_a_node(
    tmp_path: Path, openings: list[Path]
) -> None:
    """L1, S2: RocksDB refuses every write after it. Partitions open again, and the table with the
    bad block is left as it is."""
    engines = RocksEngines(tmp_path, write_buffer_bytes=1024 * 1024)
    held = [await engines.open(replace(NODE, partition=number)) for number in range(3)]
    await put(held[1], *ROWS)
    await asyncio.gather(*(engine.close() for engine in held))
    damage(tmp_path / "node", at=0.5)
    held = [await engines.open(replace(NODE, partition=number)) for number in range(3)]
    openings.clear()

    with pytest.raises(CommitOutcomeUnknown, match=r"Corruption.*\.sst"):
        await asyncio.wait_for(overwrite_until_refused(held[1]), 60)
    with pytest.raises(EngineFailed):
        await held[2].verify()
    await asyncio.wait_for(asyncio.gather(*(engine.wait_failed() for engine in held)), 60)
    await asyncio.gather(*(engine.close() for engine in held))

    held = [await engines.open(replace(NODE, partition=number)) for number in range(3)]
    rows: list[Row] = []
    for _ in range(100):
        rows = [(u64(key), os.urandom(100)) for key in range(1_000)]
        await asyncio.gather(*(put(engine, *rows) for engine in held))
    assert await everything(held[0]) == await everything(held[2]) == rows
    assert len(openings) == 1
    await asyncio.gather(*(engine.close() for engine in held))


async def overwrite_until_refused(engine: RocksEngine) -> None:
    """Every round overlaps the bad block, so that RocksDB compacts it sooner or later."""
    while True:
        await put(engine, *((key, os.urandom(100)) for key, _ in ROWS))


# --- opening again --------------------------------------------------------------------------------


async def test_a_failed_write_is_an_unknown_outcome_to_all_and_nothing_before_it_is_lost(
    tmp_path: Path,
) -> None:
    """S2: after it the engines of all partitions have to be opened again."""
    engines = RocksEngines(tmp_path)
    async with opened(engines) as held:
        await asyncio.gather(*(put(engine, (b"a", b"1")) for engine in held))

        with no_file_grows():
            writes = (put(engine, (b"b", b"2")) for engine in held[:2])
            outcomes = await asyncio.gather(*writes, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [CommitOutcomeUnknown] * 2
        for engine in held:
            await engine.wait_failed()
            with pytest.raises(EngineFailed, match="File too large"):
                await engine.verify()
            with pytest.raises(CommitOutcomeUnknown, match="opened again"):
                await put(engine, (b"c", b"3"))

    async with opened(engines) as held:
        for engine in held:
            rows = await everything(engine)
            assert rows[:1] == [(b"a", b"1")]
            assert rows[1:] in ([], [(b"b", b"2")])
            await engine.verify()
            await put(engine, (b"d", b"4"))


async def test_a_failed_database_is_opened_once_for_all_partitions_that_ask(
    tmp_path: Path, openings: list[Path]
) -> None:
    """S2: partitions do not close the database under one another, and share a failed attempt."""
    engines = RocksEngines(tmp_path)
    async with opened(engines) as held:
        for number, engine in enumerate(held):
            await put(engine, (b"a", b"%d" % number))
        log = next((tmp_path / "node").glob("*.log"))
        with no_file_grows(), pytest.raises(CommitOutcomeUnknown):
            await put(held[0], (b"b", b""))
        # One of them has not noticed yet, and still holds its engine.
        await asyncio.gather(held[0].close(), held[1].close())
        intact = log.read_bytes()
        log.write_bytes(intact[:20] + bytes([intact[20] ^ 0xFF]) + intact[21:])
        openings.clear()

        reopened = [engines.open(replace(NODE, partition=number)) for number in (0, 1)]
        refused = await asyncio.gather(*reopened, return_exceptions=True)

        assert [type(error) for error in refused] == [DataCorrupt, DataCorrupt]
        with pytest.raises(EngineFailed, match="File too large"):
            await everything(held[2])
        with pytest.raises(EngineFailed, match="File too large"):
            await held[2].verify()
        await held[2].close()
        log.write_bytes(intact)

    async with opened(engines) as held:
        assert [await everything(engine) for engine in held] == [
            [(b"a", b"%d" % number)] for number in range(3)
        ]
    assert len(openings) <= 2
