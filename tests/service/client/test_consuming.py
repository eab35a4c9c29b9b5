"""Consuming with the SDK: one at a time and in batches, settled, interrupted, taken over."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

import tidemark
from tests.service.client.conftest import Connect, until_disconnected
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock
from tidemark.errors import (
    AlreadySettled,
    ClientClosed,
    Fenced,
    InvalidArgument,
    TidemarkError,
    TopicNotFound,
)

pytestmark = pytest.mark.slow

QUEUE, OTHER = "orders/a", "orders/b"


async def left(client: tidemark.Client, lmq_name: str = QUEUE) -> list[tuple[bytes, int]]:
    """What is ready, and how often it failed."""
    pulled = await client.pull(lmq_name, wait_ms=500)
    return [(each.payload, each.attempt) for each in pulled]


async def test_acked_messages_do_not_come_back_and_others_do(client: tidemark.Client) -> None:
    """V6, V8."""
    await publish(client, QUEUE, b"done", b"failed", b"untouched")

    async with client.subscribe([QUEUE]) as deliveries:
        done, failed = await take(deliveries, 2)
        await done.ack()
        await failed.nack()
        again = await in_time(anext(deliveries))

    assert (done.payload, failed.payload, again.payload) == (b"done", b"failed", b"untouched")
    assert sorted(await left(client)) == [(b"failed", 1), (b"untouched", 1)]


async def test_leaving_gives_back_unseen_messages_as_if_untried(client: tidemark.Client) -> None:
    """V8."""
    await publish(client, QUEUE, b"in hand", b"unseen")

    async with client.subscribe([QUEUE]) as deliveries:
        await take(deliveries, 1)

    assert sorted(await left(client)) == [(b"in hand", 1), (b"unseen", 0)]


async def test_batches_bring_runs_whole(client: tidemark.Client) -> None:
    await publish(client, QUEUE, *(b"%d" % number for number in range(100)))

    async with client.subscribe([QUEUE], credit=100) as deliveries:
        async with aclosing(deliveries.batches()) as batches:
            batch = await in_time(anext(batches))
        await batch[0].nack(60_000)
        await batch.ack()
        await deliveries.flush()

    assert (len(batch), batch.offset, batch.payloads[99]) == (100, 0, b"99")
    assert [each.offset for each in batch] == list(range(100))
    assert await left(client) == []


async def test_acks_one_by_one_and_out_of_order_all_arrive(client: tidemark.Client) -> None:
    await publish(client, QUEUE, *(b"%d" % number for number in range(50)))

    async with client.subscribe([QUEUE]) as deliveries:
        taken = await take(deliveries, 50)
        for delivery in taken[::2] + taken[1::2][::-1]:
            await delivery.ack()
        await taken[7].ack()
        await deliveries.flush()
        with pytest.raises(AlreadySettled):
            await taken[7].nack()

    assert await left(client) == []


async def test_credit_bounds_what_is_here_unsettled(client: tidemark.Client) -> None:
    await publish(client, QUEUE, *(b"%d" % number for number in range(10)))

    async with client.subscribe([QUEUE], credit=4) as deliveries:
        first = await take(deliveries, 4)
        beyond = await client.pull(QUEUE, max_messages=1, wait_ms=30_000)
        for delivery in first:
            await delivery.ack()

        assert beyond.payloads == [b"4"], "no client had reserved it"
        assert [each.payload for each in await take(deliveries, 4)] == [b"5", b"6", b"7", b"8"]


async def test_a_handler_that_forgets_its_messages_does_not_stop_the_flow(
    client: tidemark.Client,
) -> None:
    """What expired is no longer held: its credit comes back."""
    await publish(client, QUEUE, b"forgotten", b"next")

    async with client.subscribe([QUEUE], credit=1, visibility_ms=200, max_lease_ms=0) as deliveries:
        await take(deliveries, 1)

        assert len(await take(deliveries, 1)) == 1


async def test_a_late_ack_is_told_to_the_callback_and_a_late_nack_raises(
    client: tidemark.Client,
) -> None:
    """V6: never silently."""
    failures: list[tuple[int, TidemarkError]] = []
    told = asyncio.Event()

    def failed(batch: tidemark.DeliveryBatch, error: TidemarkError) -> None:
        failures.append((batch.offset, error))
        told.set()

    await publish(client, QUEUE, b"one", b"two")
    async with client.subscribe(
        [QUEUE], credit=2, visibility_ms=1_000, max_lease_ms=0, on_settle_failed=failed
    ) as deliveries:
        one, two = await take(deliveries, 2)
        expired = await take(deliveries, 2)
        assert [(each.payload, each.attempt) for each in expired] == [(b"one", 1), (b"two", 1)]
        await one.ack()
        await in_time(told.wait())
        with pytest.raises(TidemarkError):
            await two.nack()

    assert failures[0][0] == 0
    assert failures[0][1].reason == "RESERVATION_EXPIRED"
    assert failures[0][1].metadata == {"queue": QUEUE, "offset": "0"}


async def test_an_extension_keeps_messages_away_from_others(tmp_path: Path) -> None:
    clock = ManualClock()
    failures: list[TidemarkError] = []
    async with (
        local_broker(tmp_path, clock) as local,
        tidemark.connect(local.address, clock=clock) as client,
    ):
        await local.create_topic()
        await publish(client, QUEUE, b"slow")
        async with client.subscribe(
            [QUEUE], visibility_ms=200, on_settle_failed=lambda _, error: failures.append(error)
        ) as deliveries:
            (slow,) = await take(deliveries, 1)
            left_ms = await slow.extend(20_000)
            with pytest.raises(InvalidArgument):
                await slow.extend(1)
            with pytest.raises(InvalidArgument):
                await slow.nack(-1)

            await clock.advance_ms(10_000)
            others = await local.pull(QUEUE)
            await slow.ack()
            await in_time(deliveries.flush())

        assert (left_ms, others, failures) == (20_000, [], [])
        assert (await local.queue(QUEUE)).messages == 0


async def test_two_subscriptions_of_one_group_share_a_client(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """Each has its own queues, also after a reconnect; the same queue twice is refused."""
    async with client.subscribe([QUEUE]) as one, client.subscribe([OTHER]) as other:
        with pytest.raises(InvalidArgument, match="already"):
            client.subscribe([QUEUE])
        await local.stop_broker()
        await local.start_broker()
        await publish(client, QUEUE, b"a")
        await publish(client, OTHER, b"b")

        assert [each.payload for each in await take(one, 1)] == [b"a"]
        assert [each.payload for each in await take(other, 1)] == [b"b"]

    await publish(client, OTHER, b"the client goes on")


async def test_a_subscription_goes_on_after_the_broker_restarted(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """V6: what was held went back and comes again; the old hand on it is told so."""
    failures: list[TidemarkError] = []
    await publish(client, QUEUE, b"before")
    async with client.subscribe(
        [QUEUE], on_settle_failed=lambda _, error: failures.append(error)
    ) as deliveries:
        (held,) = await take(deliveries, 1)
        await local.stop_broker()
        await local.start_broker()
        await publish(client, QUEUE, b"after")

        came = await take(deliveries, 2)
        for delivery in came:
            await delivery.ack()
        await in_time(deliveries.flush())
        assert not failures
        await held.ack()
        with pytest.raises(AlreadySettled):
            await in_time(deliveries.flush())

    assert {each.payload for each in came} == {b"before", b"after"}
    assert len(failures) == 1
    assert await left(client) == []


@pytest.mark.also_on_redis
async def test_a_subscription_goes_on_after_storage_restarted(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """V4: what is held stays held, and an ack meanwhile is repeated until it is answered."""
    await publish(client, QUEUE, b"before")
    async with client.subscribe([QUEUE]) as deliveries:
        (before,) = await take(deliveries, 1)
        await local.stop_storage()
        await before.ack()
        await local.start_storage()
        await in_time(deliveries.flush())
        await publish(client, QUEUE, b"after")

        (after,) = await take(deliveries, 1)
        await after.ack()
        await in_time(deliveries.flush())

    assert after.payload == b"after"
    assert await left(client) == []


async def test_an_exclusive_queue_is_kept_over_a_reconnect_and_never_taken_back(
    local: LocalBroker, client: tidemark.Client, connect: Connect
) -> None:
    """E7, E10: a reconnect confirms with the epoch it had, it does not subscribe."""
    async with client.subscribe(["own/a"]) as deliveries:
        await publish(client, "own/a", b"one")
        (one,) = await take(deliveries, 1)
        await one.ack()
        await in_time(deliveries.flush())

        await local.stop_broker()
        await local.start_broker()
        await publish(client, "own/a", b"two")
        (two,) = await take(deliveries, 1)

        assert two.epoch == one.epoch > 0


async def test_the_loser_of_an_exclusive_queue_is_told_and_its_loop_ends(
    client: tidemark.Client, connect: Connect
) -> None:
    """E1, E2, E8, E9: what it held goes to the new owner, and its settlements are fenced."""
    evictions: list[tidemark.Eviction] = []
    bob = await connect("bob")
    await publish(client, "own/a", b"one")
    async with client.subscribe(["own/a"], on_evicted=evictions.append) as mine:
        (held,) = await take(mine, 1)

        async with bob.subscribe(["own/a"]) as his:
            (taken,) = await take(his, 1)
            with pytest.raises(StopAsyncIteration):
                await in_time(anext(mine))
            with pytest.raises(Fenced):
                await held.nack()
            await taken.ack()

    assert [(each.lmq_name, each.group) for each in evictions] == [("own/a", "default")]
    assert evictions[0].epoch == taken.epoch > held.epoch
    assert mine.lmq_names == []


async def test_a_takeover_while_the_old_owner_was_away_is_told_when_it_is_back(
    local: LocalBroker, client: tidemark.Client, connect: Connect
) -> None:
    """E4, E7: its resync presents an epoch that is no longer the owner's."""
    clock = ManualClock()
    evictions: list[tidemark.Eviction] = []
    away = await connect("away", clock=clock)
    async with away.subscribe(["own/a"], on_evicted=evictions.append) as mine:
        session = away._routes.home.session
        assert session is not None
        await session.abort()
        await until_disconnected(away)
        async with (await connect("bob")).subscribe(["own/a"]):
            assert not evictions, "it is not connected and cannot know"

            await clock.advance_ms(5_000)
            with pytest.raises(StopAsyncIteration):
                await in_time(anext(mine))
        await clock.advance_ms(5_000)

    assert [each.lmq_name for each in evictions] == ["own/a"]


async def test_groups_have_their_own_progress(client: tidemark.Client) -> None:
    await publish(client, QUEUE, b"for both")

    async with (
        client.subscribe([QUEUE], group="one") as one,
        client.subscribe([QUEUE], group="two") as two,
    ):
        (first,), (second,) = await take(one, 1), await take(two, 1)

    assert (first.group, second.group) == ("one", "two")


async def test_a_subscription_is_refused_with_its_reason(client: tidemark.Client) -> None:
    with pytest.raises(TopicNotFound):
        async with client.subscribe(["nowhere/a"]):
            pass
    with pytest.raises(InvalidArgument):
        client.subscribe([])
    with pytest.raises(InvalidArgument):
        client.subscribe(QUEUE)
    with pytest.raises(InvalidArgument):
        client.subscribe([QUEUE], credit=0)


async def test_a_closed_subscription_ends_its_loop_and_takes_no_settlements(
    client: tidemark.Client,
) -> None:
    await publish(client, QUEUE, b"one")
    async with client.subscribe([QUEUE]) as deliveries:
        (one,) = await take(deliveries, 1)

    with pytest.raises(StopAsyncIteration):
        await anext(deliveries)
    assert await left(client) == [(b"one", 1)]
    with pytest.raises((ClientClosed, AlreadySettled)):
        await one.ack()


async def test_what_was_pulled_is_settled_at_once_or_one_by_one(client: tidemark.Client) -> None:
    await publish(client, QUEUE, b"a", b"b", b"c")

    pulled = await client.pull(QUEUE, group="web", max_messages=3, wait_ms=30_000)
    deliveries = list(pulled)
    await deliveries[0].ack()
    await deliveries[1].nack()
    await client.settle(pulled, ack=True)
    again = await client.pull(QUEUE, group="web", wait_ms=30_000)
    await client.settle(again, ack=False)
    once_more = await client.pull(QUEUE, group="web", wait_ms=30_000)

    assert [(each.payload, each.attempt) for each in again] == [(b"b", 1)]
    assert [(each.payload, each.attempt) for each in once_more] == [(b"b", 2)]
    with pytest.raises(InvalidArgument):
        await client.pull(QUEUE, max_messages=0)


async def test_a_pull_of_nothing_is_empty(client: tidemark.Client) -> None:
    pulled = await client.pull(QUEUE, wait_ms=10)

    assert (len(pulled), pulled.payloads) == (0, [])
    await client.settle(pulled)


async def test_no_task_and_no_connection_outlives_a_client(local: LocalBroker) -> None:
    before = asyncio.all_tasks()

    async with tidemark.connect(local.address) as client:
        await client.create_topic("orders")
        await publish(client, QUEUE, b"x")
        async with client.subscribe([QUEUE]) as deliveries:
            await take(deliveries, 1)

    async def nothing_left() -> bool:
        mine = [task for task in asyncio.all_tasks() - before if "client" in repr(task)]
        return not mine

    await until(nothing_left)


async def test_a_thousand_queues_are_subscribed_to_at_once(client: tidemark.Client) -> None:
    names = [f"orders/{number}" for number in range(1_000)]
    for lmq_name in (names[0], names[-1]):
        await publish(client, lmq_name, lmq_name.encode())

    async with client.subscribe(names) as deliveries:
        came = {delivery.payload.decode() for delivery in await take(deliveries, 2)}

    assert came == {names[0], names[-1]}


async def test_a_callback_that_raises_stops_nothing(
    client: tidemark.Client, connect: Connect
) -> None:
    def broken(eviction: tidemark.Eviction) -> None:
        raise RuntimeError("the user's mistake")

    bob = await connect("bob")
    async with (
        client.subscribe(["own/a", "own/b"], on_evicted=broken) as mine,
        bob.subscribe(["own/a"]) as his,
    ):
        await publish(client, "own/a", b"his")
        await publish(client, "own/b", b"mine")

        assert (await take(his, 1))[0].payload == b"his"
        assert (await take(mine, 1))[0].payload == b"mine"
