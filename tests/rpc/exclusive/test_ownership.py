"""Exclusive queues over real gRPC, by sessions and by unary calls alike: E1 to E10."""

import asyncio
from typing import Any

import pytest

from tests.rpc.broker.local_broker import in_time, payloads_of, run_of
from tests.rpc.exclusive.clients import (
    ACTIVE,
    ADD,
    EVICTED,
    NOT_SUBSCRIBED,
    REMOVE,
    REMOVE_ALL,
    RESYNC,
    RESYNC_REQUIRED,
    resync,
    subscribe,
)
from tests.rpc.exclusive.conftest import OTHER_QUEUE, QUEUE, ExclusiveBroker, NewClient, Start
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Extend, Nack
from tidemark.api.broker.v1.subscription_pb2 import StartPosition, SubscriptionEntry
from tidemark.clock import ManualClock
from tidemark.errors import QuotaExceeded
from tidemark.rpc import from_status

# --- one owner ----------------------------------------------------------------------------------


async def test_a_new_subscriber_preempts_the_old(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E1, E3, E9."""
    ada, bob = await client("ada"), await client("bob")
    first = await subscribe(ada, QUEUE)

    second = await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert second > first
    (delivery,) = await bob.receive()
    assert payloads_of([delivery]) == [b"1"]
    assert delivery.epoch == second
    assert await ada.arrived(QUEUE) == []


async def test_groups_have_an_owner_each(broker: ExclusiveBroker, client: NewClient) -> None:
    """E1."""
    ada, bob = await client("ada", "red"), await client("bob", "blue")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)

    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of(await ada.receive()) == [b"1"]
    assert payloads_of(await bob.receive()) == [b"1"]


async def test_what_the_old_owner_holds_goes_to_the_new_one_now(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E8, E9: revoked in the commit that raises the epoch, and not counted as an attempt (V8)."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1", b"2"))
    (old,) = await ada.receive(2)

    await subscribe(bob, QUEUE)

    (new,) = await bob.receive(2)
    assert payloads_of([new]) == [b"1", b"2"]
    assert new.epoch > old.epoch
    assert (new.attempt_count, new.delivery_count) == (0, 2)


@pytest.mark.parametrize(
    "action", [Ack(), Nack(), Extend(visibility_ms=60_000)], ids=["ack", "nack", "extend"]
)
async def test_an_evicted_client_settles_nothing(
    broker: ExclusiveBroker, client: NewClient, action: Any
) -> None:
    """E8."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (old,) = await ada.receive()
    await subscribe(bob, QUEUE)
    (new,) = await bob.receive()

    assert await ada.settle(old, action) == "FENCED"

    assert (await broker.queue(QUEUE)).messages == 1
    assert await bob.settle(new, Ack()) == ""
    assert (await broker.queue(QUEUE)).messages == 0


async def test_an_owner_that_gives_up_leaves_its_messages_to_the_next(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    ada, bob = await client("ada"), await client("bob")
    first = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (old,) = await ada.receive()

    (removed,) = await ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))

    assert removed.state == NOT_SUBSCRIBED
    assert await ada.settle(old, Ack()) == "FENCED"
    assert await subscribe(bob, QUEUE) > first
    assert payloads_of(await bob.receive()) == [b"1"]
    assert await ada.report({}) == []


async def test_removing_everything_gives_up_every_queue(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    ada = await client("ada")
    epochs = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}

    assert await ada.sync(REMOVE_ALL) == []

    assert await resync(ada, epochs) == [(EVICTED, 0), (EVICTED, 0)]
    del broker


# --- being told ---------------------------------------------------------------------------------


async def test_the_old_owner_is_told_once_when_it_happens(broker: ExclusiveBroker) -> None:
    """E2: the marker is there before the notice, so whoever is told is also refused."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    await subscribe(ada, QUEUE)

    epoch = await subscribe(bob, QUEUE)

    (notice,) = await ada.until_told()
    assert (notice.group, notice.lmq_name) == ("default", QUEUE)
    assert (notice.state, notice.epoch) == (EVICTED, epoch)
    assert (await broker.unary_client("ada").pull(QUEUE)).subscription_state == EVICTED
    await ada.round_trip()
    assert len(ada.session.unsubscribed) == 1
    assert bob.session.unsubscribed == []


async def test_a_heartbeat_that_reports_a_lost_queue_is_told_again_every_time(
    client: NewClient,
) -> None:
    """E5."""
    ada, bob = await client("ada"), await client("bob")
    held = {QUEUE: await subscribe(ada, QUEUE), OTHER_QUEUE: await subscribe(ada, OTHER_QUEUE)}
    epoch = await subscribe(bob, QUEUE)
    await ada.sync(REMOVE)  # a notice of the eviction itself is read by now

    for _ in range(3):
        (notice,) = await ada.report(held)

        assert (notice.lmq_name, notice.state, notice.epoch) == (QUEUE, EVICTED, epoch)


async def test_a_heartbeat_that_reports_what_the_broker_does_not_know_asks_for_a_resync(
    client: NewClient,
) -> None:
    """E5, E7."""
    ada = await client("ada")

    (notice,) = await ada.report({QUEUE: 7})

    assert (notice.lmq_name, notice.state, notice.epoch) == (QUEUE, RESYNC_REQUIRED, 0)


# --- pulls --------------------------------------------------------------------------------------


async def test_a_pull_says_where_the_client_stands(broker: ExclusiveBroker) -> None:
    """E3."""
    ada, bob, eve = (broker.unary_client(name) for name in ("ada", "bob", "eve"))

    assert (await ada.pull(QUEUE)).subscription_state == RESYNC_REQUIRED
    await subscribe(ada, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE
    assert (await eve.pull(QUEUE)).subscription_state == NOT_SUBSCRIBED
    await subscribe(bob, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == EVICTED
    assert (await bob.pull(QUEUE)).subscription_state == ACTIVE


async def test_a_rejected_pull_waits_as_an_empty_one_does(start: Start, clock: ManualClock) -> None:
    """E3: a client that does not look at the state needs no change."""
    broker = await start(clock)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    asleep = clock.sleepers

    pull = asyncio.create_task(ada.pull(QUEUE, wait_ms=700))
    await in_time(clock.until_sleepers(asleep + 1))
    await clock.advance_ms(699)
    assert not pull.done()
    await clock.advance_ms(1)

    answer = await pull
    assert list(answer.deliveries) == []
    assert answer.subscription_state == EVICTED
    assert payloads_of(await bob.receive()) == [b"1"]


async def test_an_evicted_session_spends_no_credit(broker: ExclusiveBroker) -> None:
    """E3: with a credit of one, what it did not get on one queue is left for the other."""
    ada = await broker.session_client("ada", credit=1)
    bob = await broker.session_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(ada, OTHER_QUEUE)
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"for bob"))
    assert payloads_of(await bob.receive()) == [b"for bob"]

    await broker.publish(run_of(OTHER_QUEUE, b"for ada"))

    assert payloads_of(await ada.receive()) == [b"for ada"]


# --- how markers go -----------------------------------------------------------------------------


async def test_subscribing_again_clears_the_marker_of_that_name_only(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E4."""
    ada, bob = await client("ada"), await client("bob")
    held = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}
    for name in held:
        await subscribe(bob, name)

    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of(await ada.receive()) == [b"1"]
    assert [notice.lmq_name for notice in await ada.report(held)] == [OTHER_QUEUE]


async def test_a_resync_forgets_what_it_does_not_report_and_keeps_what_it_does(
    broker: ExclusiveBroker,
) -> None:
    """E4, E7."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    held = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}
    taken = {name: await subscribe(bob, name) for name in held}
    await ada.until_told(2)

    assert await resync(ada, {QUEUE: held[QUEUE]}) == [(EVICTED, taken[QUEUE])]

    notices = await ada.until_told(3)
    assert (notices[-1].lmq_name, notices[-1].state) == (QUEUE, EVICTED)
    reader = broker.unary_client("ada")
    assert (await reader.pull(QUEUE)).subscription_state == EVICTED
    assert (await reader.pull(OTHER_QUEUE)).subscription_state == NOT_SUBSCRIBED


async def test_a_disconnect_clears_all_markers_of_the_client(broker: ExclusiveBroker) -> None:
    """E4."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    for name in (QUEUE, OTHER_QUEUE):
        await subscribe(ada, name)
        await subscribe(bob, name)
    await subscribe(ada, "shared/a")
    await broker.publish(run_of("shared/a", b"held"))
    await ada.receive()
    await subscribe(bob, "shared/a")

    await ada.leave()

    # What it held goes back after its markers went; another look would be another incarnation.
    assert payloads_of(await bob.receive()) == [b"held"]
    again = await broker.session_client("ada")
    notices = await again.report({QUEUE: 1, OTHER_QUEUE: 1})
    assert [notice.state for notice in notices] == [RESYNC_REQUIRED] * 2


async def test_a_timeout_clears_all_markers_of_the_client(start: Start, clock: ManualClock) -> None:
    """E4, E6: by the look at silent clients that there is anyway."""
    broker = await start(clock, client_timeout_ms=5_000)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == EVICTED

    for _ in range(7):
        await clock.advance_ms(1_000)
        await bob.report({})

    assert (await ada.pull(QUEUE)).subscription_state == NOT_SUBSCRIBED
    assert (await bob.pull(QUEUE)).subscription_state == ACTIVE


@pytest.mark.parametrize("path", ["heartbeat", "pull", "remove", "publish", "another group"])
async def test_nothing_else_clears_a_marker(broker: ExclusiveBroker, path: str) -> None:
    """E4: exactly three paths."""
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    held = {QUEUE: await subscribe(ada, QUEUE)}
    await subscribe(bob, QUEUE)

    match path:
        case "heartbeat":
            await ada.report(held)
            await ada.report({})
        case "pull":
            await ada.pull(QUEUE)
        case "remove":
            await ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))
        case "publish":
            await broker.publish(run_of(QUEUE, b"1"), client_id="ada")
        case _:
            await subscribe(broker.unary_client("ada", "another"), QUEUE)
            await broker.unary_client("ada", "another").sync(REMOVE_ALL)

    assert (await ada.pull(QUEUE)).subscription_state == EVICTED


# --- confirming ---------------------------------------------------------------------------------


async def test_a_resync_by_the_owner_confirms(broker: ExclusiveBroker, client: NewClient) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("off_by", [-1, 1])
async def test_only_the_very_epoch_confirms(client: NewClient, off_by: int) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    ((state, _),) = await resync(ada, {QUEUE: epoch + off_by})

    assert state == EVICTED


async def test_a_resync_never_takes_what_nobody_owns(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E7."""
    ada = await client("ada")
    await broker.publish(run_of(QUEUE, b"1"))

    ((state, _),) = await resync(ada, {QUEUE: 0})

    assert state == EVICTED
    assert await ada.arrived(QUEUE) == []


async def test_a_reconnect_is_a_new_incarnation_that_goes_on_by_resync(
    broker: ExclusiveBroker,
) -> None:
    """E7: nothing is delivered before; afterwards the epoch is the same, and none was evicted."""
    first = await broker.session_client("ada")
    epoch = await subscribe(first, QUEUE)
    second = await broker.session_client("ada")
    assert second.session.welcome.session_id != first.session.welcome.session_id
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await first.receive()) == [b"1"]
    assert await second.arrived(QUEUE) == []

    assert await resync(second, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"2"))
    (delivery,) = await second.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"2"], epoch)
    assert await first.arrived(QUEUE) == []
    assert first.session.unsubscribed == []
    await first.leave()  # the end of the old incarnation is not that of the new
    await broker.publish(run_of(QUEUE, b"3"))
    assert sorted(payloads_of(await second.receive(2))) == [b"1", b"3"]


# --- where to start -----------------------------------------------------------------------------

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


# --- quotas -------------------------------------------------------------------------------------


def entries(*names: str) -> list[SubscriptionEntry]:
    return [SubscriptionEntry(lmq_name=name) for name in names]


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


async def test_what_a_quota_refuses_evicts_nobody(start: Start) -> None:
    """E1, S3: bad input changes nothing."""
    broker = await start(subscriptions_per_group_max=1)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)

    with pytest.raises(QuotaExceeded):
        await subscribe(bob, QUEUE)

    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE


# --- restarts -----------------------------------------------------------------------------------


async def test_after_a_broker_restart_the_owner_resyncs_and_goes_on(
    broker: ExclusiveBroker,
) -> None:
    """E10: nothing unsettled is skipped, and nothing settled comes again."""
    ada = await broker.session_client("ada", credit=1)
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"), run_of(QUEUE, b"2"))
    (first,) = await ada.receive()
    assert await ada.settle(first, Ack()) == ""

    await broker.restart_broker()
    again = await broker.session_client("ada")
    assert (await broker.unary_client("ada").pull(QUEUE)).subscription_state == RESYNC_REQUIRED

    assert await resync(again, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    (delivery,) = await again.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"2"], epoch)
    assert delivery.attempt_count == 0


async def test_receipts_of_a_unary_owner_stay_good_over_a_broker_restart(
    broker: ExclusiveBroker,
) -> None:
    """E10."""
    ada = broker.unary_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    await broker.restart_broker()

    assert await ada.settle(held, Ack()) == ""
    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await ada.receive()) == [b"2"]


async def test_epochs_grow_over_restarts_and_over_deletion_of_the_queue(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E10."""
    epochs = [await subscribe(await client("ada"), QUEUE)]

    await broker.restart_broker()
    epochs.append(await subscribe(await client("bob"), QUEUE))
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    epochs.append(await subscribe(await client("cy"), QUEUE))
    await broker.stop_broker()
    await broker.stop_storage()
    await broker.start_storage()
    await broker.start_broker()
    epochs.append(await subscribe(await client("ada"), QUEUE))

    assert epochs == sorted(set(epochs))


async def test_a_receipt_from_before_the_queue_was_deleted_settles_nothing_of_the_new_one(
    broker: ExclusiveBroker,
) -> None:
    """E8, E10."""
    ada = broker.unary_client("ada")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"old"))
    (old,) = await ada.receive()
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    bob = broker.unary_client("bob")
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"new"))

    assert await ada.settle(old, Ack()) != ""

    assert payloads_of(await bob.receive()) == [b"new"]


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
