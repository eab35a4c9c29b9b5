"""The health of a partition, by what sweeps report and what its disk does (L4, S2)."""

from typing import Any

import pytest

from storage_svc.partition.housekeeping import HOUSEKEEPING_MS
from tests.support.exchange_client import ExchangeClient, append, reserved, settle
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import (
    PARTITION_STATE_FAULTY,
    PARTITION_STATE_SERVING,
    PARTITION_STATE_STARTING,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_SCHEDULES_DUE,
    ConfirmPartitionTimeRequest,
    LeaseSweepRequest,
    ReportSweepRequest,
)
from tidemark.clock import ManualClock, SystemClock


async def report(storage: RunningStorage, succeeded: bool, detail: str = "") -> Any:
    lease = LeaseSweepRequest(sweeper_id="s", address="127.0.0.1:1", lease_ms=60_000)
    await storage.storage.LeaseSweep(lease)
    request = ReportSweepRequest(sweeper_id="s", succeeded=succeeded, detail=detail)
    return (await storage.storage.ReportSweep(request)).health


async def test_a_partition_takes_no_publishes_before_its_first_sweep(
    start_storage: StartStorage,
) -> None:
    """L4: STARTING; everything else goes on."""
    storage = await start_storage(await_sweep=True)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        first = await exchange.healths.get()
        (refused,) = await exchange.ask_all(append("jobs", b"x"))

        await report(storage, succeeded=True)

        second = await exchange.healths.get()
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs", b"x"))
    assert first.state == PARTITION_STATE_STARTING
    assert [fault.reason for fault in first.faults] == ["AWAITING_SWEEP"]
    assert isinstance(refused, errors.LifecycleUnavailable)
    assert refused.retry_after_ms is not None
    assert (second.state, len(second.faults)) == (PARTITION_STATE_SERVING, 0)


async def test_a_failed_sweep_makes_the_partition_faulty_until_one_succeeds(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """L4."""
    storage = await start_storage(await_sweep=True)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.healths.get()

        failed = await report(storage, succeeded=False, detail="cannot read")
        told = await exchange.healths.get()
        (refused,) = await exchange.ask_all(append("jobs", b"x"))
        since = clock.wall_ms()
        await clock.advance_ms(1000)
        still = await report(storage, succeeded=False, detail="cannot read yet")
        mended = await report(storage, succeeded=True)
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs", b"x"))

    assert failed.state == told.state == PARTITION_STATE_FAULTY
    assert [fault.reason for fault in failed.faults] == ["AWAITING_SWEEP", "SWEEP_FAILED"]
    assert failed.faults[1].detail == "cannot read"
    assert isinstance(refused, errors.PartitionFaulty)
    assert "SWEEP_FAILED" in refused.metadata["reasons"]
    assert still.faults[1].since_time.ToMilliseconds() == since
    assert mended.state == PARTITION_STATE_SERVING


async def test_a_broker_whose_run_was_refused_claims_again_before_it_publishes(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S2: what it has sent behind that run must not overtake its repeat."""
    await report(storage, succeeded=False)
    await exchange.ask_all(append("jobs", b"first"))
    await report(storage, succeeded=True)

    with pytest.raises(errors.Unavailable):
        await exchange.ask(append("jobs", b"second"))

    assert isinstance(await exchange.ended, errors.Unavailable)
    async with storage.exchange() as again:
        assert (await again.ask(append("jobs", b"first"))).first_offset == 0


async def test_a_broker_of_which_no_run_was_refused_goes_on_after_a_fault(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S2, L4."""
    await report(storage, succeeded=False)
    await report(storage, succeeded=True)

    await exchange.ask(append("jobs", b"x"))

    assert not exchange.ended.done()


async def test_settles_go_on_while_publishes_are_refused(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L4."""
    await exchange.ask(append("jobs", b"x"))
    await report(storage, succeeded=False)

    got = await reserved(exchange, "jobs")

    assert (await exchange.ask(settle(got.receipt))).messages == 1


async def test_sweeps_that_a_faulty_partition_refuses_add_nothing_to_its_faults(
    start_storage: StartStorage, clock: ManualClock, faulty_disks: list[FaultyEngines]
) -> None:
    """L4: the refusal names all faults. As one of them it would be in the next one, without end."""
    storage = await start_storage()
    await storage.create_topic("jobs")
    (disk,) = faulty_disks
    async with storage.exchange() as exchange:
        disk.next_commit = Fault.BEFORE_WRITING
        disk.next_openings += [OSError("no such device")] * 10_000
        await exchange.ask_all(append("jobs", b"x"))
    while not any("no such device" in each.detail for each in (await storage.info()).faults):
        await clock.advance_ms(100)

    refusals = []
    for _ in range(3):
        with pytest.raises(errors.PartitionFaulty) as refused:
            await storage.due(SCAN_KIND_SCHEDULES_DUE)
        refusals.append(str(refused.value))
        await report(storage, succeeded=False, detail=refusals[-1])

    assert [each.count("no such device") for each in refusals] == [1, 1, 1]
    disk.next_openings.clear()
    await until_serving(storage, clock)


async def test_a_report_for_a_partition_elsewhere_is_refused(storage: RunningStorage) -> None:
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ReportSweep(ReportSweepRequest(partition=1))
    with pytest.raises(errors.InvalidArgument, match="names its sweeper"):
        await storage.storage.ReportSweep(ReportSweepRequest())
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest(partition=1))


async def until_serving(storage: RunningStorage, clock: ManualClock) -> None:
    """Let time pass until the partition has healed; fails if it does not."""

    async def healing() -> None:
        while (await storage.info()).state != PARTITION_STATE_SERVING:
            await clock.advance_ms(100)

    await SystemClock().wait_for(healing(), 60_000)


@pytest.mark.parametrize("why", [OSError("no such device"), RuntimeError("never heard of")])
@pytest.mark.parametrize("when", ["opening", "looking"])
async def test_a_partition_heals_whatever_kept_it_from_opening_again(
    start_storage: StartStorage,
    clock: ManualClock,
    faulty_disks: list[FaultyEngines],
    why: Exception,
    when: str,
) -> None:
    """S2: without a writer, all callers would wait without end."""
    storage = await start_storage()
    await storage.create_topic("jobs")
    (disk,) = faulty_disks
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs", b"x"))
        disk.next_commit = Fault.BEFORE_WRITING
        faults = disk.next_openings if when == "opening" else disk.next_looks
        faults += [why, why]

        (failed,) = await exchange.ask_all(append("jobs", b"y"))

    assert isinstance(failed, errors.CommitOutcomeUnknown)
    await until_serving(storage, clock)
    async with storage.exchange() as exchange:
        assert (await reserved(exchange, "jobs")).first_offset == 0


async def test_housekeeping_goes_on_whatever_one_round_of_it_met(
    start_storage: StartStorage, clock: ManualClock, faulty_disks: list[FaultyEngines]
) -> None:
    """I9, S3: without it no idle queue is unloaded, and the disk is not watched."""
    storage = await start_storage()
    (disk,) = faulty_disks
    disk.next_looks += [OSError("no such device"), RuntimeError("never heard of")]

    async def looking() -> None:
        while disk.next_looks:
            await clock.advance_ms(HOUSEKEEPING_MS)

    await SystemClock().wait_for(looking(), 10_000)
    disk.next_looks.append(OSError("no such device"))
    await SystemClock().wait_for(looking(), 10_000)
    assert (await storage.info()).state == PARTITION_STATE_SERVING
