"""The retry policy of a topic as an application meets it (V9)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tidemark
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument
from tidemark.topics import RetryPlace


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def local(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, clock, partitions=1, client_timeout_ms=3_600_000) as local:
        yield local


async def pull_one(
    client: tidemark.Client, lmq_name: str, wait_ms: int = 0
) -> tidemark.Delivery | None:
    """The next message; None if none is ready."""
    pulled = await in_time(client.pull(lmq_name, max_messages=1, wait_ms=wait_ms))
    return next(iter(pulled), None)


async def restart(local: LocalBroker) -> None:
    """Storage and broker start again over the same data."""
    await local.stop_broker()
    await local.stop_storage()
    await local.start_storage()
    await local.start_broker()


async def offsets(client: tidemark.Client, lmq_name: str) -> list[int]:
    """What is ready, in its order; all of it is acked."""
    found = []
    while (each := await pull_one(client, lmq_name)) is not None:
        found.append(each.offset)
        await each.ack(wait=True)
    return found


async def test_a_poison_message_leaves_the_other_deliveries_of_a_shared_queue_alone(
    client: tidemark.Client,
) -> None:
    """V9: it once took 50 of 50 deliveries."""
    await publish(client, "orders/a", *(b"%d" % number for number in range(25)))
    poison = 0

    for _ in range(50):
        each = await pull_one(client, "orders/a")
        assert each is not None
        if each.payload == b"0":
            poison += 1
            await each.nack()
        else:
            await each.ack(wait=True)
            await publish(client, "orders/a", each.payload)

    assert 2 <= poison <= 3


async def test_the_delay_of_a_failed_delivery_grows(
    client: tidemark.Client, clock: ManualClock
) -> None:
    """V9: after a nack and after an expiry, up to the maximum of the topic."""
    await client.create_topic(
        "slow",
        retry_delay_ms=1_000,
        retry_delay_ms_max=3_000,
        retry_multiplier=2,
        visibility_timeout_ms=10_000,
    )
    await publish(client, "slow/a", b"1")
    each = await pull_one(client, "slow/a")

    for delay_ms, expires in ((1_000, False), (2_000, True), (3_000, False), (3_000, True)):
        assert each is not None
        if expires:
            await clock.advance_ms(10_020)
            await publish(client, "slow/other", b"")  # a commit, in which it expires
        else:
            await each.nack()
        await clock.advance_ms(delay_ms - 50)
        assert await pull_one(client, "slow/a") is None
        await clock.advance_ms(70)  # it expired a little before, and deadlines are kept to 10 ms
        each = await pull_one(client, "slow/a", wait_ms=30_000)

    assert each is not None
    assert each.attempt == 4


async def test_a_delayed_message_of_an_exclusive_queue_holds_back_that_queue_only(
    client: tidemark.Client, clock: ManualClock
) -> None:
    """V9, E1: the order of the queue is kept, and other queues of the topic go on."""
    await client.create_topic("strict", subscription="exclusive", retry_delay_ms=1_000)
    for name in ("strict/a", "strict/b"):
        await publish(client, name, b"1", b"2")
    async with (
        client.subscribe(["strict/a"], credit=1) as held,
        client.subscribe(["strict/b"], credit=1) as free,
    ):
        await (await in_time(anext(held))).nack()

        for payload in (b"1", b"2"):
            each = await in_time(anext(free))
            assert each.payload == payload
            await each.ack(wait=True)

        async def nothing_is_out() -> bool:
            return (await client.admin.get_queue("strict/a")).queue.inflight == 0

        await until(nothing_is_out)
        await clock.advance_ms(1_020)
        again = []
        for _ in range(2):
            each = await in_time(anext(held))
            again.append((each.payload, each.attempt))
            await each.ack(wait=True)

    assert again == [(b"1", 1), (b"2", 0)]


async def test_a_changed_policy_applies_to_the_next_failure(client: tidemark.Client) -> None:
    """V9, S7."""
    await publish(client, "orders/a", b"0", b"1", b"2")

    changed = await client.admin.update_topic("orders", {"retry_place": "first"})
    each = await pull_one(client, "orders/a")
    assert each is not None
    await each.nack()

    assert changed.settings.retry_place is RetryPlace.FIRST
    assert await offsets(client, "orders/a") == [0, 1, 2]
    restored = await client.admin.update_topic("orders", {"retry_place": "default"})
    assert restored.settings.retry_place is RetryPlace.BEHIND


async def test_the_order_of_retries_survives_a_restart_of_storage(
    client: tidemark.Client, local: LocalBroker
) -> None:
    """V9, V4."""
    await publish(client, "orders/a", b"0", b"1", b"2")
    for _ in range(2):
        each = await pull_one(client, "orders/a")
        assert each is not None
        await each.nack()
    await publish(client, "orders/a", b"3")

    await restart(local)

    assert await offsets(client, "orders/a") == [2, 0, 1, 3]


async def test_the_delay_of_retries_survives_a_restart_of_storage(
    client: tidemark.Client, local: LocalBroker, clock: ManualClock
) -> None:
    """V9, V4: also that one of them holds back its queue."""
    await client.admin.update_topic("orders", {"retry_delay_ms": 60_000, "retry_place": "first"})
    await publish(client, "orders/a", b"0", b"1")
    each = await pull_one(client, "orders/a")
    assert each is not None
    await each.nack()

    await restart(local)

    assert await offsets(client, "orders/a") == []
    await clock.advance_ms(60_020)
    each = await pull_one(client, "orders/a", wait_ms=30_000)
    assert each is not None
    assert (each.offset, each.attempt) == (0, 1)
    await each.ack(wait=True)
    assert await offsets(client, "orders/a") == [1]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retry_delay_ms", -1),
        ("retry_delay_ms", 43_200_001),
        ("retry_delay_ms_max", 10**30),
        ("retry_multiplier", 0.5),
        ("retry_multiplier", 10**400),
        ("retry_multiplier", float("nan")),
        ("retry_multiplier", "2"),
        ("retry_multiplier", True),
        ("retry_jitter", 1.01),
        ("retry_place", "last"),
    ],
)
async def test_a_wrong_setting_is_refused_under_its_name(
    client: tidemark.Client, setting: str, value: object
) -> None:
    """K3, V9."""
    with pytest.raises(InvalidArgument) as refused:
        await client.create_topic("wrong", **{setting: value})

    assert refused.value.metadata["field"] == setting
