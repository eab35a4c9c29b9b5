"""Subscribing: where a group starts, quotas, and a result for every entry."""

import asyncio

import pytest

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import ACTIVE, ADD, REMOVE, REMOVE_ALL, RESYNC, subscribe
from tests.support.local_broker import in_time, payloads_of, run_of
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.subscription_pb2 import StartPosition, SubscriptionEntry
from tidemark.clock import ManualClock
from tidemark.errors import QuotaExceeded
from tidemark.rpc import from_status


def entries(*names: str) -> list[SubscriptionEntry]:
    return [SubscriptionEntry(lmq_name=name) for name in names]


# --- where to start -------------------------------------------------------------------------------


STARTS = {
    "keep": (None, [b"2", b"3", b"4"]),
    "earliest": (StartPosition(earliest=True), [b"0", b"1", b"2", b"3", b"4"]),
    "latest": (StartPosition(latest=True), []),
    "last": (StartPosition(last=2), [b"3", b"4"]),
    "offset": (StartPosition(offset=1), [b"1", b"2", b"3", b"4"]),
}


@pytest.mark.parametrize("start_at", STARTS)
@pytest.mark.parametrize("topic", ["kept", "kept-own"], ids=["shared", "exclusive"])
async def test_a_subscription_says_where_to_start(
    broker: ExclusiveBroker, client: NewClient, topic: str, start_at: str
) -> None:
    """E8: on an exclusive queue in the commit that takes it."""
    subscription = (
        topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE
        if topic == "kept-own"
        else topic_pb2.SUBSCRIPTION_KIND_SHARED
    )
    await broker.create_topic(topic, subscription=subscription, retention_enabled=True)
    name = f"{topic}/a"
    await broker.publish(*(run_of(name, b"%d" % number) for number in range(5)))
    ada, bob = await client("ada"), broker.unary_client("bob")
    await subscribe(bob, name)
    for _ in range(2):
        answer = await broker.pull(name, client_id="bob", max_messages=1)
        assert await bob.settle(answer[0], Ack()) == ""
    await bob.sync(REMOVE_ALL)
    position, expected = STARTS[start_at]

    await subscribe(ada, name, position)
    await broker.publish(run_of(name, b"new"))

    expected = [*expected, b"new"]
    assert payloads_of(await ada.receive(len(expected))) == expected


# --- quotas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["shared", "own"])
@pytest.mark.parametrize("quota", ["group", "broker"])
async def test_quotas_hold_at_the_limit_and_one_past_it(
    start: Start, topic: str, quota: str
) -> None:
    """S3: also within one sync; removing is never refused, and makes room."""
    broker = await start(**{f"subscriptions_per_{quota}_max": 3})
    ada = broker.unary_client("ada")
    names = [f"{topic}/{number}" for number in range(5)]

    results = await ada.sync(ADD, *entries(*names))

    refused = [result for result in results if result.HasField("error")]
    assert len(refused) == 2
    for result in refused:
        error = from_status(result.error)
        assert isinstance(error, QuotaExceeded)
        assert error.metadata["quota"] == quota
    held = next(result.lmq_name for result in results if not result.HasField("error"))
    assert not any(result.HasField("error") for result in await ada.sync(REMOVE, *entries(*names)))
    await subscribe(ada, held)
    await subscribe(ada, held)


async def test_a_quota_of_one_group_is_not_that_of_another(start: Start) -> None:
    broker = await start(subscriptions_per_group_max=1)
    red, blue = broker.unary_client("ada", "red"), broker.unary_client("ada", "blue")
    await subscribe(red, QUEUE)
    await subscribe(blue, QUEUE)

    with pytest.raises(QuotaExceeded):
        await subscribe(red, OTHER_QUEUE)


async def test_a_client_has_a_quota_of_its_own(
    broker: ExclusiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemark.limits.SUBSCRIPTIONS_PER_SESSION_MAX", 2)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, "own/1")
    await subscribe(ada, "own/2")

    with pytest.raises(QuotaExceeded) as refused:
        await subscribe(ada, "own/3")

    assert refused.value.metadata["quota"] == "client"
    await subscribe(bob, "own/3")


async def test_what_a_quota_refuses_evicts_no_client(start: Start) -> None:
    """E1, S3: bad input changes nothing."""
    broker = await start(subscriptions_per_group_max=1)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)

    with pytest.raises(QuotaExceeded):
        await subscribe(bob, QUEUE)

    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE


# --- the entries of a sync ------------------------------------------------------------------------


async def test_a_sync_without_a_mode_is_refused(broker: ExclusiveBroker) -> None:
    """S3."""
    request = broker_pb2.SyncSubscriptionsRequest(client_id="ada")

    with pytest.raises(Exception, match="mode"):
        await broker.api.SyncSubscriptions(request)


async def test_every_entry_of_a_sync_has_its_own_result(client: NewClient) -> None:
    """S3."""
    ada = await client("ada")

    for mode in (ADD, RESYNC):
        results = await ada.sync(mode, *entries(QUEUE, "own/\n", "nowhere/x"))

        reasons = [from_status(each.error).reason for each in results if each.HasField("error")]
        assert reasons == ["INVALID_NAME", "TOPIC_NOT_FOUND"]
        assert not results[0].HasField("error")


async def test_a_unary_client_that_waits_for_its_subscription_is_not_silent(
    start: Start, clock: ManualClock
) -> None:
    """E4: it can pull from a queue that it was confirmed to own, however long storage took."""
    broker = await start(clock, client_timeout_ms=5_000)
    ada = broker.unary_client("ada")
    await subscribe(ada, OTHER_QUEUE)
    broker.link.answers.close()
    subscribing = asyncio.create_task(subscribe(ada, QUEUE))
    await in_time(broker.link.answers.until_held())

    await clock.advance_ms(7_000)
    broker.link.answers.let_go()
    await subscribing

    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE
    assert (await ada.pull(OTHER_QUEUE)).subscription_state == ACTIVE
