"""One stream between a broker and its storage node: what the partitions share, also its end."""

import asyncio

from tests.service.broker.conftest import StartGated
from tests.support.local_broker import LocalBroker, in_time, reason_of, run_of, take, until
from tests.support.session import Session
from tidemark.api.broker.v1.message_pb2 import Ack, PublishResult

PARTITIONS = 4


async def publish_each(session: Session, names: list[str]) -> list[PublishResult]:
    """One message to each queue, all at once."""
    return await in_time(asyncio.gather(*(session.submit(run_of(name, b"x")) for name in names)))


def names_everywhere(local: LocalBroker, each: int) -> list[str]:
    return [name for number in range(PARTITIONS) for name in local.names_in(number, each)]


async def test_a_broker_has_one_stream_to_a_node_however_many_partitions_it_holds(
    start_gated: StartGated,
) -> None:
    """C7."""
    local, gates = await start_gated(PARTITIONS)
    session = await local.session()

    results = await publish_each(session, names_everywhere(local, each=4))

    assert not any(map(reason_of, results))
    assert gates.streams == 1


async def test_a_partition_that_does_not_answer_holds_up_no_other(start_gated: StartGated) -> None:
    """L1: neither what clients publish, nor what they get."""
    local, gates = await start_gated(PARTITIONS)
    session = await local.session()
    (held,) = local.names_in(0, 1)
    others = [name for name in names_everywhere(local, each=2) if name not in local.names_in(0, 2)]
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*others)
    await publish_each(session, [held])
    gates.links[0].answers.close()
    waiting = [asyncio.ensure_future(session.submit(run_of(held, b"y"))) for _ in range(100)]
    await in_time(gates.links[0].answers.until_held())

    results = await publish_each(session, others)
    deliveries = await take(consumer, len(others))

    assert not any(map(reason_of, results))
    assert sorted(each.lmq_name for each in deliveries) == sorted(others)
    assert not any(each.done() for each in waiting)
    gates.links[0].answers.let_go()
    assert not any(map(reason_of, await in_time(asyncio.gather(*waiting))))


async def test_every_operation_gets_one_answer_however_often_the_stream_breaks(
    start_gated: StartGated,
) -> None:
    """S2, I2: it is stored if the answer is a success; and all links come back."""
    local, gates = await start_gated(PARTITIONS)
    session = await local.session()
    names = names_everywhere(local, each=4)
    await publish_each(session, names)

    stored = dict.fromkeys(names, 1)
    for link in gates.links.values():
        link.answers.close()  # so that answers of this partition are lost, and maybe others
        rounds = [asyncio.ensure_future(publish_each(session, names)) for _ in range(4)]
        await in_time(link.answers.until_held())
        await gates.break_streams()
        link.answers.let_go()
        for results in await asyncio.gather(*rounds):
            for name, result in zip(names, results, strict=True):
                assert reason_of(result) in ("", "UNAVAILABLE")
                stored[name] += not reason_of(result)

        async def are_back() -> bool:
            results = await publish_each(session, names)
            for name, result in zip(names, results, strict=True):
                stored[name] += not reason_of(result)
            return not any(map(reason_of, results))

        await until(are_back)

    found = {name: (await local.queue(name)).messages for name in names}
    assert all(found[name] >= stored[name] for name in names)
    assert gates.streams == 1


async def test_what_clients_hold_stays_theirs_when_the_stream_breaks(
    start_gated: StartGated,
) -> None:
    """V4: every link claims again and reports its own."""
    local, gates = await start_gated(PARTITIONS)
    session = await local.session()
    names = names_everywhere(local, each=2)
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*names)
    await publish_each(session, names)
    held = await take(consumer, len(names))

    await gates.break_streams()

    async def are_back() -> bool:
        results = await publish_each(session, names)
        return not any(map(reason_of, results))

    await until(are_back)
    settled = [await in_time(session.settle(each.delivery_tag, Ack())) for each in held]
    assert [each.messages for each in settled] == [1] * len(names)
