"""Faults: partitions that cannot be read, storage that is gone, lifecycle that is silent."""

import pytest

from tests.service.lifecycle.conftest import StartSwept
from tests.support.faulty_reads import FaultyReads
from tests.support.local_broker import TOPIC, payloads_of, reason_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.topic_pb2 import (
    PARTITION_STATE_FAULTY,
    PARTITION_STATE_SERVING,
    ListPartitionsRequest,
    PartitionInfo,
)
from tidemark.api.lifecycle.v1.lifecycle_pb2 import SWEEPER_STATE_BACKING_OFF
from tidemark.clock import ManualClock


@pytest.fixture
def reads() -> FaultyReads:
    return FaultyReads()


async def partition_info(swept: SweptBroker, number: int) -> PartitionInfo:
    return (await swept.topics.ListPartitions(ListPartitionsRequest())).partitions[number]


async def until_state(swept: SweptBroker, number: int, state: int) -> PartitionInfo:
    async def ask() -> bool:
        return (await partition_info(swept, number)).state == state

    await swept.passing(ask)
    return await partition_info(swept, number)


async def test_a_partition_that_cannot_be_read_is_faulty_until_it_can(
    start: StartSwept, reads: FaultyReads
) -> None:
    """L1, L4: reasons on the wire, other partitions do not notice, healing by itself."""
    swept = await start(partitions=2, wrap=reads.around, lifecycle={"sweep_interval_ms_max": 200})
    await swept.create_topic()
    (broken,), (sound,) = swept.names_in(1, 1), swept.names_in(0, 1)

    reads.failing.add(1)
    faulty = await until_state(swept, 1, PARTITION_STATE_FAULTY)
    status = await swept.lifecycle.status(1)
    refused, taken = await swept.publish(run_of(broken, b"x"), run_of(sound, b"x"))
    reads.failing.clear()
    await until_state(swept, 1, PARTITION_STATE_SERVING)

    assert [fault.reason for fault in faulty.faults] == ["SWEEP_FAILED"]
    assert "cannot be read" in faulty.faults[0].detail
    assert status.state == SWEEPER_STATE_BACKING_OFF
    assert "DATA_CORRUPT" in status.last_error
    assert (reason_of(refused), reason_of(taken)) == ("PARTITION_FAULTY", "")
    assert (await swept.lifecycle.status(0)).failures == 0

    async def served() -> bool:
        (result,) = await swept.publish(run_of(broken, b"x"))
        return reason_of(result) == ""

    await swept.passing(served)


async def test_a_partition_that_could_never_be_read_is_tried_less_and_less(
    start: StartSwept, reads: FaultyReads
) -> None:
    """L4: storage announces it again and again, which does not end the pauses."""
    swept = await start(wrap=reads.around)
    await swept.stop_storage()
    reads.failing.add(0)
    await swept.start_storage()

    async def failed_often() -> bool:
        return (await swept.lifecycle.status()).failures >= 6

    await swept.passing(failed_often)
    assert (await swept.lifecycle.status()).next_in_ms > 1_000


async def test_a_partition_that_stalls_delays_no_other(
    start: StartSwept, reads: FaultyReads, clock: ManualClock
) -> None:
    """L1: and is faulty once its answer is overdue."""
    swept = await start(partitions=2, wrap=reads.around, lifecycle={"sweep_timeout_ms": 40_000})
    await swept.create_topic()
    (stalled,), (sound,) = swept.names_in(1, 1), swept.names_in(0, 1)
    await swept.publish(
        run_of(stalled, b"x", delay_ms=1_000), run_of(sound, b"in time", delay_ms=1_000)
    )
    await swept.lifecycle.expects(1_000, partition=0)
    await swept.lifecycle.expects(1_000, partition=1)

    reads.stalled.add(1)
    await clock.advance_ms(1_000)
    delivery = await swept.pulled(sound)
    waited_ms = clock.monotonic_ms()
    await clock.advance_ms(40_000)
    faulty = await until_state(swept, 1, PARTITION_STATE_FAULTY)

    assert payloads_of([delivery]) == [b"in time"]
    assert waited_ms < 40_000
    assert "did not answer in 40000 ms" in faulty.faults[0].detail


async def test_lifecycle_that_falls_silent_is_an_alarm(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L4: shown in the health, and nothing is refused."""
    await swept.lifecycle.stop()

    async def alarmed() -> bool:
        return len((await partition_info(swept, 0)).faults) == 1

    await clock.advance_ms(59_000)
    before = await partition_info(swept, 0)
    await swept.passing(alarmed)
    (result,) = await swept.publish(run_of(TOPIC, b"x"))
    info = await partition_info(swept, 0)
    await swept.lifecycle.start()

    async def calm() -> bool:
        return not (await partition_info(swept, 0)).faults

    await swept.passing(calm)
    assert list(before.faults) == []
    assert (info.faults[0].reason, info.faults[0].alarm) == ("LIFECYCLE_SILENT", True)
    assert info.state == PARTITION_STATE_SERVING
    assert reason_of(result) == ""


async def test_by_setting_silence_is_a_fault(start: StartSwept, clock: ManualClock) -> None:
    """L4."""
    swept = await start(storage={"lifecycle_silent_is_fault": True})
    await swept.create_topic()
    await swept.lifecycle.stop()
    await clock.advance_ms(60_000)

    info = await until_state(swept, 0, PARTITION_STATE_FAULTY)
    (refused,) = await swept.publish(run_of(TOPIC, b"x"))
    await swept.lifecycle.start()
    await until_state(swept, 0, PARTITION_STATE_SERVING)

    assert [fault.reason for fault in info.faults] == ["LIFECYCLE_SILENT"]
    assert reason_of(refused) == "PARTITION_FAULTY"


async def test_a_sweeper_survives_storage_that_goes_and_comes_back(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L1, L7: it backs off, and sweeps as soon as the partition is announced again."""
    await swept.publish(run_of(TOPIC, b"later", delay_ms=5_000))
    await swept.stop_storage()

    async def backing_off() -> bool:
        status = await swept.lifecycle.status()
        return status.state == SWEEPER_STATE_BACKING_OFF

    await clock.advance_ms(5_000)
    await swept.passing(backing_off)
    await swept.start_storage()

    assert payloads_of([await swept.pulled(TOPIC)]) == [b"later"]
