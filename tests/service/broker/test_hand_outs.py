"""Hand-outs over sessions: an attempt is charged for what the application was given (K1, V8)."""

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    take,
    ticking,
    until,
)
from tests.support.reporting_consumer import (
    MESSAGES,
    PATIENT,
    ReportingConsumer,
    attempts_of,
    hold,
    pull_all,
    run_out,
)
from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import Ack, Extend, Nack
from tidemark.clock import ManualClock
from tidemark.errors import ReservationExpired
from tidemark.rpc import from_status


async def test_a_disconnect_charges_what_was_reported_and_releases_the_rest(
    local: LocalBroker,
) -> None:
    """K1, V8: also in the middle of a delivery."""
    session = await local.session()
    consumer = await hold(session, 4, 6)

    await consumer.hand_out(messages=5)
    await session.abort()

    assert attempts_of(await pull_all(local)) == [1] * 5 + [0] * 5


async def test_a_disconnect_charges_everything_to_a_client_that_reports_nothing(
    local: LocalBroker,
) -> None:
    """V8: what was delivered may have been given."""
    session = await local.session()
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1", b"2"])
    await take(consumer, 2)

    await session.abort()

    assert attempts_of(await pull_all(local, 2)) == [1, 1]


async def test_whole_deliveries_are_reported_by_their_number(local: LocalBroker) -> None:
    """K1."""
    session = await local.session()
    consumer = await hold(session, 4, 6)

    await consumer.hand_out(deliveries=1)
    await session.abort()

    assert attempts_of(await pull_all(local)) == [1] * 4 + [0] * 6


async def test_what_was_reported_and_not_handed_out_is_taken_back(local: LocalBroker) -> None:
    """K1: the last report counts."""
    session = await local.session()
    consumer = await hold(session, 4, 6)
    await consumer.hand_out(messages=10, deliveries=2, first_attempts=10)

    await consumer.hand_out(messages=2, deliveries=0, first_attempts=2)
    await session.abort()

    assert attempts_of(await pull_all(local)) == [1] * 2 + [0] * 8


async def test_a_report_far_ahead_does_not_charge_what_has_failed_before(
    local: LocalBroker,
) -> None:
    """K1: its neighbour may end the consumer again and again."""
    session = await local.session()
    consumer = await hold(session, 1)
    await session.settle(1, Nack())
    await session.publish(QUEUE, [b"fresh"])
    consumer.give_credit(2)
    session.wake()
    again, _ = await take(consumer, 2)

    await consumer.hand_out(first_attempts=100)
    await session.abort()

    assert again.attempt_count == 1
    assert attempts_of(await pull_all(local, 2)) == [1, 1], "the old one as it was, the fresh one"


async def test_a_report_far_ahead_does_not_charge_a_last_attempt(start: StartBroker) -> None:
    """K1, L5: with one attempt in all, it would be dead."""
    local = await start(topic={"max_attempts": 1})
    session = await local.session()
    consumer = ReportingConsumer(session, credit=100)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1", b"2"])
    (delivery,) = await take(consumer, 2)

    await consumer.hand_out(first_attempts=100, messages=1)
    await session.abort()

    assert delivery.last_attempt
    (left,) = await pull_all(local, 1)
    assert (left.first_offset, left.attempt_count) == (1, 0)


async def test_what_runs_out_is_charged_as_far_as_it_was_reported(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1, V2: a client that stands still, with messages in hand and in its buffer."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    consumer = await hold(session, 4, 6)
    await consumer.hand_out(messages=5)

    await run_out(local, clock)

    assert attempts_of(await pull_all(local)) == [1] * 5 + [0] * 5


async def test_what_has_run_out_is_named_before_a_later_report_is_confirmed(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1: a client that stood still must not hand it out; settling it is refused as before."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    consumer = await hold(session, 4, 6)
    await run_out(local, clock)

    await consumer.hand_out(messages=1)

    assert consumer.ended == {1, 2}
    with pytest.raises(ReservationExpired):
        await session.settle(1, Ack())


async def test_what_is_extended_for_a_moment_is_charged_when_that_is_over(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1: the time that was left before is no longer there to note what was given."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    consumer = await hold(session, MESSAGES)
    await consumer.hand_out(messages=5)
    shortest_ms = limits.VISIBILITY_TIMEOUT_MS_MIN

    await session.settle(1, Extend(visibility_ms=shortest_ms))

    assert attempts_of(await ticking(clock, pull_all(local))) == [1] * 5 + [0] * 5


async def test_a_restarted_broker_charges_nothing(start: StartBroker, clock: ManualClock) -> None:
    """V8: what it had not noted in storage costs no attempt."""
    local = await start(clock, partitions=1, **PATIENT)
    consumer = await hold(await local.session(), MESSAGES)
    await consumer.hand_out(messages=5)

    await local.stop_broker()
    await local.start_broker()
    await run_out(local, clock)

    assert attempts_of(await pull_all(local)) == [0] * MESSAGES


async def test_a_takeover_charges_nothing(local: LocalBroker) -> None:
    """K1, V8, E9: neither what was given nor what was buffered."""
    await local.create_topic("own", subscription="SUBSCRIPTION_KIND_EXCLUSIVE")
    first, second = await local.session("first"), await local.session("second")
    evicted = ReportingConsumer(first, credit=100)
    await evicted.subscribe("own/a")
    await first.publish("own/a", [b"1", b"2", b"3"])
    await take(evicted, 3)
    await evicted.hand_out(messages=2)

    heir = ReportingConsumer(second, credit=100)
    await heir.subscribe("own/a")

    assert attempts_of(await take(heir, 3)) == [0, 0, 0]


async def test_a_stopped_consumer_gets_nothing_until_it_has_credit_again(
    local: LocalBroker,
) -> None:
    """K1: what a leaving client gives back goes to others."""
    session = await local.session()
    consumer = ReportingConsumer(session, credit=100)
    await consumer.subscribe(QUEUE)
    session.stop_consumer(consumer.consumer_id)

    await session.publish(QUEUE, [b"1"])
    queue = await local.queue(QUEUE)
    consumer.give_credit(1)
    session.wake()

    assert queue.inflight == 0
    assert len(await take(consumer, 1)) == 1


async def test_hand_outs_of_a_consumer_that_reports_none_are_refused(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    silent = session.open_consumer(credit=1)
    strange = ReportingConsumer(session, credit=1)
    strange.consumer_id = silent.consumer_id
    strange.report(messages=1)
    strange.consumer_id = 99
    strange.report(messages=1)

    async def both_refused() -> bool:
        return len(session.errors) == 2

    await until(both_refused)
    reasons = [(each.consumer_id, from_status(each.error).reason) for each in session.errors]
    assert reasons == [(silent.consumer_id, "INVALID_ARGUMENT"), (99, "INVALID_ARGUMENT")]


async def test_confirmations_that_are_not_urgent_do_not_gather_without_end(
    local: LocalBroker,
) -> None:
    """S3: a client that sends nothing else still gets them."""
    session = await local.session()
    consumer = ReportingConsumer(session, credit=1)

    for _ in range(2_000):
        consumer.report(urgent=False)

    async def some_confirmed() -> bool:
        return len(consumer.confirmed) >= 1_000

    await until(some_confirmed)
