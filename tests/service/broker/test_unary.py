"""Unary calls: publishing, pulling and settling for clients that do not stay."""

import asyncio
from typing import Any

import grpc
import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    until,
)
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Nack, Settlement
from tidemark.clock import ManualClock
from tidemark.errors import (
    InvalidArgument,
    InvalidName,
    PublisherNotFound,
    TidemarkError,
    TopicNotFound,
)

HOUR_MS = 3_600_000


async def until_waiting(local: LocalBroker, lmq_name: str = QUEUE) -> None:
    """A pull has loaded its queue; nothing else in these tests does."""

    async def is_loaded() -> bool:
        try:
            activity = (await local.queue(lmq_name)).activity
        except TidemarkError:
            return False
        return activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED

    await until(is_loaded)


async def advance_until(clock: ManualClock, task: "asyncio.Future[Any]") -> int:
    """Move time until the task is done; returns the time it took."""
    began_ms = clock.monotonic_ms()

    async def is_done() -> bool:
        await clock.advance_ms(100)
        return task.done()

    await until(is_done)
    return clock.monotonic_ms() - began_ms


async def evicted(local: LocalBroker, lmq_name: str) -> str:
    request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=lmq_name)
    outcome = (await local.topics.TryEvictInactiveQueue(request)).outcome
    return topic_pb2.EvictionOutcome.Name(outcome).removeprefix("EVICTION_OUTCOME_")


# --- pulling --------------------------------------------------------------------------------------


async def test_a_pull_that_waits_is_woken_by_a_publish(
    start: StartBroker, clock: ManualClock
) -> None:
    """Time stands still: only the publish can end the wait."""
    local = await start(clock)
    pull = asyncio.create_task(local.pull(QUEUE, wait_ms=30_000))
    await until_waiting(local)

    await local.publish(run_of(QUEUE, b"1", b"2"))

    assert payloads_of(await in_time(pull)) == [b"1", b"2"]


async def test_a_pull_without_a_wait_answers_at_once(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock)

    nothing = await in_time(local.pull(QUEUE))
    await local.publish(run_of(QUEUE, b"1"))
    something = await in_time(local.pull(QUEUE))

    assert nothing == []
    assert payloads_of(something) == [b"1"]


async def test_a_pull_waits_as_long_as_it_said_and_no_longer(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock, client_timeout_ms=1000)
    pull = asyncio.create_task(local.pull(QUEUE, wait_ms=5000))
    await until_waiting(local)

    waited_ms = await advance_until(clock, pull)

    assert await pull == []
    assert waited_ms >= 5000


async def test_a_pull_answers_before_its_call_is_cut_off(
    start: StartBroker, clock: ManualClock
) -> None:
    """A deadline of the call bounds the wait: what was reserved must not be lost with it.

    The deadline is of real time; the wait is not, so that a busy machine does not miss it.
    """
    local = await start(clock)
    request = broker_pb2.PullRequest(client_id="ada", lmq_name=QUEUE, wait_ms=60_000)
    pull = asyncio.ensure_future(local.api.Pull(request, timeout=20))
    await until_waiting(local)

    waited_ms = await advance_until(clock, pull)

    assert not (await pull).deliveries
    assert waited_ms < 60_000


async def test_two_pulls_share_a_queue_and_no_message_goes_to_both(local: LocalBroker) -> None:
    pulls = [
        asyncio.create_task(local.pull(QUEUE, client_id=client, max_messages=1, wait_ms=30_000))
        for client in ("ada", "bob")
    ]
    await until_waiting(local)

    await local.publish(run_of(QUEUE, b"1", b"2"))

    got = [payload for pull in pulls for payload in payloads_of(await in_time(pull))]
    assert sorted(got) == [b"1", b"2"]


async def test_a_pull_takes_no_more_messages_than_it_asked_for(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, *[b"%d" % number for number in range(10)]))

    first = await local.pull(QUEUE, max_messages=3)

    assert payloads_of(first) == [b"0", b"1", b"2"]
    assert (await local.queue(QUEUE)).inflight == 3


async def test_a_pull_that_was_given_up_holds_no_queue(
    start: StartBroker, clock: ManualClock
) -> None:
    """I3."""
    local = await start(clock, topic={"idle_after_ms": 1000})
    pull = asyncio.create_task(local.pull(QUEUE, wait_ms=30_000))
    await until_waiting(local)
    assert await evicted(local, QUEUE) == "ACTIVE"

    pull.cancel()

    async def released() -> bool:
        return await evicted(local, QUEUE) == "NOT_IDLE_ENOUGH"

    await until(released)


@pytest.mark.parametrize(
    "fields",
    [
        {"client_id": ""},
        {"client_id": "a\x07b"},
        {"client_id": "x" * (limits.CLIENT_ID_BYTES_MAX + 1)},
        {"group": "no\ngroup"},
        {"group": "g" * (limits.GROUP_NAME_BYTES_MAX + 1)},
        {"lmq_name": ""},
        {"lmq_name": "orders/\x00"},
    ],
    ids=str,
)
async def test_a_pull_with_a_name_that_is_not_legal_is_refused(
    local: LocalBroker, fields: dict[str, Any]
) -> None:
    """S3."""
    request = broker_pb2.PullRequest(**{"client_id": "ada", "lmq_name": QUEUE, **fields})

    with pytest.raises(InvalidName):
        await local.api.Pull(request)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("max_messages", limits.PULL_MESSAGES_MAX),
        ("wait_ms", limits.PULL_WAIT_MS_MAX),
        ("visibility_ms", limits.VISIBILITY_TIMEOUT_MS_MAX),
    ],
)
async def test_a_pull_has_limits(local: LocalBroker, field: str, most: int) -> None:
    """S3: at the limit and one past it."""
    past: dict[str, Any] = {field: most + 1}
    at: dict[str, Any] = {field: most}
    await local.publish(run_of(QUEUE, b"1"))

    with pytest.raises(InvalidArgument) as refused:
        await local.pull(QUEUE, **past)
    at_limit = await in_time(local.pull(QUEUE, **at))

    assert refused.value.metadata == {"field": field}
    assert payloads_of(at_limit) == [b"1"]


async def test_a_pull_with_a_visibility_that_is_too_short_is_refused(local: LocalBroker) -> None:
    """S3."""
    with pytest.raises(InvalidArgument):
        await local.pull(QUEUE, visibility_ms=limits.VISIBILITY_TIMEOUT_MS_MIN - 1)


async def test_a_pull_from_a_topic_that_is_not_there_is_refused(local: LocalBroker) -> None:
    with pytest.raises(TopicNotFound):
        await local.pull("nowhere/x", wait_ms=30_000)


# --- what unary clients hold ----------------------------------------------------------------------


async def test_a_unary_client_settles_by_receipt(local: LocalBroker) -> None:
    """V6."""
    await local.publish(run_of(QUEUE, b"1", b"2"))
    (delivery,) = await local.pull(QUEUE)

    acked = await local.settle(delivery.receipt, Ack(), [(0, 1)])
    nacked = await local.settle(delivery.receipt, Nack(), [(1, 2)])
    (again,) = await local.pull(QUEUE)

    assert (acked.messages, nacked.messages) == (1, 1)
    assert payloads_of([again]) == [b"2"]
    assert again.attempt_count == 1


@pytest.mark.parametrize("client_id", ["bob", "thief"])
async def test_a_unary_client_has_no_tags(local: LocalBroker, client_id: str) -> None:
    """S3: none that would settle what it happened to pull first."""
    await local.publish(run_of(QUEUE, b"1"))
    await local.pull(QUEUE, client_id="bob")
    settlement = Settlement(delivery_tag=1, ack=Ack())

    request = broker_pb2.SettleRequest(client_id=client_id, settlements=[settlement])
    (result,) = (await local.api.Settle(request)).results

    assert reason_of(result) == "UNKNOWN_DELIVERY_TAG"
    assert (await local.queue(QUEUE)).inflight == 1


async def test_a_silent_unary_client_loses_what_it_holds(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6: a heartbeat is enough to keep it."""
    local = await start(clock, client_timeout_ms=5000, topic={"visibility_timeout_ms": HOUR_MS})
    await local.publish(run_of(QUEUE, b"1"))
    (first,) = await local.pull(QUEUE)
    for _ in range(3):
        await clock.advance_ms(4000)
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="ada"))
    assert (await local.queue(QUEUE)).inflight == 1

    await clock.advance_ms(7000)

    async def is_back() -> bool:
        return (await local.queue(QUEUE)).inflight == 0

    await until(is_back)
    (second,) = await local.pull(QUEUE, client_id="bob")
    assert (first.attempt_count, second.attempt_count) == (0, 1)
    assert reason_of(await local.settle(first.receipt, Ack())) != ""


async def test_what_a_silent_client_held_goes_to_a_pull_that_waits(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6."""
    local = await start(clock, client_timeout_ms=5000, topic={"visibility_timeout_ms": HOUR_MS})
    await local.publish(run_of(QUEUE, b"1"))
    await local.pull(QUEUE)

    waiting = asyncio.create_task(local.pull(QUEUE, client_id="bob", wait_ms=60_000))
    await clock.advance_ms(7000)

    assert payloads_of(await in_time(waiting)) == [b"1"]


async def test_a_client_that_waits_for_an_answer_is_not_silent(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6."""
    local = await start(clock, client_timeout_ms=5000, topic={"visibility_timeout_ms": HOUR_MS})
    await local.publish(run_of(QUEUE, b"1"))
    (held,) = await local.pull(QUEUE)
    waiting = asyncio.create_task(local.pull("orders/other", wait_ms=20_000))
    await until_waiting(local, "orders/other")

    waited_ms = await advance_until(clock, waiting)

    assert waited_ms >= 20_000
    assert (await local.settle(held.receipt, Ack())).messages == 1


# --- publishers of unary calls --------------------------------------------------------------------


async def test_a_unary_publish_answers_each_run_in_order(local: LocalBroker) -> None:
    """S3."""
    results = await local.publish(
        run_of("orders/a", b"1"), run_of("nowhere/x", b"1"), run_of("orders/a", b"2", b"3")
    )

    assert [reason_of(each) for each in results] == ["", "TOPIC_NOT_FOUND", ""]
    assert [results[0].receipt.first_offset, results[2].receipt.first_offset] == [0, 1]


async def test_a_repeat_of_a_unary_publish_gets_the_first_answer(local: LocalBroker) -> None:
    """S11."""
    (first,) = await local.publish(run_of(QUEUE, b"1", sequence=1))

    (again,) = await local.publish(run_of(QUEUE, b"1", sequence=1))

    assert again.receipt.duplicate
    assert again.receipt.first_offset == first.receipt.first_offset


async def test_a_sequence_without_a_producer_is_refused(local: LocalBroker) -> None:
    """S3."""
    (result,) = await local.publish(run_of(QUEUE, b"1", sequence=1), client_id="")

    assert reason_of(result) == "INVALID_NAME"


async def test_a_destroyed_publisher_is_gone_and_the_next_publish_makes_another(
    local: LocalBroker,
) -> None:
    """I8."""
    (first,) = await local.publish(run_of(QUEUE, b"1"))
    request = broker_pb2.DestroyPublisherRequest(publisher_id=first.receipt.publisher_id)

    await local.api.DestroyPublisher(request)
    with pytest.raises(PublisherNotFound):
        await local.api.DestroyPublisher(request)
    (second,) = await local.publish(run_of(QUEUE, b"2"))

    assert second.receipt.publisher_id not in (0, first.receipt.publisher_id)


async def test_publishers_of_unary_calls_live_by_their_idle_timeout(
    start: StartBroker, clock: ManualClock
) -> None:
    """I5."""
    local = await start(
        clock, unary_publisher_idle_timeout_ms=5000, topic={"idle_after_ms": HOUR_MS}
    )
    for _ in range(3):
        await local.publish(run_of(QUEUE, b"in use"))
        await clock.advance_ms(4000)
        assert await evicted(local, QUEUE) == "ACTIVE"

    await clock.advance_ms(2000)

    assert await evicted(local, QUEUE) == "NOT_IDLE_ENOUGH"


@pytest.mark.parametrize("runs", [0, limits.FRAME_RUNS_MAX + 1])
async def test_a_call_has_at_least_one_run_and_at_most_so_many(
    local: LocalBroker, runs: int
) -> None:
    """S3."""
    with pytest.raises(InvalidArgument):
        await local.publish(*[run_of(QUEUE, b"")] * runs)


@pytest.mark.parametrize("settlements", [0, limits.SETTLEMENTS_PER_FRAME_MAX + 1])
async def test_a_call_has_at_least_one_settlement_and_at_most_so_many(
    local: LocalBroker, settlements: int
) -> None:
    """S3."""
    request = broker_pb2.SettleRequest(
        client_id="ada", settlements=[Settlement(receipt=b"?", ack=Ack())] * settlements
    )

    with pytest.raises(InvalidArgument):
        await local.api.Settle(request)


async def test_calls_that_are_full_to_the_limit_are_answered(local: LocalBroker) -> None:
    """S3."""
    published = await in_time(local.publish(*[run_of(QUEUE, b"")] * limits.FRAME_RUNS_MAX))
    request = broker_pb2.SettleRequest(
        client_id="ada",
        settlements=[Settlement(receipt=b"?", ack=Ack())] * limits.SETTLEMENTS_PER_FRAME_MAX,
    )
    settled = (await in_time(local.api.Settle(request))).results

    assert len(published) == limits.FRAME_RUNS_MAX
    assert not any(map(reason_of, published))
    assert {reason_of(each) for each in settled} == {"INVALID_ARGUMENT"}


async def test_a_frame_that_is_larger_than_any_may_be_is_refused(local: LocalBroker) -> None:
    """S3: and the connection goes on."""
    large = run_of(QUEUE, *[b"x" * limits.MESSAGE_BYTES_MAX] * 17)

    with pytest.raises((TidemarkError, grpc.aio.AioRpcError)):
        await local.publish(large)

    (result,) = await in_time(local.publish(run_of(QUEUE, b"1")))
    assert reason_of(result) == ""
