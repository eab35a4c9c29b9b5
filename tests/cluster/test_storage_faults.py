"""Faults of the disk below a whole storage service: altered and torn logs, no space, foreign data.

Whatever was answered is there, or the service says with the file's name why it is not; and what
concerns one partition is no matter of the others.
"""

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
from tests.support.storage_client import (
    CLUSTER_ID,
    ExchangeClient,
    RunningStorage,
    append,
    apply_topic,
    payloads,
    reserve,
    settle,
    storage_process,
)
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_FAULTY, PARTITION_STATE_SERVING
from tidemark.api.storage.v1.storage_pb2 import PeekQueueRequest
from tidemark.clock import ManualClock, SystemClock
from tidemark.local.service_process import ServiceFailed

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
    return max(data_dir.glob("partition-00000/*.log"))


async def recovered(data_dir: Path) -> list[bytes]:
    """What is there after the start; raises what keeps the service from starting."""
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
        except errors.DataCorrupt as corrupt:
            named.append(corrupt.metadata["file"])

    assert set(named) == {log_of(crashed).name}
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


async def test_a_process_refuses_an_altered_log_with_the_name_of_the_file(
    crashed: Path, tmp_path: Path
) -> None:
    log = log_of(crashed)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)

    line = await start_refused(crashed, tmp_path / "storage.log")

    assert log.name in line


# --- data of others -------------------------------------------------------------------------------


async def test_a_process_refuses_data_of_another_cluster(crashed: Path, tmp_path: Path) -> None:
    line = await start_refused(crashed, tmp_path / "storage.log", cluster_id="cluster-b")

    assert "'cluster-a'" in line
    assert "'cluster-b'" in line


async def test_a_process_refuses_another_number_of_partitions(
    crashed: Path, tmp_path: Path
) -> None:
    line = await start_refused(crashed, tmp_path / "storage.log", partitions="2")

    assert "of 1 of cluster" in line


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


async def test_two_processes_never_share_a_data_directory(tmp_path: Path) -> None:
    storage = RunningStorage(tmp_path / "data", ManualClock())
    await storage.start()

    line = await start_refused(tmp_path / "data", tmp_path / "storage.log")

    assert "open in another process" in line
    await storage.stop()


# --- a full disk ----------------------------------------------------------------------------------


@contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[None]:
    directory.mkdir(parents=True)
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


async def test_a_full_disk_makes_its_partition_faulty_until_there_is_space(
    tmp_path: Path,
) -> None:
    """S2, L1, L4: an unknown outcome to who waits, no loss, and no matter of other partitions."""
    data_dir = tmp_path / "data"
    with small_disk(data_dir / "partition-00000", mebibytes=64):
        ballast = data_dir / "partition-00000" / "ballast"
        ballast.write_bytes(bytes(32 * MIB))
        storage = RunningStorage(data_dir, SystemClock(), partitions=2, write_buffer_bytes=4 * MIB)
        await storage.start()
        topic = await storage.create_topic("jobs")
        async with storage.exchange(partition=1) as other:
            await apply_topic(other, topic)
            async with storage.exchange() as exchange:
                assert (await exchange.healths.get()).state == PARTITION_STATE_SERVING

                answered, failure = await fill_up(exchange)

                assert isinstance(failure, errors.CommitOutcomeUnknown)
                assert (await exchange.healths.get()).state == PARTITION_STATE_FAULTY
                beside = await other.ask(append("jobs/beside", b"x"))
                assert beside.first_offset == 0

                ballast.unlink()
                while (await exchange.healths.get()).state != PARTITION_STATE_SERVING:
                    pass

            async with storage.exchange() as healed:
                got = await everything(healed)
                assert got[:answered] == [b"%d" % number for number in range(answered)]
                assert len(got) - answered <= 1
                await healed.ask(append("jobs", b"after"))
            assert (await other.ask(append("jobs/beside", b"y"))).first_offset == 1
        await storage.stop()


async def everything(exchange: ExchangeClient) -> list[bytes]:
    """The first message of each run, run by run."""
    got: list[bytes] = []
    while slices := (await exchange.ask(reserve("jobs", 2))).slices:
        for each in slices:
            got.append(payloads(each.body)[0])
            await exchange.ask(settle(each.receipt))
    return got
