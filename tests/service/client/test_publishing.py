"""Publishing with the SDK: gathered, bounded, refused one by one, repeated safely."""

import asyncio
import copy
import pickle

import pytest

import tidemark
from tests.service.client.conftest import Connect, until_disconnected
from tests.support.local_broker import LocalBroker, in_time, until
from tidemark import limits
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import (
    BatchTooLarge,
    ClientClosed,
    DeadlineExceeded,
    HeadersTooLarge,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    QueueFull,
    SequenceConflict,
    TopicExists,
    TopicNotFound,
    Unavailable,
)
from tidemark.names import partition_of

QUEUE = "orders/a"


async def stored(client: tidemark.Client, lmq_name: str = QUEUE) -> list[bytes]:
    payloads: list[bytes] = []
    while pulled := (await client.pull(lmq_name, max_messages=10_000)).payloads:
        payloads += pulled
    return payloads


async def test_a_message_comes_back_as_it_was_published(client: tidemark.Client) -> None:
    """S1."""
    publisher = await client.publisher(QUEUE)

    receipt = await publisher.publish(b"hello", headers={"kind": "greeting"}, fairness_key="a")
    (delivery,) = await client.pull(QUEUE)

    assert (receipt.lmq_name, receipt.offset, receipt.messages) == (QUEUE, 0, 1)
    assert (delivery.payload, delivery.headers) == (b"hello", {"kind": "greeting"})
    assert (delivery.lmq_name, delivery.offset, delivery.fairness_key) == (QUEUE, 0, "a")
    assert (delivery.attempt, delivery.epoch, delivery.group) == (0, 0, "default")


async def test_concurrent_publishes_keep_the_order_of_their_calls(client: tidemark.Client) -> None:
    """S2: gathered into few runs, each call with the offset of its own message."""
    publisher = await client.publisher(QUEUE)
    payloads = [b"%d" % number for number in range(500)]

    receipts = await in_time(asyncio.gather(*(publisher.publish(each) for each in payloads)))
    pulled = await client.pull(QUEUE, max_messages=10_000)

    assert [receipt.offset for receipt in receipts] == list(range(500))
    assert pulled.payloads == payloads
    assert len(pulled.batches) < 10, "hundreds of calls became a few runs"


async def test_many_messages_become_one_run(client: tidemark.Client) -> None:
    publisher = await client.publisher(QUEUE)

    receipts = await publisher.publish_many(
        [b"one", b"two", tidemark.Message(b"three", headers={"n": "3"})]
    )
    pulled = await client.pull(QUEUE)

    assert [(receipt.offset, receipt.messages) for receipt in receipts] == [(0, 3)]
    assert [(each.payload, each.headers) for each in pulled] == [
        (b"one", {}),
        (b"two", {}),
        (b"three", {"n": "3"}),
    ]


async def test_more_than_a_run_holds_becomes_several(client: tidemark.Client) -> None:
    """S3."""
    publisher = await client.publisher(QUEUE)

    by_count = await publisher.publish_many([b""] * (limits.RUN_MESSAGES_MAX + 1))
    by_bytes = await publisher.publish_many([bytes(limits.MESSAGE_BYTES_MAX)] * 4)

    assert [receipt.messages for receipt in by_count] == [limits.RUN_MESSAGES_MAX, 1]
    assert [receipt.messages for receipt in by_bytes] == [3, 1]
    assert await publisher.publish_many([]) == []


async def test_what_can_never_be_stored_is_refused_before_it_meets_others(
    client: tidemark.Client,
) -> None:
    """S3: at the limit it is stored, one past it only its own call fails."""
    publisher = await client.publisher(QUEUE)
    largest = bytes(limits.MESSAGE_BYTES_MAX)
    headers = {str(number): "" for number in range(limits.HEADERS_COUNT_MAX)}

    results = await asyncio.gather(
        publisher.publish(b"before"),
        publisher.publish(largest + b"!"),
        publisher.publish(b"", headers={**headers, "one": "more"}),
        publisher.publish(b"", headers={"k": "v" * limits.HEADERS_BYTES_MAX}),
        publisher.publish(b"", fairness_key=" "),
        publisher.publish(b"", delay_ms=limits.DELAY_MS_MAX + 1),
        publisher.publish(b"", ttl_ms=0),
        publisher.publish(b"", sequence=1),
        publisher.publish("text"),  # type: ignore[arg-type]
        publisher.publish(largest, headers=headers),
        return_exceptions=True,
    )

    refusals = [type(result) for result in results[1:-1]]
    assert refusals == [
        MessageTooLarge,
        HeadersTooLarge,
        HeadersTooLarge,
        InvalidName,
        *[InvalidArgument] * 4,
    ]
    assert await stored(client) == [b"before", largest]


async def test_a_full_queue_takes_what_fits_of_a_gathered_run(client: tidemark.Client) -> None:
    """S3: no call is refused for what a neighbour sent."""
    await client.create_topic("small", queue_messages_max=3)
    publisher = await client.publisher("small/a")

    results = await in_time(
        asyncio.gather(
            *(publisher.publish(b"%d" % number) for number in range(10)), return_exceptions=True
        )
    )

    refused = [result for result in results if isinstance(result, BaseException)]
    assert len(refused) == 7
    assert all(isinstance(each, QueueFull) for each in refused)
    assert len(await stored(client, "small/a")) == 3


async def test_calls_of_a_refused_run_are_not_stored_behind_a_later_run(
    client: tidemark.Client,
) -> None:
    """S2: they would fit, one by one, but something newer of their lane is stored."""
    await client.create_topic("small", queue_messages_max=3)
    publisher = await client.publisher("small/a")

    *refused, later = await in_time(
        asyncio.gather(
            *(publisher.publish(b"%d" % number) for number in range(4)),
            publisher.publish(b"later", ttl_ms=60_000),
            return_exceptions=True,
        )
    )

    assert [type(each) for each in refused] == [QueueFull] * 4
    assert isinstance(later, tidemark.PublishReceipt)
    assert await stored(client, "small/a") == [b"later"]


async def test_an_unknown_topic_is_told_when_the_publisher_is_made(client: tidemark.Client) -> None:
    with pytest.raises(TopicNotFound):
        await client.publisher("nowhere/a")

    with pytest.raises(InvalidName):
        await client.publisher("/")


async def test_a_topic_is_created_once_and_only_with_settings_that_exist(
    client: tidemark.Client,
) -> None:
    with pytest.raises(TopicExists):
        await client.create_topic("orders", max_attempts=3)
    with pytest.raises(InvalidArgument, match="max_atempts"):
        await client.create_topic("more", max_atempts=3)
    with pytest.raises(InvalidArgument):
        await client.create_topic("more", subscription="private")


async def test_a_delayed_message_is_scheduled(client: tidemark.Client) -> None:
    publisher = await client.publisher(QUEUE)

    receipt = await publisher.publish(b"later", delay_ms=3_600_000)

    assert receipt.schedule_id
    assert await stored(client) == []


async def test_a_broker_that_restarts_delays_a_publish_and_does_not_double_it(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """S11."""
    publisher = await client.publisher(QUEUE)
    await publisher.publish(b"before")
    await local.stop_broker()

    waiting = [asyncio.create_task(publisher.publish(b"%d" % number)) for number in range(20)]
    await SystemClock().sleep_ms(0)
    await local.start_broker()
    await in_time(asyncio.gather(*waiting))

    assert await stored(client) == [b"before", *(b"%d" % number for number in range(20))]


async def test_storage_that_restarts_delays_a_publish_and_does_not_double_it(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """S11, S2."""
    publisher = await client.publisher(QUEUE)
    await publisher.publish(b"before")
    await local.stop_storage()

    waiting = [asyncio.create_task(publisher.publish(b"%d" % number)) for number in range(20)]
    await SystemClock().sleep_ms(0)
    await local.start_storage()
    await in_time(asyncio.gather(*waiting))

    assert await stored(client) == [b"before", *(b"%d" % number for number in range(20))]


async def test_a_publish_that_lasts_too_long_says_what_is_known_of_it(
    local: LocalBroker, client: tidemark.Client, connect: Connect
) -> None:
    """The outcome is unknown once it was sent, and not before."""
    clock = ManualClock()
    hasty = await connect("hasty", publish_timeout_ms=300, clock=clock)
    publisher = await hasty.publisher(QUEUE)
    await publisher.publish(b"stored")
    await local.stop_storage()

    sent = asyncio.create_task(publisher.publish(b"sent"))
    await until_refused(hasty, partition_of(QUEUE, local.partitions))
    with pytest.raises(DeadlineExceeded, match="unknown") as unknown:
        await passing(clock, sent)
    await local.stop_broker()
    await until_disconnected(hasty)
    with pytest.raises(DeadlineExceeded, match="was not stored") as not_sent:
        await passing(clock, asyncio.create_task(publisher.publish(b"not sent")))

    assert unknown.value.metadata["outcome"] == "unknown"
    assert not_sent.value.metadata["outcome"] == "not_sent"


async def until_refused(client: tidemark.Client, partition: int) -> None:
    """What was sent has come to the broker, which cannot store it."""

    async def refused() -> bool:
        return not client._publish_buffer.serves(partition)

    await until(refused)


async def passing(clock: ManualClock, publish: "asyncio.Task[object]") -> None:
    """Let the time of the client pass until a publish has ended; raises why."""

    async def ended() -> bool:
        await clock.advance_ms(20)
        return publish.done()

    await until(ended)
    await publish


async def test_a_publisher_waits_while_too_much_is_under_way(
    local: LocalBroker, client: tidemark.Client, connect: Connect
) -> None:
    """Bounded buffering: calls that wait for room fail after the same time."""
    small = await connect("small", buffer_bytes_max=1_000, publish_timeout_ms=300)
    publisher = await small.publisher(QUEUE)
    await local.stop_broker()

    results = await in_time(
        asyncio.gather(*(publisher.publish(bytes(600)) for _ in range(5)), return_exceptions=True)
    )

    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert small._publish_buffer._bytes == 0


async def test_a_program_that_repeats_its_publishes_stores_them_once(
    client: tidemark.Client, connect: Connect
) -> None:
    """S11: over restarts of the program, by a producer id and sequences of its own."""
    first = await connect("importer", producer_id="import-7")
    await (await first.publisher(QUEUE)).publish_many([b"a", b"b"], sequence=1)
    await first.close()

    again = await connect("importer", producer_id="import-7")
    publisher = await again.publisher(QUEUE)
    (repeated,) = await publisher.publish_many([b"a", b"b"], sequence=1)
    fresh = await publisher.publish(b"c", sequence=2)

    assert (repeated.offset, repeated.duplicate) == (0, True)
    assert (fresh.offset, fresh.duplicate) == (2, False)
    with pytest.raises(SequenceConflict):
        await publisher.publish(b"another", sequence=2)
    with pytest.raises(InvalidArgument):
        await publisher.publish(b"unnumbered")
    with pytest.raises(BatchTooLarge):
        await publisher.publish_many([b""] * (limits.RUN_MESSAGES_MAX + 1), sequence=3)


async def test_more_queues_than_the_window_of_sequences_are_published_to_at_once(
    client: tidemark.Client,
) -> None:
    """S11: no run may fall out of the window that storage remembers while it is unanswered."""
    publisher = await client.publisher(QUEUE)
    keys = [f"key-{number}" for number in range(3 * limits.PRODUCER_SEQUENCES_MAX)]

    receipts = await in_time(
        asyncio.gather(*(publisher.publish(b"x", fairness_key=key) for key in keys))
    )

    assert sorted(receipt.offset for receipt in receipts) == list(range(len(keys)))


async def test_a_cancelled_publish_harms_no_other(client: tidemark.Client) -> None:
    publisher = await client.publisher(QUEUE)

    tasks = [asyncio.create_task(publisher.publish(b"%d" % number)) for number in range(3)]
    await SystemClock().sleep_ms(0)
    tasks[1].cancel()
    results = await in_time(asyncio.gather(*tasks, return_exceptions=True))

    assert isinstance(results[1], asyncio.CancelledError)
    assert [await stored(client)][0][0] == b"0"
    assert not isinstance(results[2], BaseException)


async def test_a_publish_that_is_cancelled_before_it_was_sent_is_not_stored(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """A caller that gave up and tries again would store it twice."""
    publisher = await client.publisher(QUEUE)
    await local.stop_broker()
    await until_disconnected(client)
    calls = [asyncio.create_task(publisher.publish(b"%d" % number)) for number in range(4)]

    async def all_wait() -> bool:
        return sum(len(lane.waiting) for lane in client._publish_buffer._lanes.values()) == len(
            calls
        )

    await until(all_wait)
    calls[1].cancel()
    await asyncio.wait({calls[1]})
    await local.start_broker()
    await in_time(asyncio.gather(*calls, return_exceptions=True))

    assert await stored(client) == [b"0", b"2", b"3"]


async def test_a_publisher_cannot_be_copied(client: tidemark.Client) -> None:
    """I7."""
    publisher = await client.publisher(QUEUE)

    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="second one"):
            copied(publisher)


async def test_nothing_can_be_done_with_a_closed_client(client: tidemark.Client) -> None:
    publisher = await client.publisher(QUEUE)

    await client.close()

    for use in (publisher.publish(b""), client.publisher(QUEUE), client.pull(QUEUE)):
        with pytest.raises(ClientClosed):
            await use
    with pytest.raises(ClientClosed):
        client.subscribe([QUEUE])
    await client.close()


async def test_a_broker_that_is_not_there_is_told_in_time() -> None:
    client = tidemark.connect(["127.0.0.1:1", "127.0.0.1:2"], connect_timeout_ms=300)

    with pytest.raises(Unavailable, match="no broker at"):
        await in_time(client.__aenter__())


async def test_the_next_address_is_tried_when_one_does_not_answer(
    local: LocalBroker, client: tidemark.Client, connect: Connect
) -> None:
    several = await in_time(connect("several", address=["127.0.0.1:1", local.address]))

    await (await several.publisher(QUEUE)).publish(b"arrived")

    assert await stored(client) == [b"arrived"]
