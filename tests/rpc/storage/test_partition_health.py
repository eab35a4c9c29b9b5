"""The health of a partition, by what sweeps report (L4)."""

from typing import Any

import pytest

from tests.rpc.conftest import StartStorage
from tests.rpc.storage_client import ExchangeClient, RunningStorage, append, reserved, settle
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import (
    PARTITION_STATE_FAULTY,
    PARTITION_STATE_SERVING,
    PARTITION_STATE_STARTING,
)
from tidemark.api.storage.v1.storage_pb2 import ConfirmPartitionTimeRequest, ReportSweepRequest
from tidemark.clock import ManualClock


async def report(storage: RunningStorage, succeeded: bool, detail: str = "") -> Any:
    request = ReportSweepRequest(succeeded=succeeded, detail=detail)
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
        await exchange.ask(append("jobs", b"x"))

    assert failed.state == told.state == PARTITION_STATE_FAULTY
    assert [fault.reason for fault in failed.faults] == ["AWAITING_SWEEP", "SWEEP_FAILED"]
    assert failed.faults[1].detail == "cannot read"
    assert isinstance(refused, errors.PartitionFaulty)
    assert "SWEEP_FAILED" in refused.metadata["reasons"]
    assert still.faults[1].since_time.ToMilliseconds() == since
    assert mended.state == PARTITION_STATE_SERVING


async def test_settles_go_on_while_publishes_are_refused(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L4."""
    await exchange.ask(append("jobs", b"x"))
    await report(storage, succeeded=False)

    got = await reserved(exchange, "jobs")

    assert (await exchange.ask(settle(got.receipt))).messages == 1


async def test_a_report_for_a_partition_elsewhere_is_refused(storage: RunningStorage) -> None:
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ReportSweep(ReportSweepRequest(partition=1))
    with pytest.raises(errors.PartitionNotFound):
        await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest(partition=1))
