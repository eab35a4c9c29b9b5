"""Queues are loaded and unloaded: I2, I4 and I9."""

import pytest

from tests.support.exchange_client import ExchangeClient, append, operation, reserve, settle
from tests.support.storage_client import RunningStorage, loaded
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import (
    EVICTION_OUTCOME_EVICTED,
    EVICTION_OUTCOME_HAS_INFLIGHT,
    EVICTION_OUTCOME_NOT_MATERIALIZED,
    EVICTION_OUTCOME_NOT_PRESENT,
    EVICTION_OUTCOME_RACE_LOST,
)
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_NACK,
    Materialize,
    Operation,
    Unmaterialize,
)
from tidemark.clock import ManualClock


def materialize(lmq_name: str, create: bool = False) -> Operation:
    return operation(materialize=Materialize(lmq_name=lmq_name, create=create))


def unmaterialize(lmq_name: str) -> Operation:
    return operation(unmaterialize=Unmaterialize(lmq_name=lmq_name))


async def test_a_queue_is_loaded_once_and_created_only_if_asked_to(
    exchange: ExchangeClient,
) -> None:
    """I2."""
    missing, created, again, no_topic = await exchange.ask_all(
        materialize("jobs/a"),
        materialize("jobs/a", create=True),
        materialize("jobs/a"),
        materialize("no-such-topic", create=True),
    )

    assert isinstance(missing, errors.QueueNotFound)
    assert isinstance(no_topic, errors.TopicNotFound)
    assert (created.created, created.was_cold) == (True, True)
    assert (again.created, again.was_cold, again.queue_id) == (False, False, created.queue_id)


async def test_unloading_tells_what_came_of_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """I4: EVICTED, NOT_PRESENT, NOT_MATERIALIZED, HAS_INFLIGHT and RACE_LOST."""
    await exchange.ask(materialize("jobs/a", create=True))

    async def outcome(asked: Operation) -> int:
        result: int = (await exchange.ask(asked)).outcome
        return result

    assert await outcome(unmaterialize("jobs/none")) == EVICTION_OUTCOME_NOT_PRESENT
    _, raced = await exchange.ask_all(append("jobs/a", b"x"), unmaterialize("jobs/a"))
    assert raced.outcome == EVICTION_OUTCOME_RACE_LOST
    (got,) = (await exchange.ask(reserve("jobs/a"))).slices
    assert await outcome(unmaterialize("jobs/a")) == EVICTION_OUTCOME_HAS_INFLIGHT
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
    assert await outcome(unmaterialize("jobs/a")) == EVICTION_OUTCOME_EVICTED
    assert await outcome(unmaterialize("jobs/a")) == EVICTION_OUTCOME_NOT_MATERIALIZED
    assert await loaded(storage) == 0
    (again,) = (await exchange.ask(reserve("jobs/a"))).slices
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_what_is_used_in_the_same_frame_is_not_unloaded(exchange: ExchangeClient) -> None:
    """I2, I4: there is no interleaving in which both happen."""
    _, unloaded = await exchange.ask_all(append("jobs/a", b"x"), unmaterialize("jobs/a"))

    assert unloaded.outcome == EVICTION_OUTCOME_RACE_LOST
    assert len((await exchange.ask(reserve("jobs/a"))).slices) == 1


@pytest.mark.rocksdb(reason="its housekeeping takes no trips")
async def test_a_queue_that_no_broker_tracks_is_unloaded_after_twice_its_idle_window(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: what a broker tracks, or a reservation holds, stays."""
    await storage.create_topic("idle", idle_after_ms=5000)
    await exchange.ask_all(append("idle/untracked", b"x"), append("idle/held", b"x"))
    await exchange.ask_all(reserve("idle/held"), materialize("idle/tracked", create=True))

    await clock.advance_ms(9_000)
    before = await loaded(storage)
    await clock.advance_ms(3_000)
    after = await loaded(storage)

    assert (before, after) == (3, 2)
    assert len((await exchange.ask(reserve("idle/untracked"))).slices) == 1


async def test_another_broker_tracks_nothing_until_it_says_so(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: left by a broken link."""
    await storage.create_topic("idle", idle_after_ms=1000)
    await exchange.ask(materialize("idle/a", create=True))

    await storage.claim(broker_id="broker-b")
    await clock.advance_ms(5_000)

    assert await loaded(storage) == 0


@pytest.mark.rocksdb(reason="its housekeeping takes no trips")
async def test_each_queue_is_unloaded_by_its_own_idle_window(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9."""
    await storage.create_topic("idle", idle_after_ms=1000)
    await exchange.ask(append("jobs/long", b"x"))
    await clock.advance_ms(10)
    await exchange.ask(append("idle/short", b"x"))

    await clock.advance_ms(5_000)

    assert await loaded(storage) == 1
