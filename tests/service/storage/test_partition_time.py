"""The time of a partition never goes back, and does not trust a clock that jumps."""

from tests.support.storage_client import ExchangeClient, RunningStorage, append, operation, reserved
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


async def test_a_far_jump_of_the_clock_suspends_deleting_until_it_is_confirmed(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """A wrong date must not expire everything that is stored."""
    await exchange.ask(append("jobs", b"x", ttl_ms=HOUR_MS))
    clock.set_wall_ms(clock.wall_ms() + HOUR_MS + 1)
    (planned,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)

    (suspended,) = await exchange.ask_all(operation(action=planned))
    confirmed = await storage.storage.ConfirmPartitionTime(ConfirmPartitionTimeRequest())
    done = await exchange.ask(operation(action=planned))

    assert isinstance(suspended, errors.PartitionFaulty)
    assert confirmed.partition_time_ms == clock.wall_ms()
    assert done.outcome == ACTION_OUTCOME_DONE


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
