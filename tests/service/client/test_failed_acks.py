"""A failed ack can be waited for and is never silent (K4)."""

import asyncio
import logging

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock
from tidemark.errors import Fenced, InvalidArgument, ReservationExpired, TidemarkError

QUEUE = "orders/a"
VISIBILITY_MS = 200


@pytest.fixture
def clock() -> ManualClock:
    """The time of a consumer, which stands still: it renews nothing and logs when it is moved."""
    return ManualClock()


@pytest.fixture
async def slow(client: tidemark.Client, connect: Connect, clock: ManualClock) -> tidemark.Client:
    return await connect("slow", clock=clock)


async def hold_too_long(
    client: tidemark.Client, deliveries: tidemark.Subscription, messages: int
) -> list[tidemark.Delivery]:
    """Deliveries, each with a reservation of its own, that have run out."""
    for number in range(messages):
        await publish(client, QUEUE, b"%d" % number)
    held = await take(deliveries, messages)
    again: set[bytes] = set()
    while len(again) < messages:
        again.update((await client.pull(QUEUE, wait_ms=30_000)).payloads)
    return held


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and "failed" in each.getMessage()
    ]


# --- waiting -------------------------------------------------------------------------------------


async def test_an_ack_that_is_waited_for_is_on_disk_when_it_returns(
    client: tidemark.Client,
) -> None:
    """K4, V6: of a message and of a batch, and again of what was acked before."""
    await publish(client, QUEUE, b"one", b"two", b"three", b"four")
    async with client.subscribe([QUEUE]) as deliveries:
        one, two = await take(deliveries, 2)

        await one.ack(wait=True)
        await two.ack()
        await two.ack(wait=True)
        await one.ack(wait=True)

        (group,) = await client.admin.list_groups(QUEUE)
        assert group.inflight == 2
        batch = await in_time(anext(deliveries.batches()))
        await batch.ack()
        await batch.ack(wait=True)
        (group,) = await client.admin.list_groups(QUEUE)
        assert group.inflight == 0
        await deliveries.flush()


async def test_an_ack_that_is_waited_for_raises_why_it_failed(
    client: tidemark.Client, slow: tidemark.Client
) -> None:
    """K4, V6: with queue and offset; an SDK user knows no delivery tags."""
    async with slow.subscribe([QUEUE], visibility_ms=VISIBILITY_MS) as deliveries:
        one, two, three = await hold_too_long(client, deliveries, 3)

        with pytest.raises(ReservationExpired) as refused:
            await in_time(two.ack(wait=True))
        await one.ack()
        with pytest.raises(ReservationExpired):
            await in_time(one.ack(wait=True))

        assert refused.value.metadata == {"queue": QUEUE, "offset": "1"}
        assert f"{QUEUE} at offset 1" in str(refused.value)
        with pytest.raises(ReservationExpired):
            await in_time(slow.settle(three))


async def test_the_ack_of_a_whole_batch_raises_why_it_failed(
    client: tidemark.Client, slow: tidemark.Client
) -> None:
    """K4."""
    await publish(client, QUEUE, b"one", b"two")
    async with slow.subscribe([QUEUE], visibility_ms=VISIBILITY_MS) as deliveries:
        batch = await in_time(anext(deliveries.batches()))
        assert len(await client.pull(QUEUE, wait_ms=30_000)) == 2

        with pytest.raises(ReservationExpired):
            await in_time(batch.ack(wait=True))


async def test_the_ack_of_a_lost_queue_raises_that_it_was_fenced(
    client: tidemark.Client, connect: Connect
) -> None:
    """K4, E8."""
    bob = await connect("bob")
    await publish(client, "own/a", b"one")
    async with client.subscribe(["own/a"]) as mine:
        (held,) = await take(mine, 1)
        async with bob.subscribe(["own/a"]):
            with pytest.raises(Fenced):
                await in_time(held.ack(wait=True))


async def test_a_wait_is_true_or_false(client: tidemark.Client) -> None:
    """K3: refused before the message counts as settled."""
    await publish(client, QUEUE, b"one")
    async with client.subscribe([QUEUE]) as deliveries:
        (one,) = await take(deliveries, 1)

        with pytest.raises(InvalidArgument) as refused:
            await one.ack(wait="yes")  # type: ignore[arg-type]

        assert refused.value.metadata["field"] == "wait"
        await one.nack()


# --- flushing -------------------------------------------------------------------------------------


async def test_a_flush_raises_the_first_failed_ack_with_their_number_and_only_once(
    client: tidemark.Client, slow: tidemark.Client
) -> None:
    """K4: what has failed since the last flush."""
    async with slow.subscribe([QUEUE], visibility_ms=VISIBILITY_MS) as deliveries:
        held = await hold_too_long(client, deliveries, 3)
        for each in held:
            await each.ack()

        with pytest.raises(ReservationExpired) as refused:
            await in_time(deliveries.flush())

        assert refused.value.metadata == {"queue": QUEUE, "offset": "0", "failed": "3"}
        await in_time(deliveries.flush())


async def test_a_flush_raises_also_what_the_callback_was_told(
    client: tidemark.Client, slow: tidemark.Client
) -> None:
    """K4."""
    failures: list[tuple[int, TidemarkError]] = []
    async with slow.subscribe(
        [QUEUE],
        visibility_ms=VISIBILITY_MS,
        on_settle_failed=lambda batch, error: failures.append((batch.offset, error)),
    ) as deliveries:
        held = await hold_too_long(client, deliveries, 2)
        for each in held:
            await each.ack()

        with pytest.raises(ReservationExpired):
            await in_time(deliveries.flush())

    assert sorted(offset for offset, _ in failures) == [0, 1]
    assert {error.metadata["queue"] for _, error in failures} == {QUEUE}


# --- logging --------------------------------------------------------------------------------------


async def test_failed_acks_are_logged_with_reason_and_queue_at_a_limited_rate(
    client: tidemark.Client,
    slow: tidemark.Client,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """K4: one line at once, and one for all others ten seconds later."""
    async with slow.subscribe([QUEUE], visibility_ms=VISIBILITY_MS) as deliveries:
        held = await hold_too_long(client, deliveries, 10)
        for each in held:
            await each.ack()
        with pytest.raises(ReservationExpired):
            await in_time(deliveries.flush())

        first = warnings(caplog)
        await clock.advance_ms(10_500)

        assert len(first) == 1
        # On a slow machine another than the first may come first: its time ran out before.
        one, two = (f"{QUEUE} at offset {each.offset}" for each in held[:2])
        assert first[0].startswith(f"an ack failed ({one}): RESERVATION_")
        (_, rest) = warnings(caplog)
        assert rest.startswith(f"9 acks failed (the first: {two}): RESERVATION_")
        record = caplog.records[-1].__dict__
        assert (record["queue"], record["reason"]) == (QUEUE, "RESERVATION_EXPIRED")


async def test_what_was_not_logged_yet_is_logged_when_the_subscription_is_closed(
    client: tidemark.Client, slow: tidemark.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """K4: time stands still, and no count is lost."""
    async with slow.subscribe([QUEUE], visibility_ms=VISIBILITY_MS) as deliveries:
        held = await hold_too_long(client, deliveries, 4)
        for each in held:
            await each.ack()
        with pytest.raises(ReservationExpired):
            await in_time(deliveries.flush())

    assert [each.split(" failed")[0] for each in warnings(caplog)] == ["an ack", "3 acks"]


# --- the blocking client --------------------------------------------------------------------------


async def test_the_blocking_client_waits_and_raises_alike(
    client: tidemark.Client, local: LocalBroker, connect: Connect
) -> None:
    """K4."""
    bob = await connect("bob")
    await publish(client, "own/a", b"one", b"two", b"three")
    took, lost = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def script() -> list[str]:
        raised: list[str] = []
        with (
            tidemark.sync.connect(local.address) as blocking,
            blocking.subscribe(["own/a"]) as deliveries,
        ):
            one, two, three = (next(iter(deliveries)) for _ in range(3))
            one.ack(wait=True)
            loop.call_soon_threadsafe(took.set)
            asyncio.run_coroutine_threadsafe(lost.wait(), loop).result()
            try:
                two.ack(wait=True)
            except Fenced as error:
                raised.append(error.reason)
            three.ack()
            try:
                deliveries.flush()
            except Fenced as error:
                raised.append(f"{error.reason} {error.metadata['failed']}")
        return raised

    running = asyncio.create_task(asyncio.to_thread(script))
    await in_time(took.wait())
    async with bob.subscribe(["own/a"]) as his:
        assert [each.payload for each in await take(his, 2)] == [b"two", b"three"]
        lost.set()
        assert await in_time(running) == ["FENCED", "FENCED 1"]
