"""Attempts: what the application was given costs one, what waits in the client's buffer none."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import pytest

import tidemark
import tidemark.sync
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock
from tidemark.errors import ReservationExpired

pytestmark = pytest.mark.slow

QUEUE, OWN = "orders/a", "own/a"
MESSAGES: Final = 10
PAYLOADS: Final = [b"%d" % number for number in range(MESSAGES)]
VISIBILITY_MS: Final = 30_000
"""The default of a topic."""


@pytest.fixture
async def clock() -> ManualClock:
    """Time of the broker and its storage; a client may have it as well, or stand still."""
    return ManualClock()


@pytest.fixture
async def local(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, clock, partitions=1, client_timeout_ms=3_600_000) as local:
        yield local


async def gone(client: tidemark.Client) -> None:
    """The connection breaks. A client whose clock stands still does not connect again."""
    session = client._routes.home.session
    assert session is not None
    session.end()
    await until_released(client)


async def until_released(client: tidemark.Client) -> None:
    async def released() -> bool:
        return client._routes.home.session is None

    await until(released)


async def attempts(client: tidemark.Client, messages: int = MESSAGES) -> list[int]:
    """The attempts of all messages, in the order of the queue."""
    found: dict[int, int] = {}
    while len(found) < messages:
        for each in await in_time(client.pull(QUEUE, max_messages=messages, wait_ms=30_000)):
            found[each.offset] = each.attempt
    return [found[offset] for offset in sorted(found)]


async def fail_once(client: tidemark.Client) -> None:
    """Every message fails: from now on, none of them is reported before a task takes it."""
    failed = 0
    while failed < MESSAGES:
        pulled = await in_time(client.pull(QUEUE, max_messages=MESSAGES, wait_ms=30_000))
        failed += len(pulled)
        for each in pulled:
            await each.nack()


async def pass_time(clock: ManualClock, duration_ms: int, *clients: tidemark.Client) -> None:
    """Let time pass in steps, after each of which the renewals of the clients are made.

    A session and a partition keep their order: when a publish is answered, they are.
    """
    step_ms = min(duration_ms, VISIBILITY_MS // 8)
    for _ in range(duration_ms // step_ms):
        await clock.advance_ms(step_ms)
        for client in clients:
            await in_time(publish(client, "orders/other", b"x"))


# --- a client that is gone ----------------------------------------------------------------------


async def test_a_broken_connection_charges_what_was_in_hand_alone(
    client: tidemark.Client, connect: Connect
) -> None:
    """K1, V8: the rest of the same run waited in the buffer."""
    lost = await connect("lost", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS)

    async with lost.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        await take(deliveries, 1)
        await gone(lost)

        assert await attempts(client) == [1] + [0] * 9


async def test_of_a_quick_handler_too_only_what_was_in_hand_is_charged_a_second_time(
    client: tidemark.Client, connect: Connect
) -> None:
    """K1: a message that failed before is reported when a task takes it, and not earlier."""
    lost = await connect("lost", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS)
    await fail_once(client)

    async with lost.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        await take(deliveries, 4)
        await gone(lost)

        assert await attempts(client) == [2] * 4 + [1] * 6


async def test_a_broken_connection_charges_the_message_of_each_task(
    client: tidemark.Client, connect: Connect
) -> None:
    """K1, K2."""
    lost = await connect("lost", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS)
    await fail_once(client)

    async with lost.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        await in_time(asyncio.gather(*(anext(deliveries) for _ in range(4))))
        await gone(lost)

        assert await attempts(client) == [2] * 4 + [1] * 6


async def test_a_broken_connection_charges_the_message_of_each_thread(
    client: tidemark.Client, local: LocalBroker
) -> None:
    """K1, K2: the same for the blocking client."""
    await publish(client, QUEUE, *PAYLOADS)
    await fail_once(client)

    def hold_four() -> None:
        blocking = tidemark.sync.connect(local.address, client_id="lost", clock=ManualClock())
        with blocking, blocking.subscribe([QUEUE], credit=MESSAGES) as deliveries:
            threads = [threading.Thread(target=next, args=(iter(deliveries),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            blocking._loop.run(gone(blocking._client))

    await in_time(asyncio.to_thread(hold_four))

    assert await attempts(client) == [2] * 4 + [1] * 6


async def test_a_broken_connection_charges_batches_that_were_taken_whole(
    client: tidemark.Client, connect: Connect
) -> None:
    """K1, K2: the next batch waited in the buffer."""
    lost = await connect("lost", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS[:4])
    await publish(client, QUEUE, *PAYLOADS[4:])

    async with (
        lost.subscribe([QUEUE], credit=MESSAGES) as deliveries,
        aclosing(deliveries.batches()) as batches,
    ):
        batch = await in_time(anext(batches))
        await gone(lost)

        assert len(batch) == 4
        assert await attempts(client) == [1] * 4 + [0] * 6


async def test_a_task_that_gave_up_waiting_charges_nothing(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: a message that arrives later was never asked for."""
    lost = await connect("lost", clock=clock)
    async with lost.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        waiting = asyncio.create_task(anext(deliveries))
        await pass_time(clock, 1_000, lost)
        waiting.cancel()
        for _ in range(4):
            await pass_time(clock, 500, lost)

        await publish(client, QUEUE, b"1")
        await until_held(client, 1)
        await gone(lost)

        assert await attempts(client, 1) == [0]


async def until_held(client: tidemark.Client, messages: int) -> None:
    async def held() -> bool:
        groups = await client.admin.list_groups(QUEUE)
        return sum(group.inflight for group in groups) == messages

    await until(held)


# --- a client that stands still -----------------------------------------------------------------


async def test_what_runs_out_in_the_buffer_of_a_frozen_client_costs_no_attempt(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, V2: what runs out in hand does."""
    frozen = await connect("frozen", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS)

    async with frozen.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        await take(deliveries, 1)
        await pass_time(clock, 2 * VISIBILITY_MS, client)
        await gone(frozen)

        assert await attempts(client) == [1] + [0] * 9


async def test_a_frozen_client_is_not_given_what_has_run_out_meanwhile(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, V2: its own clock does not show it. What it gets was delivered again."""
    await client.admin.update_topic("orders", {"retry_place": "first"})
    frozen = await connect("frozen", clock=ManualClock())
    await publish(client, QUEUE, *PAYLOADS)

    async with frozen.subscribe([QUEUE], credit=MESSAGES) as deliveries:
        await take(deliveries, 1)
        await pass_time(clock, 2 * VISIBILITY_MS, client)

        (again,) = await take(deliveries, 1)

        assert (again.payload, again.attempt) == (PAYLOADS[0], 1)
        await in_time(again.ack(wait=True))


# --- a client that works ------------------------------------------------------------------------


async def test_a_handler_may_take_many_times_the_visibility_timeout(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: its message is renewed, and what waits behind it is not charged for that."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1", b"2")

    async with slow.subscribe([QUEUE], credit=2) as deliveries:
        (first,) = await take(deliveries, 1)
        await pass_time(clock, 10 * VISIBILITY_MS, slow)
        await in_time(first.ack(wait=True))
        (second,) = await take(deliveries, 1)

    assert (first.attempt, second.payload, second.attempt) == (0, b"2", 0)


async def test_a_message_in_hand_goes_back_as_a_failed_attempt_after_its_lease(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: `max_lease_ms`; the handler that settles it later gets an error."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE], max_lease_ms=3 * VISIBILITY_MS) as deliveries:
        (first,) = await take(deliveries, 1)
        await pass_time(clock, 2 * VISIBILITY_MS, slow)
        (group,) = await client.admin.list_groups(QUEUE)
        await pass_time(clock, 2 * VISIBILITY_MS, slow)
        (again,) = await take(deliveries, 1)

        assert (group.inflight, again.payload, again.attempt) == (1, b"1", 1)
        with pytest.raises(ReservationExpired):
            await in_time(first.ack(wait=True))


async def test_a_lease_is_never_shorter_than_the_visibility_timeout(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE], max_lease_ms=1) as deliveries:
        (first,) = await take(deliveries, 1)
        await pass_time(clock, VISIBILITY_MS * 3 // 4, slow)

        await in_time(first.ack(wait=True))


async def test_an_extension_outlasts_the_lease(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, V6: the application knows best."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE], max_lease_ms=VISIBILITY_MS) as deliveries:
        (first,) = await take(deliveries, 1)
        await first.extend(10 * VISIBILITY_MS)
        await pass_time(clock, 5 * VISIBILITY_MS, slow)

        await in_time(first.ack(wait=True))


async def test_what_was_extended_by_little_is_renewed_before_that_is_over(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: `extend` gives a reservation a deadline; the client goes on renewing it."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE]) as deliveries:
        (first,) = await take(deliveries, 1)
        await first.extend(VISIBILITY_MS // 5)
        await pass_time(clock, 2 * VISIBILITY_MS, slow)

        await in_time(first.ack(wait=True))


async def test_without_a_lease_what_is_in_hand_runs_out_and_the_rest_is_untried(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, V2: `max_lease_ms=0`."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, *PAYLOADS)

    async with slow.subscribe([QUEUE], credit=MESSAGES, max_lease_ms=0) as deliveries:
        await take(deliveries, 1)
        await pass_time(clock, VISIBILITY_MS * 5 // 4, slow)
        again = await take(deliveries, MESSAGES)

    assert sorted((each.offset, each.attempt) for each in again) == [
        (0, 1),
        *((offset, 0) for offset in range(1, MESSAGES)),
    ]


async def test_other_consumers_get_what_a_slow_one_does_not_come_to(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: untried, within seconds, although the slow one had credit for all of it."""
    slow, quick = await connect("slow", clock=clock), await connect("quick", clock=clock)
    await publish(client, QUEUE, *PAYLOADS)

    async with slow.subscribe([QUEUE]) as to_slow:
        await take(to_slow, 1)
        await until_held(client, MESSAGES)
        async with quick.subscribe([QUEUE], credit=MESSAGES) as to_quick:
            for _ in range(16):
                await pass_time(clock, 500, slow, quick)
            got = await take(to_quick, MESSAGES - 2)

    assert {each.attempt for each in got} == {0}


async def test_what_has_waited_for_a_minute_goes_back_whatever_the_credit(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: a stuck application keeps what it was given; it gets more when it asks again."""
    stuck, quick = await connect("stuck", clock=clock), await connect("quick", clock=clock)
    await publish(client, QUEUE, *PAYLOADS)

    async with stuck.subscribe([QUEUE], credit=500) as to_stuck:
        await take(to_stuck, 1)
        await until_held(client, MESSAGES)
        async with quick.subscribe([QUEUE], credit=500) as to_quick:
            await pass_time(clock, 64_000, stuck, quick)
            got = await take(to_quick, MESSAGES - 1)
        await publish(client, QUEUE, b"more")
        (more,) = await take(to_stuck, 1)

    assert [(each.offset, each.attempt) for each in got] == [(n, 0) for n in range(1, MESSAGES)]
    assert more.attempt <= 1


# --- what happens meanwhile ---------------------------------------------------------------------


async def test_a_takeover_charges_neither_what_was_in_hand_nor_what_was_buffered(
    client: tidemark.Client, connect: Connect
) -> None:
    """K1, V8, E9."""
    heir = await connect("heir", clock=ManualClock())
    await publish(client, OWN, *PAYLOADS)

    async with client.subscribe([OWN], credit=MESSAGES) as mine:
        await take(mine, 1)
        async with heir.subscribe([OWN], credit=MESSAGES) as inherited:
            got = await take(inherited, MESSAGES)

    assert [(each.payload, each.attempt) for each in got] == [(each, 0) for each in PAYLOADS]


async def test_a_restart_of_the_broker_charges_nothing(
    client: tidemark.Client, connect: Connect, local: LocalBroker, clock: ManualClock
) -> None:
    """K1, V8: what was buffered comes again, and so does what was in hand."""
    await publish(client, QUEUE, *PAYLOADS)

    async with client.subscribe([QUEUE], credit=2 * MESSAGES) as deliveries:
        await take(deliveries, 1)
        stopping = asyncio.create_task(local.stop_broker())

        async def stopped() -> bool:
            await clock.advance_ms(100)
            return stopping.done()

        await until(stopped)
        await local.start_broker()
        again = await take(deliveries, MESSAGES)

    assert sorted((each.offset, each.attempt) for each in again) == [
        (offset, 0) for offset in range(MESSAGES)
    ]


async def test_what_is_refused_to_be_renewed_is_not_handed_out(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1: its queue was deleted under the buffer."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1", b"2")

    async with slow.subscribe([QUEUE], credit=10) as deliveries:
        await take(deliveries, 1)
        await client.admin.delete_queue(QUEUE)
        await pass_time(clock, VISIBILITY_MS * 3 // 4, slow)
        await publish(client, QUEUE, b"3")

        assert [each.payload for each in await take(deliveries, 1)] == [b"3"]


async def test_slow_consumers_handle_everything_at_its_first_attempt(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, V8: three handlers of a second each, three attempts, far more than fits a timeout.

    Without it, most messages run out in buffers until their attempts are exhausted.
    """
    await client.create_topic("jobs", max_attempts=3, visibility_timeout_ms=4_000)
    payloads = [b"%d" % number for number in range(60)]
    await publish(client, "jobs/a", *payloads)
    handled: list[tuple[bytes, int]] = []
    workers = [await connect(f"worker-{number}", clock=clock) for number in range(3)]

    async def work(worker: tidemark.Client) -> None:
        async with worker.subscribe(["jobs/a"]) as deliveries:
            async for delivery in deliveries:
                await clock.sleep_ms(1_000)
                handled.append((delivery.payload, delivery.attempt))
                await delivery.ack()

    working = [asyncio.create_task(work(worker)) for worker in workers]

    async def all_settled() -> bool:
        await pass_time(clock, 250, *workers)
        return (await client.admin.get_queue("jobs/a")).queue.messages == 0

    await until(all_settled)
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)

    assert sorted(handled) == sorted((payload, 0) for payload in payloads)


async def test_a_slow_owner_handles_everything_in_order(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, K2, S2: it gives nothing back, because nothing else may consume its queue."""
    payloads = [b"%d" % number for number in range(40)]
    for start in range(0, len(payloads), 5):
        await publish(client, OWN, *payloads[start : start + 5])
    slow = await connect("slow", clock=clock)
    handled: list[bytes] = []

    async def work() -> None:
        async with slow.subscribe([OWN]) as deliveries:
            async for delivery in deliveries:
                await clock.sleep_ms(1_000)
                handled.append(delivery.payload)
                await delivery.ack()

    working = asyncio.create_task(work())

    async def all_handled() -> bool:
        await pass_time(clock, 250, slow)
        return len(handled) == len(payloads)

    await until(all_handled)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)

    assert handled == payloads
