"""One record that cannot be read delays nothing else (V3, L11)."""

import pytest

from storage_svc.engines import run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64, u64x2
from tests.service.lifecycle.conftest import StartSwept
from tests.support.faulty_reads import FaultyReads
from tests.support.local_broker import TOPIC, payloads_of, reason_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import Ack, Nack
from tidemark.api.storage.v1.partition_pb2 import PartitionHealth
from tidemark.api.storage.v1.storage_pb2 import ReportSweepRequest
from tidemark.clock import ManualClock

QUEUE = f"{TOPIC}/ada"
DEAD = "orders-dead"
TTL_MS = 20_000

Unreadable = set[tuple[Table, bytes]]


@pytest.fixture
def reads() -> FaultyReads:
    return FaultyReads()


@pytest.fixture(params=["corrupt", "lost"])
def unreadable(reads: FaultyReads, request: pytest.FixtureRequest) -> Unreadable:
    keys: Unreadable = getattr(reads, request.param)
    return keys


@pytest.fixture
async def swept(
    start: StartSwept, reads: FaultyReads, monkeypatch: pytest.MonkeyPatch
) -> SweptBroker:
    monkeypatch.setattr(run_rows, "BODY_INLINE_BYTES_MAX", 0)  # as if all runs were large
    started = await start(wrap=reads.around)
    await started.create_topic(DEAD)
    await started.create_topic(TOPIC, max_attempts=1, dead_letter_topic=DEAD)
    return started


async def body_key(swept: SweptBroker, offset: int) -> tuple[Table, bytes]:
    return Table.RUN_BODIES, u64x2((await swept.queue(QUEUE)).queue_id, offset)


async def health(swept: SweptBroker) -> PartitionHealth:
    """Asked with a report that does not count."""
    return (await swept.storage.ReportSweep(ReportSweepRequest(sweeper_id="x"))).health


async def alarmed(swept: SweptBroker, expected: bool) -> bool:
    return bool((await health(swept)).faults) == expected


async def forget_bodies(swept: SweptBroker) -> None:
    """Restart storage, whose memory holds what was published recently."""
    await swept.stop_storage()
    await swept.start_storage()

    async def serves() -> bool:
        (published,) = await swept.publish(run_of(TOPIC, b"x"))
        return reason_of(published) == ""

    await swept.passing(serves)


async def test_a_dead_run_that_cannot_be_read_leaves_the_sound_ones_and_the_partition_alone(
    swept: SweptBroker, unreadable: Unreadable, clock: ManualClock
) -> None:
    """V3, L6, L11: it is left out with an alarm, and tried again."""
    for payload in (b"0", b"1", b"2"):
        await swept.publish(run_of(QUEUE, payload, ttl_ms=TTL_MS))
    unreadable.add(await body_key(swept, 1))
    await forget_bodies(swept)
    before = await health(swept)

    await clock.advance_ms(TTL_MS)
    dead = [await swept.pulled(DEAD, max_messages=1) for _ in range(2)]
    for each in dead:  # or they come again while time passes
        await swept.settle(each.receipt, Ack())
    await swept.passing(lambda: alarmed(swept, True))
    (published,) = await swept.publish(run_of(TOPIC, b"y"))
    after = await health(swept)
    unreadable.clear()
    late = await swept.pulled(DEAD)
    await swept.passing(lambda: alarmed(swept, False))

    assert payloads_of(dead) == [b"0", b"2"]
    assert payloads_of([late]) == [b"1"]
    assert [(each.reason, each.alarm) for each in after.faults] == [("RECORD_UNREADABLE", True)]
    assert reason_of(published) == ""
    assert after.openings == before.openings


async def test_an_exhausted_run_that_cannot_be_read_is_left_out(
    swept: SweptBroker, unreadable: Unreadable
) -> None:
    """V3, L11."""
    for payload in (b"0", b"1"):
        await swept.publish(run_of(QUEUE, payload))
    first = await swept.pulled(QUEUE, max_messages=1)
    second = await swept.pulled(QUEUE, max_messages=1)
    unreadable.add(await body_key(swept, 0))
    await forget_bodies(swept)
    before = await health(swept)

    await swept.settle(first.receipt, Nack())
    await swept.settle(second.receipt, Nack())

    assert payloads_of([await swept.pulled(DEAD)]) == [b"1"]
    assert (await health(swept)).openings == before.openings


@pytest.mark.rocksdb(reason="it knows the number of a scheduled run")
async def test_a_scheduled_run_that_cannot_be_read_is_left_out(
    swept: SweptBroker, unreadable: Unreadable, clock: ManualClock
) -> None:
    """V3, L5, L11."""
    for payload in (b"0", b"1"):
        await swept.publish(run_of(QUEUE, payload, delay_ms=1_000))
    unreadable.add((Table.SCHEDULE_BODIES, u64(1)))
    before = await health(swept)

    await clock.advance_ms(1_000)
    sound = await swept.pulled(QUEUE)
    after = await health(swept)
    unreadable.clear()
    late = await swept.pulled(QUEUE)

    assert payloads_of([sound, late]) == [b"1", b"0"]
    assert after.openings == before.openings


async def test_consumers_get_what_lies_behind_a_run_that_cannot_be_read(
    swept: SweptBroker, unreadable: Unreadable, clock: ManualClock
) -> None:
    """V3, L11: the run itself is tried again after a delay."""
    for payload in (b"0", b"1"):
        await swept.publish(run_of(QUEUE, payload))
    unreadable.add(await body_key(swept, 0))
    await forget_bodies(swept)
    before = await health(swept)

    behind = await swept.pulled(QUEUE, max_messages=1)
    after = await health(swept)
    unreadable.clear()
    await clock.advance_ms(60_000)
    late = await swept.pulled(QUEUE)

    assert payloads_of([behind, late]) == [b"1", b"0"]
    assert late.attempt_count == 0
    assert after.openings == before.openings
