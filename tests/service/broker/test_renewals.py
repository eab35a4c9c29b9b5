"""Renewals over sessions: many reservations get more time at once; refused ones are named (K1)."""

from typing import Any

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import LocalBroker, in_time, take, ticking
from tests.support.reporting_consumer import (
    MESSAGES,
    PATIENT,
    VISIBILITY_MS,
    ReportingConsumer,
    attempts_of,
    hold,
    pull_all,
    renew,
    run_out,
)
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument
from tidemark.rpc import from_status


async def test_renewed_reservations_do_not_run_out(start: StartBroker, clock: ManualClock) -> None:
    """K1: by tag and by receipt, from any session on a shared topic; the others do."""
    local = await start(clock, partitions=1, **PATIENT)
    session, other = await local.session(), await local.session("other")
    consumer = ReportingConsumer(session, credit=3)
    await consumer.subscribe("orders/x")
    for number in range(3):
        await session.publish("orders/x", [b"%d" % number])
    held = await take(consumer, 3)

    await clock.advance_ms(VISIBILITY_MS - 1_000)
    by_tag = await renew(session, delivery_tags=[held[0].delivery_tag])
    by_receipt = await renew(other, receipts=[{"receipt": held[1].receipt}])
    await clock.advance_ms(1_000)
    (lost,) = await ticking(clock, pull_all(local, 1))
    settled = [await session.settle(each.delivery_tag, Ack()) for each in held[:2]]

    assert (by_tag, by_receipt) == ([], [])
    assert lost.first_offset == held[2].first_offset
    assert [each.messages for each in settled] == [1, 1]


async def test_a_renewal_never_shortens_the_time_that_is_left(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    await hold(session, 1)

    refused = await renew(
        session, delivery_tags=[1], visibility_ms=limits.VISIBILITY_TIMEOUT_MS_MIN
    )
    await clock.advance_ms(VISIBILITY_MS // 2)

    assert refused == []
    assert (await session.settle(1, Ack())).messages == 1


async def test_a_renewal_notes_what_the_application_was_given(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1, V8: also by a receipt, from a session that did not bring the messages."""
    local = await start(clock, partitions=1, **PATIENT)
    session, later = await local.session(), await local.session("later")
    consumer = ReportingConsumer(session, credit=MESSAGES)
    await consumer.subscribe("orders/x")
    await session.publish("orders/x", [b"x"] * MESSAGES)
    (held,) = await take(consumer, MESSAGES)

    refused = await renew(later, receipts=[{"receipt": held.receipt, "given_messages": 4}])
    await run_out(local, clock)

    assert refused == []
    assert attempts_of(await pull_all(local)) == [1] * 4 + [0] * 6


async def test_each_reservation_that_is_refused_is_named_with_its_reason(
    local: LocalBroker,
) -> None:
    """K1, V6: the others are renewed."""
    session = await local.session()
    consumer = await hold(session, 1, 1)
    receipt = (await settled_receipt(local)).receipt
    answer = session.submit_renewal(
        broker_pb2.Renewal(
            delivery_tags=[1, 99, 2],
            receipts=[
                broker_pb2.HeldReceipt(receipt=receipt),
                broker_pb2.HeldReceipt(receipt=b"nonsense"),
            ],
        )
    )
    session.wake()

    result = await in_time(answer)

    refused = {each.delivery_tag or each.receipt: each.error for each in result.refused}
    reasons = {which: from_status(error).reason for which, error in refused.items()}
    assert reasons == {
        99: "UNKNOWN_DELIVERY_TAG",
        receipt: "ALREADY_SETTLED",
        b"nonsense": "INVALID_ARGUMENT",
    }
    assert consumer.confirmed == []


async def settled_receipt(local: LocalBroker) -> Any:
    session = await local.session("settled")
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/settled")
    await session.publish("orders/settled", [b"1"])
    (delivery,) = await take(consumer, 1)
    await session.settle(delivery.delivery_tag, Ack())
    return delivery


@pytest.mark.parametrize("visibility_ms", [1, limits.VISIBILITY_TIMEOUT_MS_MAX + 1, 2**64 - 1])
async def test_a_renewal_with_a_wrong_time_is_refused_and_the_session_goes_on(
    local: LocalBroker, visibility_ms: int
) -> None:
    """S3."""
    session = await local.session()
    await hold(session, 1)

    refused = await renew(
        session,
        delivery_tags=[1],
        receipts=[{"receipt": b"r"}],
        visibility_ms=visibility_ms,
    )

    assert refused == ["INVALID_ARGUMENT"] * 2
    assert (await session.settle(1, Ack())).messages == 1


async def test_a_renewal_of_nothing_is_answered(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()

    assert await renew(session) == []


async def test_more_reservations_than_a_frame_may_name_end_the_session(local: LocalBroker) -> None:
    """S3: at the limit, each is answered; one past it, nothing is done."""
    at_limit, past_it = await local.session("ada"), await local.session("bob")
    most = limits.RENEWALS_PER_FRAME_MAX

    refused = await renew(at_limit, delivery_tags=range(1, most + 1))
    answer = past_it.submit_renewal(broker_pb2.Renewal(delivery_tags=range(1, most + 2)))
    past_it.wake()

    assert refused == ["UNKNOWN_DELIVERY_TAG"] * most
    with pytest.raises(InvalidArgument):
        await in_time(answer)


async def test_what_an_owner_holds_the_owner_alone_renews(local: LocalBroker) -> None:
    """E8, K1: storage compares the client id, as it does for a settlement."""
    await local.create_topic("own", subscription="SUBSCRIPTION_KIND_EXCLUSIVE")
    owner, stranger = await local.session("owner"), await local.session("stranger")
    consumer = ReportingConsumer(owner, credit=1)
    await consumer.subscribe("own/a")
    await owner.publish("own/a", [b"1"])
    (held,) = await take(consumer, 1)

    by_stranger = await renew(stranger, receipts=[{"receipt": held.receipt}])
    by_owner = await renew(owner, receipts=[{"receipt": held.receipt}], delivery_tags=[1])

    assert by_stranger == ["FENCED"]
    assert by_owner == []


async def test_what_was_revoked_by_a_takeover_is_not_renewed(local: LocalBroker) -> None:
    """E8, E9: not by its tag, not by its receipt, not by the new owner."""
    await local.create_topic("own", subscription="SUBSCRIPTION_KIND_EXCLUSIVE")
    evicted, owner = await local.session("evicted"), await local.session("owner")
    before = ReportingConsumer(evicted, credit=1)
    await before.subscribe("own/a")
    await evicted.publish("own/a", [b"1"])
    (held,) = await take(before, 1)
    after = ReportingConsumer(owner, credit=1)
    await after.subscribe("own/a")
    await take(after, 1)

    by_evicted = await renew(evicted, delivery_tags=[1], receipts=[{"receipt": held.receipt}])
    by_owner = await renew(owner, receipts=[{"receipt": held.receipt}])

    assert by_evicted == ["FENCED", "FENCED"]
    assert by_owner == ["FENCED"]
