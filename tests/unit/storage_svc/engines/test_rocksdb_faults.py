"""Faults of RocksDB's files and disk: torn and altered logs, damaged tables, a full disk, a power
cut. Whatever was committed is there or its loss is reported with the file's name, never silent."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from storage_svc.engines.engine import Batch, Identity, Row, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.rocksdb import RocksEngine, RocksEngines
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt, FormatNotSupported

pytestmark = pytest.mark.slow

IDENTITY = Identity(cluster_id="cluster-a", partition=0, partitions=1)
ROWS = [(u64(number), b"value %d " % number * 10) for number in range(100)]
HEADER_BYTES = 7


async def put(engine: RocksEngine, table: Table, *rows: Row) -> None:
    batch = Batch()
    for key, value in rows:
        batch.put(table, key, value)
    await engine.commit(batch)


async def rows_after_opening(data: Path, table: Table = Table.QUEUES) -> list[Row]:
    engine = await RocksEngines(data).open(IDENTITY)
    try:
        return await engine.scan(table, b"", None, limit=1_000_000)
    finally:
        await engine.close()


@pytest.fixture
async def crashed(tmp_path: Path) -> AsyncIterator[Path]:
    """The files as a crash leaves them: ROWS committed one by one, all of them in the log."""
    engine = await RocksEngines(tmp_path / "live").open(IDENTITY)
    for row in ROWS:
        await put(engine, Table.QUEUES, row)
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "live", crashed)
    yield crashed
    await engine.close()


def log_of(data: Path) -> Path:
    return max(data.glob("node/*.log"))


def largest_table(data: Path) -> Path:
    return max(data.glob("node/*.sst"), key=lambda file: file.stat().st_size)


def records(log: bytes) -> list[int]:
    """Where the records of a log of one block start."""
    starts, at = [], 0
    while at < len(log):
        starts.append(at)
        at += HEADER_BYTES + int.from_bytes(log[at + 4 : at + 6], "little")
    return starts


# --- the log --------------------------------------------------------------------------------------


async def test_a_log_is_replayed_completely(crashed: Path) -> None:
    assert await rows_after_opening(crashed) == ROWS


@pytest.mark.parametrize("lost_bytes", [1, 50, 100])
async def test_a_torn_last_record_is_dropped_and_everything_before_it_is_there(
    crashed: Path, lost_bytes: int
) -> None:
    log = log_of(crashed)
    os.truncate(log, log.stat().st_size - lost_bytes)

    assert await rows_after_opening(crashed) == ROWS[:-1]
    assert await rows_after_opening(crashed) == ROWS[:-1]


async def test_a_torn_header_is_dropped_and_everything_before_it_is_there(crashed: Path) -> None:
    log = log_of(crashed)
    os.truncate(log, records(log.read_bytes())[-1] + 3)

    assert await rows_after_opening(crashed) == ROWS[:-1]


async def test_zeros_behind_the_last_record_are_no_damage(crashed: Path) -> None:
    log = log_of(crashed)
    os.truncate(log, log.stat().st_size + 4096)

    assert await rows_after_opening(crashed) == ROWS


@pytest.mark.parametrize("record", [1, 50, -1])
@pytest.mark.parametrize("offset", [0, 3, 4, 5, 6, 7, 19, 60])
@pytest.mark.parametrize("bit", [0x01, 0x80])
async def test_a_flipped_bit_in_the_log_is_reported_with_the_name_of_the_file(
    crashed: Path, record: int, offset: int, bit: int
) -> None:
    """S2: no answered commit is lost in silence; also where the bit makes a length look torn."""
    log = log_of(crashed)
    data = bytearray(log.read_bytes())
    data[records(bytes(data))[record] + offset] ^= bit
    log.write_bytes(data)

    with pytest.raises(DataCorrupt) as refused:
        await rows_after_opening(crashed)

    assert refused.value.metadata["file"] == log.name


async def test_a_lost_file_current_is_reported_and_nothing_is_deleted(crashed: Path) -> None:
    """RocksDB alone would start an empty database here."""
    current = crashed / "node" / "CURRENT"
    content = current.read_bytes()
    current.unlink()

    with pytest.raises(DataCorrupt) as refused:
        await rows_after_opening(crashed)

    assert refused.value.metadata["file"] == "CURRENT"
    current.write_bytes(content)
    assert await rows_after_opening(crashed) == ROWS


# --- tables ---------------------------------------------------------------------------------------


async def test_a_damaged_table_is_reported_by_scans_and_loads_and_can_be_closed(
    tmp_path: Path,
) -> None:
    """A scan that ended early without a word would look like messages that never were."""
    engine = await RocksEngines(tmp_path).open(IDENTITY)
    rows = [(u64(number), os.urandom(100)) for number in range(5_000)]
    await put(engine, Table.RUN_HEADERS, *rows)
    await engine.close()
    table = largest_table(tmp_path)
    intact = table.read_bytes()
    damaged = bytearray(intact)
    damaged[len(damaged) // 2] ^= 0xFF
    table.write_bytes(damaged)

    engine = await RocksEngines(tmp_path).open(IDENTITY)
    with pytest.raises(DataCorrupt) as by_scan:
        await engine.scan(Table.RUN_HEADERS, b"", None, limit=1_000_000)
    with pytest.raises(DataCorrupt) as by_load:
        await engine.load(Table.RUN_HEADERS, [key for key, _ in rows])
    with engine.reader() as reader, pytest.raises(DataCorrupt):
        async for _ in reader.scan_chunks(Table.RUN_HEADERS, b"", None):
            pass
    await engine.close()

    # The errors are still alive here; what they refer to must not keep the directory locked.
    assert by_scan.value.metadata["file"] == by_load.value.metadata["file"] == table.name
    table.write_bytes(intact)
    assert await rows_after_opening(tmp_path, Table.RUN_HEADERS) == rows


async def test_tables_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    engines = RocksEngines(tmp_path)
    await (await engines.open(IDENTITY)).close()
    names = [table.value for table in Table]
    db = Rdict(
        str(engines.directory),
        Options(raw_mode=True),
        {name: Options(raw_mode=True) for name in names},
    )
    db.create_column_family("invented_later", Options(raw_mode=True))
    db.close()
    del db

    with pytest.raises(FormatNotSupported, match="invented_later"):
        await engines.open(IDENTITY)


async def test_a_creation_that_was_interrupted_is_made_good(tmp_path: Path) -> None:
    engines = RocksEngines(tmp_path)
    engines.directory.mkdir(parents=True)
    (engines.directory / "MANIFEST-000001").write_bytes(b"")

    engine = await engines.open(IDENTITY)
    await put(engine, Table.QUEUES, *ROWS)
    await engine.close()

    assert await rows_after_opening(tmp_path) == ROWS


# --- the disk -------------------------------------------------------------------------------------


def run_or_skip(*command: str | Path) -> None:
    """These need rights and tools that a test machine may lack."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@contextmanager
def mounted(directory: Path, *arguments: str | Path) -> Iterator[Path]:
    directory.mkdir()
    run_or_skip("mount", *arguments, directory)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


async def fill_up(engine: RocksEngine, committed: list[Row]) -> None:
    while True:
        row = (u64(len(committed)), os.urandom(100_000))
        await put(engine, Table.RUN_BODIES, row)
        committed.append(row)


async def test_a_full_disk_fails_commits_until_there_is_space_and_the_engine_is_opened_again(
    tmp_path: Path,
) -> None:
    """S2, S3: no commit is acknowledged; everything committed before is there."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=48m", "tmpfs") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(16 * 1024 * 1024))
        engine = await RocksEngines(disk, write_buffer_bytes=4 * 1024 * 1024).open(IDENTITY)
        committed: list[Row] = []

        with pytest.raises(CommitOutcomeUnknown, match="No space left on device"):
            await fill_up(engine, committed)
        ballast.unlink()
        with pytest.raises(CommitOutcomeUnknown, match="opened again"):
            await put(engine, Table.RUN_BODIES, (b"refused", b""))
        await engine.close()

        engine = await RocksEngines(disk, write_buffer_bytes=4 * 1024 * 1024).open(IDENTITY)
        rows = await engine.scan(Table.RUN_BODIES, b"", None, limit=1_000_000)
        assert rows[: len(committed)] == committed
        assert len(rows) - len(committed) <= 1
        assert (b"refused", b"") not in rows
        await put(engine, Table.RUN_BODIES, (b"works again", b""))
        await engine.close()


async def test_a_power_cut_right_after_a_commit_loses_nothing(tmp_path: Path) -> None:
    """S2: a commit is on the disk, not only in the page cache. A copy of the block device, taken
    while the file system is mounted, is what the disk would hold had the power failed then."""
    device, copy = tmp_path / "device", tmp_path / "copy"
    with device.open("wb") as file:
        file.truncate(96 * 1024 * 1024)
    run_or_skip("mkfs.ext4", "-q", device)

    with mounted(tmp_path / "before", "-o", "loop", device) as disk:
        engine = await RocksEngines(disk).open(IDENTITY)
        for row in ROWS:
            await put(engine, Table.QUEUES, row)
        (disk / "not-synced").write_bytes(b"x" * 100)
        shutil.copyfile(device, copy)
        await engine.close()

    with mounted(tmp_path / "after", "-o", "loop", copy) as disk:
        control = disk / "not-synced"
        assert not control.exists() or control.read_bytes() != b"x" * 100
        assert await rows_after_opening(disk) == ROWS


async def test_commits_go_through_while_rocksdb_stalls_writes(tmp_path: Path) -> None:
    engine = await RocksEngines(tmp_path, write_buffer_bytes=64 * 1024).open(IDENTITY)
    rows = [(u64(number), os.urandom(50_000)) for number in range(300)]

    for row in rows:
        await put(engine, Table.RUN_BODIES, row)
    await engine.close()

    assert await rows_after_opening(tmp_path, Table.RUN_BODIES) == rows
