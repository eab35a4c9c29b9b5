"""The blocking client: the same surface, from threads, closed cleanly."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import tidemark
from tests.support.local_broker import LocalBroker, in_time
from tidemark.errors import ClientClosed, InvalidArgument, TopicNotFound, Unavailable

QUEUE = "orders/a"


@pytest.fixture
async def address(local: LocalBroker) -> str:
    """The broker lives on the loop of the test, so blocking calls go to threads."""
    await local.create_topic()
    return local.address


async def test_a_script_publishes_consumes_and_settles(address: str) -> None:
    def script() -> tuple[list[bytes], list[bytes]]:
        with tidemark.sync.connect(address, client_id="script") as client:
            client.create_topic("more", max_attempts=3)
            for lmq_name in ("orders/loop", "orders/batches", "orders/pull"):
                publisher = client.publisher(lmq_name)
                publisher.publish(b"one", headers={"n": "1"})
                publisher.publish_many(payload for payload in (b"two", b"three", b"four"))
            looped: list[bytes] = []
            batched: list[bytes] = []
            with client.subscribe(["orders/loop"]) as deliveries:
                for delivery in deliveries:
                    looped.append(delivery.payload)
                    delivery.ack()
                    if len(looped) == 4:
                        break
                deliveries.flush()
            with client.subscribe(["orders/batches"]) as deliveries:
                for batch in deliveries.batches():
                    batched += batch.payloads
                    batch.ack()
                    if len(batched) == 4:
                        break
            pulled = client.pull("orders/pull", wait_ms=30_000)
            (first, *_) = pulled
            assert (first.headers, first.attempt, first.offset) == ({"n": "1"}, 0, 0)
            client.settle(pulled, ack=True)
        return looped, batched

    looped, batched = await in_time(asyncio.to_thread(script))

    assert looped == batched == [b"one", b"two", b"three", b"four"]


async def test_threads_share_one_client(address: str) -> None:
    def script() -> list[int]:
        with tidemark.sync.connect(address) as client, ThreadPoolExecutor(16) as threads:
            publisher = client.publisher(QUEUE)
            receipts = threads.map(publisher.publish, [b"%d" % each for each in range(200)])
            return sorted(receipt.offset for receipt in receipts)

    assert await in_time(asyncio.to_thread(script)) == list(range(200))


async def test_use_before_and_after_is_refused_clearly(address: str) -> None:
    def script() -> None:
        client = tidemark.sync.connect(address)
        with pytest.raises(ClientClosed, match="not entered"):
            client.publisher(QUEUE)
        with client:
            publisher = client.publisher(QUEUE)
            with pytest.raises(TopicNotFound):
                client.publisher("nowhere")
        with pytest.raises(ClientClosed):
            publisher.publish(b"late")
        client.close()

    await in_time(asyncio.to_thread(script))


async def test_closing_ends_a_loop_that_waits_in_another_thread(address: str) -> None:
    """K2."""

    def script() -> list[object]:
        seen: list[object] = []
        client = tidemark.sync.connect(address)
        with client:
            waiting = threading.Event()

            def loop() -> None:
                with client.subscribe([QUEUE]) as deliveries:
                    waiting.set()
                    seen.extend(deliveries)
                seen.append("ended")

            thread = threading.Thread(target=loop)
            thread.start()
            waiting.wait()
        thread.join()
        return seen

    assert await in_time(asyncio.to_thread(script)) == ["ended"]
    assert not [thread for thread in threading.enumerate() if thread.name == "tidemark"]


@pytest.mark.parametrize("batches", [False, True])
async def test_closing_ends_a_loop_whose_thread_is_busy_meanwhile(
    address: str, *, batches: bool
) -> None:
    """K2: iteration ends, as in threads that wait; it does not raise ClientClosed."""

    def script() -> list[str]:
        handling, closed = threading.Event(), threading.Event()
        seen: list[str] = []

        def loop() -> None:
            for _ in deliveries.batches() if batches else deliveries:
                handling.set()
                closed.wait()
            seen.append("ended")

        thread = threading.Thread(target=loop)
        with (
            tidemark.sync.connect(address) as client,
            client.subscribe([QUEUE]) as deliveries,
        ):
            client.publisher(QUEUE).publish(b"one")
            thread.start()
            handling.wait()
        closed.set()
        thread.join()
        return seen

    assert await in_time(asyncio.to_thread(script)) == ["ended"]


async def test_a_callback_that_calls_the_client_is_refused_instead_of_hanging(
    address: str, local: LocalBroker
) -> None:
    await local.create_topic("own", subscription=2)
    refusals: list[BaseException] = []
    told = threading.Event()

    def script() -> None:
        with (
            tidemark.sync.connect(address, client_id="a") as one,
            tidemark.sync.connect(address, client_id="b") as two,
        ):

            def evicted(eviction: tidemark.Eviction) -> None:
                try:
                    one.publisher(eviction.lmq_name)
                except InvalidArgument as error:
                    refusals.append(error)
                told.set()

            with one.subscribe(["own/a"], on_evicted=evicted), two.subscribe(["own/a"]):
                told.wait()

    await in_time(asyncio.to_thread(script))

    assert "callback" in str(refusals[0])


async def test_a_failed_connection_leaves_no_thread() -> None:
    def script() -> None:
        with (
            pytest.raises(Unavailable),
            tidemark.sync.connect("127.0.0.1:1", connect_timeout_ms=200),
        ):
            pass

    await in_time(asyncio.to_thread(script))

    assert not [thread for thread in threading.enumerate() if thread.name == "tidemark"]
