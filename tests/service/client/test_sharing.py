"""Several tasks or threads take from one subscription: each message once, in turn (K2)."""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time
from tidemark.client.consume.feed import Feed
from tidemark.clock import SystemClock

pytestmark = pytest.mark.slow

QUEUE, OWN = "orders/a", "own/a"
WORKERS, MESSAGES = 4, 100
PAYLOADS = [b"%d" % number for number in range(MESSAGES)]


async def publish(client: tidemark.Client, lmq_name: str, *payloads: bytes) -> None:
    await (await client.publisher(lmq_name)).publish_many(payloads)


def in_tasks(work: Callable[[int], Awaitable[None]]) -> "list[asyncio.Task[None]]":
    async def begin(number: int) -> None:
        await work(number)

    return [asyncio.create_task(begin(number)) for number in range(WORKERS)]


async def all_waiting() -> None:
    """Every task has come as far as it can."""
    for _ in range(WORKERS * 3):
        await SystemClock().sleep_ms(0)


async def left(client: tidemark.Client) -> list[tuple[bytes, int]]:
    """What is ready, and how often it failed."""
    return [(each.payload, each.attempt) for each in await client.pull(QUEUE, wait_ms=500)]


async def test_a_single_run_is_shared_evenly_by_four_tasks(client: tidemark.Client) -> None:
    """K2: the run is handed out message by message, in its order, to each task in turn."""
    handled: list[tuple[int, bytes]] = []
    done = asyncio.Event()

    async with client.subscribe([QUEUE]) as deliveries:

        async def work(number: int) -> None:
            async for delivery in deliveries:
                handled.append((number, delivery.payload))
                await delivery.ack()
                if len(handled) == MESSAGES:
                    done.set()

        tasks = in_tasks(work)
        await all_waiting()
        await publish(client, QUEUE, *PAYLOADS)
        await in_time(done.wait())

    await in_time(asyncio.gather(*tasks))
    assert [payload for _, payload in handled] == PAYLOADS
    assert Counter(number for number, _ in handled) == dict.fromkeys(range(WORKERS), 25)
    assert await left(client) == []


async def test_four_runs_reach_four_tasks_and_nothing_is_stranded(client: tidemark.Client) -> None:
    """K2: each task holds one message while all the others hold theirs, round by round."""
    handled: list[bytes] = []
    done = asyncio.Event()
    together = asyncio.Barrier(WORKERS)

    async with client.subscribe([QUEUE]) as deliveries:

        async def work(_: int) -> None:
            async for delivery in deliveries:
                handled.append(delivery.payload)
                await together.wait()
                await delivery.ack()
                if len(handled) == MESSAGES:
                    done.set()

        tasks = in_tasks(work)
        for start in range(0, MESSAGES, 25):
            await publish(client, QUEUE, *PAYLOADS[start : start + 25])
        await in_time(done.wait())
        await in_time(deliveries.flush())

    await in_time(asyncio.gather(*tasks))
    assert handled == PAYLOADS
    assert await left(client) == []


async def test_batches_and_single_messages_can_be_taken_side_by_side(
    client: tidemark.Client,
) -> None:
    """K2: a batch that others have begun is the rest of it."""
    await publish(client, QUEUE, *PAYLOADS)

    async with (
        client.subscribe([QUEUE], credit=MESSAGES) as deliveries,
        aclosing(deliveries.batches()) as batches,
    ):
        one, two = await in_time(anext(deliveries)), await in_time(anext(deliveries))
        rest = await in_time(anext(batches))
        await one.nack(60_000)
        await rest[0].nack(60_000)
        await rest.ack()
        await deliveries.flush()

        assert (one.offset, two.offset, rest.offset) == (0, 1, 2)
        assert (len(rest), rest.payloads) == (98, PAYLOADS[2:])
        assert [each.offset for each in rest] == list(range(2, 100))
    assert await left(client) == [(b"1", 1)], "in hand, neither acked nor part of the rest"


async def test_a_task_that_gives_up_waiting_takes_no_message_with_it(
    client: tidemark.Client,
) -> None:
    """K2: also if it is cancelled in the very step in which a message arrives."""
    async with client.subscribe([QUEUE]) as deliveries:
        waiting = [asyncio.create_task(anext(deliveries)) for _ in range(WORKERS)]
        await all_waiting()
        arrived = deliveries.arrived

        def arrived_and_cancelled(feed: Feed, batches: Sequence[tidemark.DeliveryBatch]) -> None:
            arrived(feed, batches)
            waiting[0].cancel()
            waiting[2].cancel()

        deliveries.arrived = arrived_and_cancelled  # type: ignore[method-assign]
        await publish(client, QUEUE, b"one", b"two")
        given = await in_time(asyncio.gather(*waiting, return_exceptions=True))

    payloads = [each.payload for each in given if isinstance(each, tidemark.Delivery)]
    assert payloads == [b"one", b"two"]
    assert [isinstance(each, asyncio.CancelledError) for each in given] == [True, False] * 2


async def test_closing_a_subscription_ends_the_loop_of_every_task(client: tidemark.Client) -> None:
    """K2."""
    async with client.subscribe([QUEUE]) as deliveries:
        ended: list[int] = []

        async def work(number: int) -> None:
            async for _ in deliveries:
                pass
            async for _ in deliveries.batches():
                pass
            ended.append(number)

        tasks = in_tasks(work)
        await all_waiting()

    await in_time(asyncio.gather(*tasks))
    assert sorted(ended) == list(range(WORKERS))


async def test_an_eviction_ends_the_loop_of_every_task(
    client: tidemark.Client, connect: Connect
) -> None:
    """K2, E1."""
    bob = await connect("bob")
    async with client.subscribe([OWN]) as mine:

        async def work(_: int) -> None:
            async for delivery in mine:
                await delivery.ack()

        tasks = in_tasks(work)
        await all_waiting()
        async with bob.subscribe([OWN]):
            await in_time(asyncio.gather(*tasks))

    assert mine.lmq_names == []


async def test_waiting_tasks_go_on_after_a_reconnect(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """K2: what had arrived and was not handed out comes again, once."""
    await publish(client, QUEUE, *PAYLOADS[:50])
    handled: list[bytes] = []
    done = asyncio.Event()

    async with client.subscribe([QUEUE]) as deliveries:
        (first,) = [await in_time(anext(deliveries))]
        await first.ack()
        await in_time(deliveries.flush())
        await local.stop_broker()
        await local.start_broker()

        async def work(_: int) -> None:
            async for delivery in deliveries:
                handled.append(delivery.payload)
                await delivery.ack()
                if len(handled) == MESSAGES - 1:
                    done.set()

        tasks = in_tasks(work)
        await publish(client, QUEUE, *PAYLOADS[50:])
        await in_time(done.wait())
        await in_time(deliveries.flush())

    await in_time(asyncio.gather(*tasks))
    assert sorted([first.payload, *handled]) == sorted(PAYLOADS)
    assert await left(client) == []


async def test_closing_the_client_ends_the_loop_of_every_task(local: LocalBroker) -> None:
    """K2."""
    async with tidemark.connect(local.address, client_id="bob") as bob:
        await bob.create_topic("orders")
        deliveries = await bob.subscribe([QUEUE]).__aenter__()
        waiting = [asyncio.ensure_future(anext(deliveries, None)) for _ in range(WORKERS)]
        await all_waiting()

    assert await in_time(asyncio.gather(*waiting)) == [None] * WORKERS


async def test_four_threads_share_a_subscription_of_the_blocking_client(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """K2: each thread holds one message while all the others hold theirs, round by round."""

    def script() -> tuple[list[bytes], list[int]]:
        handled: list[bytes] = []
        shares = [0] * WORKERS
        together = threading.Barrier(WORKERS, timeout=60)
        done = threading.Event()
        with (
            tidemark.sync.connect(local.address, client_id="pool") as pool,
            pool.subscribe([QUEUE]) as deliveries,
        ):

            def work(number: int) -> None:
                for delivery in deliveries:
                    handled.append(delivery.payload)
                    shares[number] += 1
                    together.wait()
                    delivery.ack()
                    if len(handled) == MESSAGES:
                        done.set()

            threads = [threading.Thread(target=work, args=(each,)) for each in range(WORKERS)]
            for thread in threads:
                thread.start()
            pool.publisher(QUEUE).publish_many(PAYLOADS)
            assert done.wait(60)
            deliveries.flush()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return handled, shares

    handled, shares = await in_time(asyncio.to_thread(script))

    assert sorted(handled) == sorted(PAYLOADS)
    assert shares == [25] * WORKERS
    assert await left(client) == []


async def test_threads_take_batches_side_by_side(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """K2."""

    def script() -> list[bytes]:
        handled: list[bytes] = []
        done = threading.Event()
        with (
            tidemark.sync.connect(local.address, client_id="pool") as pool,
            pool.subscribe([QUEUE]) as deliveries,
        ):

            def work() -> None:
                for batch in deliveries.batches():
                    handled.extend(batch.payloads)
                    batch.ack()
                    if len(handled) == MESSAGES:
                        done.set()

            threads = [threading.Thread(target=work) for _ in range(WORKERS)]
            for thread in threads:
                thread.start()
            for payload in PAYLOADS:
                pool.publisher(QUEUE).publish(payload)
            assert done.wait(60)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return handled

    assert sorted(await in_time(asyncio.to_thread(script))) == sorted(PAYLOADS)
    assert await left(client) == []


INTERRUPTED = """
import signal, sys, threading
import tidemark.sync

class Interrupting:
    '''The subscription, while the main thread is interrupted as its message is being handed over'''
    def __init__(self, subscription):
        self.subscription = subscription
    def __aiter__(self):
        return self
    async def __anext__(self):
        delivery = await anext(self.subscription)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return delivery

with tidemark.sync.connect(sys.argv[1]) as client:
    with client.subscribe([sys.argv[2]]) as deliveries:
        subscription = deliveries._subscription
        deliveries._subscription = Interrupting(subscription)
        try:
            next(deliveries)
        except KeyboardInterrupt:
            deliveries._subscription = subscription
            again = next(deliveries)
            print(again.payload.decode(), again.attempt)
            again.ack()
"""


async def test_an_interrupted_thread_takes_no_message_with_it(
    local: LocalBroker, client: tidemark.Client, tmp_path: Path
) -> None:
    """K2: ctrl-C in a notebook, and the next loop gets the message."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    await publish(client, QUEUE, b"one")

    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), local.address, QUEUE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await in_time(process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert output == b"one 0\n"
