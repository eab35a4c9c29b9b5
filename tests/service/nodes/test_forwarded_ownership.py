"""Exclusive queues of clients that call a broker which does not hold them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.brokers import Brokers, several_brokers
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    NOT_SUBSCRIBED,
    UnaryClient,
    resync,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack

HOLDER, ELSEWHERE, ELSEWHERE_TOO = 1, 0, 2
"""Brokers by number: partition 1 is held by the second of three."""


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with several_brokers(tmp_path, nodes=1, partitions=3) as several:
        await several.create_topic("own", subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
        yield several


async def test_the_markers_of_the_holder_answer_at_every_broker(brokers: Brokers) -> None:
    """E2, E3, S8: a client that was evicted gets nothing, wherever it and the new owner call."""
    (queue,) = brokers.names_in(HOLDER, 1, "own")
    ada, bob = (UnaryClient(brokers, client, "default") for client in ("ada", "bob"))
    await brokers.call(ELSEWHERE)
    first = await subscribe(ada, queue)
    await brokers.publish(run_of(queue, b"1"))
    (held,) = await ada.receive()
    await brokers.call(ELSEWHERE_TOO)
    second = await subscribe(bob, queue)

    taken = await bob.receive()
    await brokers.call(ELSEWHERE)
    evicted = await ada.pull(queue)
    late = await ada.settle(held, Ack())
    (notice,) = await ada.report({queue: first})
    resynced = await resync(ada, {queue: first})
    at_another = []
    for number in (HOLDER, ELSEWHERE_TOO):
        await brokers.call(number)
        at_another.append((await ada.pull(queue)).subscription_state)
    await brokers.call(ELSEWHERE_TOO)
    owner = (await bob.pull(queue)).subscription_state
    stranger = (await UnaryClient(brokers, "eve", "default").pull(queue)).subscription_state
    settled = await bob.settle(taken[0], Ack())

    assert second > first
    assert payloads_of(taken) == [b"1"]
    assert (list(evicted.deliveries), evicted.subscription_state) == ([], EVICTED)
    assert late != ""
    assert (notice.lmq_name, notice.state, notice.epoch) == (queue, EVICTED, second)
    assert resynced == [(EVICTED, second)]
    assert at_another == [EVICTED, EVICTED]
    assert (owner, stranger, settled) == (ACTIVE, NOT_SUBSCRIBED, "")


async def test_an_explicit_subscription_ends_the_marker_wherever_it_is_sent(
    brokers: Brokers,
) -> None:
    """E4, S8: the client that was evicted takes the queue back through a third broker."""
    (queue,) = brokers.names_in(HOLDER, 1, "own")
    ada, bob = (UnaryClient(brokers, client, "default") for client in ("ada", "bob"))
    await brokers.call(ELSEWHERE)
    await subscribe(ada, queue)
    epoch = await subscribe(bob, queue)
    await brokers.call(ELSEWHERE_TOO)

    again = await subscribe(ada, queue)

    await brokers.call(ELSEWHERE)
    states = [(await client.pull(queue)).subscription_state for client in (ada, bob)]
    assert again > epoch
    assert states == [ACTIVE, EVICTED]
