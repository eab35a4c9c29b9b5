"""Partitions that share the journal of their node: what they share, and what each has alone."""

import asyncio

import pytest

from storage_svc.operations.topics import PutTopic
from storage_svc.partition.commit import CommitContext
from tests.support.exchange_client import append, apply_topic, reserved
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.refusing_disk import no_file_grows
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_FAULTY, PARTITION_STATE_SERVING
from tidemark.clock import SystemClock

PARTITIONS = 3


@pytest.fixture
async def node(start_storage: StartStorage, faulty_disks: list[FaultyEngines]) -> RunningStorage:
    """A node with three partitions, which all know the topic `jobs`."""
    storage = await start_storage(partitions=PARTITIONS)
    topic = await storage.create_topic("jobs")
    for number in range(PARTITIONS):
        async with storage.exchange(number) as exchange:
            await apply_topic(exchange, topic)
    return storage


async def test_a_commit_that_fails_in_one_partition_concerns_no_other(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """S2, L1: it alone reopens; the database stays open below the others."""
    (disk,) = faulty_disks
    openings = [(await node.claim(number)).health.openings for number in range(PARTITIONS)]

    async with (
        node.exchange(0) as before,
        node.exchange(1) as faulty,
        node.exchange(2) as behind,
    ):
        exchanges = (before, faulty, behind)
        disk.only, disk.next_commit = 1, Fault.BEFORE_WRITING
        outcomes = await asyncio.gather(*(each.ask_all(append("jobs", b"x")) for each in exchanges))

    assert [type(outcome[0]).__name__ for outcome in outcomes] == [
        "AppendResult",
        "CommitOutcomeUnknown",
        "AppendResult",
    ]
    reopened = [(await node.claim(number)).health.openings for number in range(PARTITIONS)]
    assert reopened == [openings[0], openings[1] + 1, openings[2]]


async def test_a_commit_that_waits_in_one_partition_delays_no_other(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """L1."""
    (disk,) = faulty_disks
    async with node.exchange(0) as slow, node.exchange(1) as beside:
        disk.only = 0
        disk.gate.clear()
        waiting = asyncio.ensure_future(slow.ask(append("jobs", b"x")))
        await asyncio.wait_for(disk.waiting.wait(), 60)

        for _ in range(10):
            await asyncio.wait_for(beside.ask(append("jobs", b"y")), 60)

        assert not waiting.done()
        disk.gate.set()
        await waiting


async def test_state_work_that_takes_long_in_one_partition_delays_no_other(
    node: RunningStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: a partition joins the journal once its batch is complete."""
    entered, leave = asyncio.Event(), asyncio.Event()
    really_apply = PutTopic.apply

    async def apply(operation: PutTopic, commit: CommitContext) -> object:
        entered.set()
        await leave.wait()
        return await really_apply(operation, commit)

    monkeypatch.setattr(PutTopic, "apply", apply)
    slow = asyncio.ensure_future(node.create_topic("slow"))  # its home is partition 0
    await asyncio.wait_for(entered.wait(), 60)

    async with node.exchange(1) as beside:
        for _ in range(10):
            await asyncio.wait_for(beside.ask(append("jobs", b"y")), 60)

    assert not slow.done()
    leave.set()
    await slow


@pytest.mark.rocksdb(reason="its disk refuses writes")
async def test_a_disk_that_refuses_a_write_makes_every_partition_faulty_until_it_is_opened_again(
    start_storage: StartStorage,
) -> None:
    """S2, L4: also the partitions that had nothing to write report the reason; what was answered
    is there."""
    storage = await start_storage(partitions=PARTITIONS)
    topic = await storage.create_topic("jobs")
    async with (
        storage.exchange(0) as writing,
        storage.exchange(1) as beside,
        storage.exchange(2) as idle,
    ):
        exchanges = (writing, beside, idle)
        for each in exchanges:
            await apply_topic(each, topic)
            await each.ask(append("jobs", b"kept"))
            assert (await each.healths.get()).state == PARTITION_STATE_SERVING

        with no_file_grows():
            outcomes = await asyncio.gather(
                *(each.ask_all(append("jobs", b"x")) for each in (writing, beside))
            )
            for each in exchanges:
                health = await asyncio.wait_for(each.healths.get(), 60)
                assert health.state == PARTITION_STATE_FAULTY
                assert "File too large" in health.faults[0].detail

    kinds = {type(outcome[0]) for outcome in outcomes}
    assert errors.CommitOutcomeUnknown in kinds  # what comes after the failed write is not written
    assert kinds <= {errors.CommitOutcomeUnknown, errors.PartitionFaulty}
    for number in range(PARTITIONS):
        await until_serving(storage, number)
        async with storage.exchange(number) as exchange:
            assert (await reserved(exchange, "jobs", 1)).first_offset == 0
            await exchange.ask(append("jobs", b"after"))


@pytest.mark.rocksdb(reason="its disk refuses writes")
async def test_a_disk_that_refuses_writes_at_the_start_is_reported_by_a_service_that_serves(
    start_storage: StartStorage,
) -> None:
    """S2, L4: the process does not exit, and needs no restart once the disk works."""
    with no_file_grows():
        storage = await start_storage(partitions=PARTITIONS)
        held = [await storage.info(number) for number in range(PARTITIONS)]
        with pytest.raises(errors.PartitionFaulty, match="File too large"):
            await storage.claim(1)

    for each in held:
        assert each.state == PARTITION_STATE_FAULTY
        assert [fault.reason for fault in each.faults] == ["OPEN_FAILED"]
    for number in range(PARTITIONS):
        await until_serving(storage, number)
        await storage.claim(number)


async def until_serving(storage: RunningStorage, partition: int) -> None:
    async def healing() -> None:
        while (await storage.info(partition)).state != PARTITION_STATE_SERVING:
            await storage.clock.advance_ms(100)  # type: ignore[attr-defined]

    await SystemClock().wait_for(healing(), 60_000)
