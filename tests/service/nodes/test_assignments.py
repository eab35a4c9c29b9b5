"""Brokers that follow assignments: partitions come and go while clients stay connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tidemark
from broker_svc import app
from broker_svc.components import BrokerComponents
from broker_svc.links.link_state import Assigned, LinkState
from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time, payloads_of, reason_of, run_of, take, until
from tests.support.session import Session
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.clock import SystemClock
from tidemark.errors import NotOwner

MOVING = 0
"""A partition of the first broker."""


class Assigning:
    """Two brokers over one storage node, and the assignments that each of them gets."""

    def __init__(self, brokers: Brokers, built: list[BrokerComponents]) -> None:
        self.brokers = brokers
        self.built = built

    def assign(self, version: int, to: int, *, seen_by: tuple[int, ...] = (0, 1)) -> None:
        """Assign the moving partition to a broker."""
        for number in seen_by:
            link = self.built[number].links[MOVING]
            link.follow(Assigned(version, *self.brokers.members[to]))

    async def until_state(self, number: int, state: LinkState) -> None:
        async def is_so() -> bool:
            return self.built[number].links[MOVING].state is state

        await until(is_so)

    async def epoch(self) -> int:
        """How often the moving partition was claimed."""
        held = (await self.brokers.described(0)).held
        return next(each.broker_epoch for each in held if each.partition == MOVING)

    def kept(self, number: int) -> dict[str, int]:
        """What a broker keeps of the moving partition."""
        components = self.built[number]
        return {
            "deliveries": len(components.directory.receipts(MOVING)),
            "returning": len(components.settlements.returning(MOVING)),
            "standing": len(components.dispatcher.standing.of_partition(MOVING)),
            "tracked": sum(1 for each in components.tracking if each.partition == MOVING),
            "owners": len(components.subscriptions.ownerships),
            "publishers": len(components.publishers),
            "subscriptions": len(components.subscriptions),
            "leases": components.leases.active,
        }

    async def session(self, number: int, client_id: str) -> Session:
        return await self.brokers.session_with(number, client_id)


@pytest.fixture
async def assigning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Assigning]:
    built: list[BrokerComponents] = []
    build = app.build_components

    def building(*arguments: object) -> object:
        components, timers = build(*arguments)  # type: ignore[arg-type]
        built.append(components)
        return components, timers

    monkeypatch.setattr(app, "build_components", building)
    async with several_brokers(tmp_path, nodes=1, brokers=2, partitions=2) as brokers:
        await brokers.create_topic(partitions=2)
        exclusive = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE
        await brokers.create_topic("own", subscription=exclusive)
        yield Assigning(brokers, built)


async def test_a_broker_keeps_nothing_of_a_partition_that_has_left(assigning: Assigning) -> None:
    """S8, V6, C2: what its clients hold they settle at the new holder, and nothing comes again."""
    brokers = assigning.brokers
    session = await assigning.session(0, "ada")
    consumer = session.open_consumer(credit=10)
    names = [brokers.names_in(MOVING, 1, topic)[0] for topic in ("orders", "own")]
    await consumer.subscribe(*names)
    for name in names:
        await session.publish(name, [b"1"])
    held = await take(consumer, 2)
    before = assigning.kept(0)

    assigning.assign(2, to=1)

    def moved() -> list[str]:
        return [each.address for each in session.go_aways if each.partition == MOVING]

    await in_time(session.notified.wait_for(lambda: bool(moved())))
    with pytest.raises(NotOwner) as refused:
        await session.settle(held[0].delivery_tag, Ack())
    there = await assigning.session(1, "ada")
    settled = [await there.settle(each.receipt, Ack()) for each in held]
    assert (before["deliveries"], before["owners"], before["publishers"]) == (2, 1, 2)
    assert not any(assigning.kept(0).values())
    assert moved() == [brokers.members[1][1]]
    assert refused.value.metadata["owner"] == brokers.members[1][1]
    assert [each.messages for each in settled] == [1, 1]


async def test_a_partition_is_served_until_its_new_holder_claims_it(assigning: Assigning) -> None:
    """S8: a holder that comes late, or never, leaves no gap."""
    brokers = assigning.brokers
    (name,) = brokers.names_in(MOVING, 1)

    assigning.assign(2, to=1, seen_by=(0,))

    (leaving,) = await brokers.publish(run_of(name, b"1"))
    await assigning.until_state(0, LinkState.LEAVING)
    assigning.assign(2, to=1, seen_by=(1,))
    await assigning.until_state(0, LinkState.AWAY)
    await assigning.until_state(1, LinkState.HELD)
    (moved,) = await brokers.publish(run_of(name, b"2"))
    assert [reason_of(each) for each in (leaving, moved)] == ["", ""]
    assert [each.receipt.first_offset for each in (leaving, moved)] == [0, 1]


async def test_consumers_get_a_partition_that_comes_to_their_broker(assigning: Assigning) -> None:
    """S8: a plain queue gains a feed, without a word from its client."""
    brokers = assigning.brokers
    session = await assigning.session(1, "ada")
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe("orders")
    await brokers.publish(run_of("orders", b"early", partition=MOVING))

    assigning.assign(2, to=1)

    early = await take(consumer, 1)
    await brokers.publish(run_of("orders", b"late", partition=MOVING))
    late = await take(consumer, 1)
    assert payloads_of([*early, *late]) == [b"early", b"late"]
    assert [each.partition for each in (*early, *late)] == [MOVING, MOVING]


async def test_brokers_with_different_views_do_not_fence_each_other_in_circles(
    assigning: Assigning,
) -> None:
    """C5: one claim each, whatever they believe; a newer assignment decides."""
    before = await assigning.epoch()

    assigning.assign(2, to=1, seen_by=(1,))  # the first broker goes by version 1
    await assigning.until_state(0, LinkState.AWAY)
    assigning.assign(2, to=0, seen_by=(0,))  # and now by another version 2, which is refused
    await assigning.until_state(0, LinkState.AWAY)
    claimed = await assigning.epoch()
    assigning.assign(3, to=0)
    await assigning.until_state(0, LinkState.HELD)
    await assigning.until_state(1, LinkState.AWAY)

    assert (claimed, await assigning.epoch()) == (before + 1, before + 2)
    (name,) = assigning.brokers.names_in(MOVING, 1)
    (published,) = await assigning.brokers.publish(run_of(name, b"1"))
    assert reason_of(published) == ""


async def test_the_python_client_follows_partitions_that_move_to_and_fro(
    assigning: Assigning,
) -> None:
    """S8, S11, E10, C2: nothing is lost, acknowledged messages do not come back, owners stay."""
    brokers = assigning.brokers
    lite, owned = (brokers.names_in(MOVING, 1, topic)[0] for topic in ("orders", "own"))
    moves = 6
    seen: dict[str, list[bytes]] = {"orders": [], lite: [], owned: []}
    epochs: set[int] = set()

    async def consume(deliveries: tidemark.Subscription) -> None:
        async for delivery in deliveries:
            seen[delivery.lmq_name].append(delivery.payload)
            epochs.update({delivery.epoch} if delivery.lmq_name == owned else ())
            await delivery.ack(wait=True)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(tidemark.connect(brokers.members[0][1]))
        publishers = [await client.publisher(name) for name in seen]
        shared = await stack.enter_async_context(client.subscribe(["orders", lite]))
        mine = await stack.enter_async_context(client.subscribe([owned], group="o"))
        consuming = [asyncio.create_task(consume(each)) for each in (shared, mine)]
        for number in range(moves):
            assigning.assign(2 + number, to=(number + 1) % 2)
            for burst in range(5):
                payload = b"%d-%d" % (number, burst)
                await in_time(asyncio.gather(*(each.publish(payload) for each in publishers)))

        async def all_seen() -> bool:
            return all(len(set(each)) == 5 * moves for each in seen.values())

        await until(all_seen)
        for each in consuming:
            each.cancel()
        await asyncio.gather(*consuming, return_exceptions=True)

    assert {name: len(each) for name, each in seen.items()} == dict.fromkeys(seen, 5 * moves)
    assert len(epochs) == 1


async def test_the_python_client_outlives_the_only_broker_that_it_was_given(
    assigning: Assigning,
) -> None:
    """S8, S5: the others were named by it."""
    brokers = assigning.brokers
    (name,) = brokers.names_in(MOVING, 1)
    async with tidemark.connect(brokers.members[0][1]) as client:
        publisher = await client.publisher(name)
        async with client.subscribe([name]) as deliveries:
            await in_time(publisher.publish(b"before"))
            before = await in_time(anext(deliveries))
            await in_time(before.ack(wait=True))

            await brokers.stop_member(0)
            late = asyncio.create_task(publisher.publish(b"after"))
            assigning.assign(2, to=1, seen_by=(1,))

            await in_time(late)
            after = await in_time(anext(deliveries))
            await in_time(after.ack(wait=True))
    assert [before.payload, after.payload] == [b"before", b"after"]


async def test_a_long_poll_ends_when_its_partition_moves(assigning: Assigning) -> None:
    """S8: or it would wait here for messages that are ready there."""
    brokers = assigning.brokers
    (name,) = brokers.names_in(MOVING, 1)
    polling = asyncio.create_task(brokers.pull(name, wait_ms=50_000))
    components = assigning.built[0]

    async def is_waiting() -> bool:
        return len(components.dispatcher) > 0

    await until(is_waiting)
    assigning.assign(2, to=1)

    with pytest.raises(NotOwner) as refused:
        await SystemClock().wait_for(polling, 40_000)  # sooner than its own end
    assert refused.value.metadata["owner"] == brokers.members[1][1]
    await brokers.publish(run_of(name, b"1"))
    assert payloads_of(await brokers.pull(name, wait_ms=50_000)) == [b"1"]
