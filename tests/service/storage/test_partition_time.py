"""The time of a partition never goes back, and does not trust a clock that jumps."""

from storage_svc.partition.housekeeping import HOUSEKEEPING_MS
from tests.support.exchange_client import ExchangeClient, append, operation, reserved
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.storage.v1.action_pb2 import ACTION_OUTCOME_DONE
from tidemark.api.storage.v1.exchange_pb2 import ExpireDue
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_DEAD_DEADLINES,
    SCAN_KIND_OUTBOX,
    ConfirmPartitionTimeRequest,
)
from tidemark.clock import ManualClock

HOUR_MS = 60 * 60 * 1000
DAY_MS = 24 * HOUR_MS


async def test_partition_time_never_goes_back(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    start = clock.wall_ms()
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=1000)

    clock.set_wall_ms(start - DAY_MS)
    await clock.advance_ms(999)
    early = await exchange.ask(operation(expire_due=ExpireDue()))
    await clock.advance_ms(1)
    due = await exchange.ask(operation(expire_due=ExpireDue()))

    assert (early.messages, due.messages) == (0, 1)
    assert got.publish_time_ms == start
    await storage.restart()
    scanned = await storage.scan(SCAN_KIND_OUTBOX)
    assert scanned.partition_time_ms >= start + 1000


async def jump(storage: RunningStorage, clock: ManualClock, by_ms: int = HOUR_MS + 1) -> None:
    """Set the wall clock ahead, and let the partition notice."""
    clock.set_wall_ms(clock.wall_ms() + by_ms)
    await clock.advance_ms(HOUSEKEEPING_MS)
    await storage.scan(SCAN_KIND_OUTBOX)


async def alarms(storage: RunningStorage) -> list[str]:
    return [fault.reason for fault in (await storage.info()).faults if fault.alarm]


async def until_alarms(storage: RunningStorage, clock: ManualClock, expected: list[str]) -> None:
    for _ in range(10):
        if await alarms(storage) == expected:
            return
        await clock.advance_ms(HOUSEKEEPING_MS)
    assert await alarms(storage) == expected


async def test_a_far_jump_of_the_clock_suspends_deleting_until_it_is_confirmed(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R9: a wrong date must not expire everything that is stored; sweeps find nothing to do."""
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    await jump(storage, clock)

    while_suspended = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await until_alarms(storage, clock, ["CLOCK_JUMPED"])
    confirmed = await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest())
    (planned,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await jump(storage, clock)
    (suspended,) = await exchange.ask_all(operation(action=planned))
    await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest())
    done = await exchange.ask(operation(action=planned))

    assert while_suspended == []
    assert confirmed.partition_time_ms <= clock.wall_ms()
    assert isinstance(suspended, errors.PartitionFaulty)
    assert done.outcome == ACTION_OUTCOME_DONE
    assert await alarms(storage) == []


async def test_a_restart_does_not_end_the_suspension(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R9, V4: also of a partition at rest, whose only commit is that of its housekeeping."""
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    await jump(storage, clock)
    await until_alarms(storage, clock, ["CLOCK_JUMPED"])

    await storage.restart()
    after_restart = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await until_alarms(storage, clock, ["CLOCK_JUMPED"])
    await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest())
    await storage.restart()

    assert after_restart == []
    assert len(await storage.due(SCAN_KIND_DEAD_DEADLINES)) == 1


async def test_time_returns_to_a_wall_clock_that_was_corrected(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R9: what was not due before the jump is not due after it, and expiry goes on."""
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    await jump(storage, clock, 30 * DAY_MS)
    clock.set_wall_ms(clock.wall_ms() - 30 * DAY_MS)

    returned = await storage.storage.ConfirmPartitionTime(
        ConfirmPartitionTimeRequest(to_wall_clock=True)
    )
    await reserved(exchange, "jobs", visibility_ms=1000)
    await clock.advance_ms(1000)
    expired = await exchange.ask(operation(expire_due=ExpireDue()))
    early = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await storage.restart()
    await clock.advance_ms(HOUR_MS)

    assert returned.partition_time_ms <= clock.wall_ms()
    assert expired.messages == 1
    assert early == []
    assert len(await storage.due(SCAN_KIND_DEAD_DEADLINES)) == 1


async def test_a_small_jump_of_the_clock_suspends_nothing(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    clock.set_wall_ms(clock.wall_ms() + HOUR_MS)
    (planned,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)

    done = await exchange.ask(operation(action=planned))

    assert done.outcome == ACTION_OUTCOME_DONE


async def test_a_far_jump_of_the_clock_makes_no_producer_forgotten(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """S11: never a second append."""
    run = append("jobs", b"x", producer_id="p", sequence=1)
    await exchange.ask(run)
    clock.set_wall_ms(clock.wall_ms() + 30 * DAY_MS)
    await clock.advance_ms(2000)

    again = await exchange.ask(run)

    assert again.duplicate
