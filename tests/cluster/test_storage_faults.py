"""Faults of the disk below a whole storage service: altered and torn logs, no space, foreign data.

Whatever was answered is there, or the service reports with the file's name why it is not. The log
and the disk are those of the node; a bad block concerns only the partitions that read it.
"""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage_svc.engines.engine import FORMAT_VERSION, Batch, Identity, Table
from storage_svc.engines.keys import u32
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    payloads,
    reserve,
    settle,
)
from tests.support.storage_client import CLUSTER_ID, RunningStorage, StorageClient, storage_process
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_FAULTY, PARTITION_STATE_SERVING
from tidemark.api.storage.v1.storage_pb2 import PeekQueueRequest
from tidemark.clock import ManualClock, SystemClock
from tidemark.local.service_process import ServiceFailed
from tidemark.rpc import open_channel

MIB = 1024 * 1024
RUNS = 60
SEED = 20_261_116


async def peeked(storage: RunningStorage, lmq_name: str) -> list[bytes]:
    request = PeekQueueRequest(lmq_name=lmq_name, max_messages=1000)
    answer = await storage.storage.PeekQueue(request)
    return [each.message.payload for each in answer.messages]


# --- the log --------------------------------------------------------------------------------------


@pytest.fixture
async def crashed(tmp_path: Path) -> Path:
    """The files as a crash leaves them: RUNS runs, each in a commit of its own, all in the log."""
    storage = RunningStorage(tmp_path / "live", ManualClock())
    await storage.start()
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        for number in range(RUNS):
            await exchange.ask(append("jobs", b"%d" % number * 20))
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await storage.stop()
    return tmp_path / "crashed"


def log_of(data_dir: Path) -> Path:
    return max(data_dir.glob("node/*.log"))


async def recovered(data_dir: Path) -> list[bytes]:
    """What is there after the start; raises the fault of a partition that is not served."""
    storage = RunningStorage(data_dir, ManualClock())
    try:
        await storage.start()
        return await peeked(storage, "jobs")
    finally:
        await storage.stop()


EVERYTHING = [b"%d" % number * 20 for number in range(RUNS)]


async def test_everything_that_was_answered_is_there_after_a_crash(crashed: Path) -> None:
    """S2."""
    assert await recovered(crashed) == EVERYTHING


@pytest.mark.parametrize("lost_bytes", [1, 30])
async def test_a_torn_tail_loses_the_last_commit_and_nothing_else(
    crashed: Path, lost_bytes: int
) -> None:
    """S2: a commit whose record is not complete was never answered."""
    log = log_of(crashed)
    log.write_bytes(log.read_bytes()[:-lost_bytes])

    assert await recovered(crashed) == EVERYTHING[:-1]
    assert await recovered(crashed) == EVERYTHING[:-1]


async def test_a_flipped_byte_anywhere_in_the_log_is_never_a_silent_loss(
    crashed: Path, tmp_path: Path
) -> None:
    """S2: the service names the file, or has everything."""
    intact = log_of(crashed).read_bytes()
    rng = random.Random(SEED)
    named: list[str] = []
    for number in range(30):
        data_dir = tmp_path / f"flipped-{number}"
        shutil.copytree(crashed, data_dir)
        flipped = bytearray(intact)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        log_of(data_dir).write_bytes(flipped)

        try:
            assert await recovered(data_dir) == EVERYTHING
        except errors.PartitionFaulty as faulty:
            named.append(faulty.detail)

    log_name = log_of(crashed).name
    assert all("DATA_CORRUPT" in detail and log_name in detail for detail in named)
    assert len(named) > 25


async def start_refused(data_dir: Path, log_file: Path, **settings: str) -> str:
    """The one line with which a process refuses to start."""
    process = storage_process(data_dir, log_file, **{"partitions": "1", **settings})
    await process.start()
    try:
        with pytest.raises(ServiceFailed) as refused:
            await process.wait_healthy()
    finally:
        if process.running:
            await process.kill()
    assert refused.value.exit_code == 2
    (said,) = complaints(log_file)
    return said


def complaints(log_file: Path) -> list[str]:
    """What was written beside the log records, which are JSON."""
    return [line for line in log_file.read_text().splitlines() if not line.startswith("{")]


async def test_a_process_with_an_altered_log_serves_and_reports_every_partition_with_the_file(
    tmp_path: Path,
) -> None:
    """S2, L4: the log is that of the node; restored, all partitions serve without a restart."""
    storage = RunningStorage(tmp_path / "live", ManualClock(), partitions=3)
    await storage.start()
    await storage.create_topic("jobs")
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await storage.stop()
    log = log_of(tmp_path / "crashed")
    intact = log.read_bytes()
    data = bytearray(intact)
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)

    # Without the setting: the number is known although the database cannot be opened.
    process = storage_process(tmp_path / "crashed", tmp_path / "storage.log", partitions="0")
    await process.start()
    try:
        await process.wait_healthy()
        async with open_channel(process.address) as channel:
            client = StorageClient(channel)
            held = [await client.info(number) for number in range(3)]
            for each in held:
                assert each.state == PARTITION_STATE_FAULTY
                assert [fault.reason for fault in each.faults] == ["DATA_CORRUPT"]
                assert log.name in each.faults[0].detail
            with pytest.raises(errors.PartitionFaulty, match=log.name):
                await client.claim(1)

            log.write_bytes(intact)
            async with asyncio.timeout(60):
                for number in range(3):
                    while (await client.info(number)).state != PARTITION_STATE_SERVING:
                        await SystemClock().sleep_ms(20)
            await client.claim(1)
    finally:
        await process.kill()


async def test_a_bad_block_makes_only_the_partition_faulty_that_reads_it(tmp_path: Path) -> None:
    """L1, L4: the other partitions of the node publish and deliver."""
    storage = RunningStorage(tmp_path / "data", SystemClock(), partitions=3)
    await storage.start()
    topic = await storage.create_topic("jobs")
    keys = [random.Random(SEED + number).randbytes(30).hex() for number in range(300)]
    for partition in range(3):
        async with storage.exchange(partition) as exchange:
            await apply_topic(exchange, topic)
            await exchange.ask_all(*(append("jobs", b"x", fairness_key=key) for key in keys))
    await storage.stop()
    headers = max((tmp_path / "data/node").glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(headers.read_bytes())
    data[len(data) // 2] ^= 0xFF  # in the run headers of the second of three partitions
    headers.write_bytes(data)

    await storage.start()
    async with (
        storage.exchange(0) as before,
        storage.exchange(1) as damaged,
        storage.exchange(2) as behind,
    ):
        assert (await damaged.healths.get()).state == PARTITION_STATE_SERVING
        (failed,) = await damaged.ask_all(reserve("jobs", 300))
        health = await damaged.healths.get()

        assert isinstance(failed, errors.DataCorrupt)
        assert health.state == PARTITION_STATE_FAULTY
        assert [fault.reason for fault in health.faults] == ["DATA_CORRUPT"]
        assert headers.name in health.faults[0].detail
        for exchange in (before, behind):
            got = (await exchange.ask(reserve("jobs", 300))).slices
            assert sum(len(payloads(each.body)) for each in got) == 300
            assert (await exchange.ask(append("jobs", b"new"))).first_offset == 300
    await storage.stop()


# --- data of others -------------------------------------------------------------------------------


async def test_a_process_refuses_data_of_another_cluster(crashed: Path, tmp_path: Path) -> None:
    line = await start_refused(crashed, tmp_path / "storage.log", cluster_id="cluster-b")

    assert "'cluster-a'" in line
    assert "'cluster-b'" in line


async def test_a_process_refuses_another_number_of_partitions(
    crashed: Path, tmp_path: Path
) -> None:
    line = await start_refused(crashed, tmp_path / "storage.log", partitions="2")

    assert "with 1 partitions" in line


@pytest.mark.parametrize("version", [2, FORMAT_VERSION + 1], ids=["older", "newer"])
async def test_a_process_refuses_data_of_another_format(
    crashed: Path, tmp_path: Path, version: int
) -> None:
    """S2."""
    engine = await RocksEngines(crashed).open(Identity(CLUSTER_ID, 0, 1))
    (identity,) = await engine.load(Table.META, [b"identity"])
    assert identity is not None
    other = Batch()
    other.put(Table.META, b"identity", u32(version) + identity[4:])
    await engine.commit(other)
    await engine.close()

    line = await start_refused(crashed, tmp_path / "storage.log")

    assert f"is in format {version}, this version reads {FORMAT_VERSION}" in line


async def test_a_process_refuses_the_directories_of_an_older_layout(tmp_path: Path) -> None:
    """S2: formats before 5 had a database per partition; nothing is converted or deleted."""
    older = tmp_path / "data" / "partition-00000"
    older.mkdir(parents=True)

    line = await start_refused(tmp_path / "data", tmp_path / "storage.log")

    assert f"{older} is in a format before 5" in line
    assert "move these directories" in line


async def test_two_processes_never_share_a_data_directory(tmp_path: Path) -> None:
    storage = RunningStorage(tmp_path / "data", ManualClock())
    await storage.start()

    line = await start_refused(tmp_path / "data", tmp_path / "storage.log")

    assert "open in another process" in line
    await storage.stop()


# --- a full disk ----------------------------------------------------------------------------------


@contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[None]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(directory)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def fill_up(exchange: ExchangeClient) -> tuple[int, errors.TidemarkError]:
    """Publish until it fails: how many runs were answered, and why no more."""
    answered = 0
    while True:
        (outcome,) = await exchange.ask_all(append("jobs", b"%d" % answered, bytes(MIB)))
        if isinstance(outcome, errors.TidemarkError):
            return answered, outcome
        answered += 1


async def test_a_full_disk_makes_the_partitions_of_its_node_faulty_until_there_is_space(
    tmp_path: Path,
) -> None:
    """S2, L4: an unknown outcome to who waits, every partition reports the reason, also one that
    had nothing to write, and nothing is lost."""
    data_dir = tmp_path / "data"
    with small_disk(data_dir, mebibytes=64):
        ballast = data_dir / "ballast"
        ballast.write_bytes(bytes(32 * MIB))
        storage = RunningStorage(data_dir, SystemClock(), partitions=2, write_buffer_bytes=4 * MIB)
        await storage.start()
        topic = await storage.create_topic("jobs")
        async with storage.exchange(partition=1) as other:
            await apply_topic(other, topic)
            await other.ask(append("jobs/beside", b"x"))
            async with storage.exchange() as exchange:
                assert (await exchange.healths.get()).state == PARTITION_STATE_SERVING
                assert (await other.healths.get()).state == PARTITION_STATE_SERVING

                answered, failure = await fill_up(exchange)

                assert isinstance(failure, errors.CommitOutcomeUnknown)
                for each in (exchange, other):
                    health = await each.healths.get()
                    assert health.state == PARTITION_STATE_FAULTY
                    assert "No space left on device" in health.faults[0].detail
                (refused,) = await other.ask_all(append("jobs/beside", b"y"))
                assert isinstance(refused, errors.PartitionFaulty)

                ballast.unlink()
                for each in (exchange, other):
                    while (await each.healths.get()).state != PARTITION_STATE_SERVING:
                        pass

            async with storage.exchange() as healed:
                got = await everything(healed)
                assert got[:answered] == [b"%d" % number for number in range(answered)]
                assert len(got) - answered <= 1
                await healed.ask(append("jobs", b"after"))
            async with storage.exchange(partition=1) as healed:
                assert (await healed.ask(append("jobs/beside", b"y"))).first_offset == 1
        await storage.stop()


async def everything(exchange: ExchangeClient) -> list[bytes]:
    """The first message of each run, run by run."""
    got: list[bytes] = []
    while slices := (await exchange.ask(reserve("jobs", 2))).slices:
        for each in slices:
            got.append(payloads(each.body)[0])
            await exchange.ask(settle(each.receipt))
    return got
