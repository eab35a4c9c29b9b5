"""Partitions: queues that span several, partitions that are faulty (L3, L4)."""

import asyncio
from collections import Counter

import pytest

from tests.service.broker.conftest import StartBroker, StartGated
from tests.support.local_broker import (
    PLAIN,
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    until,
    until_share,
)
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Nack
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.storage.v1 import action_pb2, storage_pb2
from tidemark.errors import (
    InvalidArgument,
    PartitionFaulty,
    PartitionNotFound,
    Unavailable,
)
from tidemark.names import partition_of

# --- queues over several partitions ---------------------------------------------------------------


async def test_runs_of_a_plain_queue_are_spread_over_its_partitions(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()

    receipts = [await session.publish(PLAIN, [b"1"]) for _ in range(30)]

    assert Counter(each.partition for each in receipts) == {0: 10, 1: 10, 2: 10}
    assert (await local.queue(PLAIN)).messages == 30


async def test_a_consumer_of_a_plain_queue_draws_from_all_its_partitions(
    start: StartBroker,
) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(PLAIN)

    for number in range(30):
        await session.publish(PLAIN, [b"%d" % number])
    taken = await take(consumer, 30)

    assert sorted(payloads_of(taken)) == sorted(b"%d" % number for number in range(30))
    assert {each.partition for each in taken} == {0, 1, 2}
    for each in taken:
        assert (await session.settle(each.delivery_tag, Ack())).messages == 1
    assert (await local.queue(PLAIN)).messages == 0


async def test_pulls_draw_from_all_partitions_of_a_plain_queue(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    for partition in range(3):
        await local.publish(run_of(PLAIN, b"%d" % partition, partition=partition))

    got: list[bytes] = []
    while len(got) < 3:
        deliveries = await local.pull(PLAIN)
        assert deliveries, "an answer of none must be true"
        got += payloads_of(deliveries)

    assert sorted(got) == [b"0", b"1", b"2"]
    assert await local.pull(PLAIN) == []


async def test_a_pull_is_woken_by_any_partition(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    for partition in range(3):
        pull = asyncio.create_task(local.pull(PLAIN, wait_ms=30_000))

        await local.publish(run_of(PLAIN, b"1", partition=partition))

        (delivery,) = await in_time(pull)
        assert delivery.partition == partition


async def test_a_pinned_run_goes_where_it_is_pinned_to(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()

    for partition in (2, 2, 0, 1, 2):
        receipt = await session.publish(PLAIN, [b"1"], partition=partition)
        assert receipt.partition == partition


async def test_a_run_pinned_to_a_partition_without_the_queue_is_refused(
    start: StartBroker,
) -> None:
    """S3."""
    local = await start(partitions=3, topic={"partitions": 2})
    session = await local.session()
    spanned = set((await session.open_publisher(PLAIN)).partitions)
    (elsewhere,) = {0, 1, 2} - spanned

    with pytest.raises(InvalidArgument) as refused:
        await session.publish(PLAIN, [b"1"], partition=elsewhere)
    with pytest.raises(InvalidArgument):
        await session.publish(PLAIN, [b"1"], partition=3)

    assert refused.value.metadata == {"field": "partition"}


async def test_a_repeat_of_a_pinned_run_is_known(start: StartBroker) -> None:
    """S11: a run is pinned to its partition until it has a definite answer."""
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()
    first = await session.publish(PLAIN, [b"1"], partition=1, sequence=1)

    again = await session.publish(PLAIN, [b"1"], partition=1, sequence=1)

    assert again.duplicate
    assert (again.partition, again.first_offset) == (first.partition, first.first_offset)
    assert (await local.queue(PLAIN)).messages == 1


async def test_lite_queues_of_a_wide_topic_live_in_one_partition_each(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()

    receipts = [await session.publish("orders/x", [b"1"]) for _ in range(6)]

    assert len({each.partition for each in receipts}) == 1


async def grow(local: LocalBroker, partitions: int) -> None:
    settings = topic_pb2.TopicSettings(partitions=partitions)
    update = topic_pb2.UpdateTopicRequest(name="orders", settings=settings)
    update.update_mask.paths.append("partitions")
    await local.topics.UpdateTopic(update)


async def test_a_topic_that_grows_spreads_over_its_new_partitions(start: StartBroker) -> None:
    local = await start(partitions=3, topic={"partitions": 1})
    await local.publish(run_of(PLAIN, b"1"))

    await grow(local, partitions=3)
    session = await local.session()
    receipts = [await session.publish(PLAIN, [b"1"]) for _ in range(6)]

    assert {each.partition for each in receipts} == {0, 1, 2}


async def test_a_publisher_goes_on_in_the_partitions_that_its_queue_grew_into(
    start: StartBroker,
) -> None:
    """I5, I8: as the same publisher, also where a run is pinned."""
    local = await start(partitions=3, topic={"partitions": 1})
    session = await local.session()
    opened = await session.open_publisher(PLAIN)

    await grow(local, partitions=3)
    pinned = [await session.publish(PLAIN, [b"1"], partition=number) for number in range(3)]
    spread = [await session.publish(PLAIN, [b"1"]) for _ in range(6)]
    again = await session.open_publisher(PLAIN)

    assert [each.partition for each in pinned] == [0, 1, 2]
    assert {each.partition for each in spread} == {0, 1, 2}
    assert {each.publisher_id for each in pinned + spread} == {opened.publisher_id}
    assert sorted(again.partitions) == [0, 1, 2]


async def test_a_consumer_draws_from_partitions_that_its_queue_grew_into(
    start: StartBroker,
) -> None:
    """Also one that has subscribed before, and knows nothing of it."""
    local = await start(partitions=3, topic={"partitions": 1})
    session = await local.session()
    consumer = session.open_consumer("mail", credit=100)
    await consumer.subscribe(PLAIN)

    await grow(local, partitions=3)
    await local.publish(*(run_of(PLAIN, b"1", partition=number) for number in range(3)))

    deliveries = await take(consumer, 3)
    assert {each.partition for each in deliveries} == {0, 1, 2}


async def test_a_consumer_that_subscribes_while_its_queue_grows_draws_from_all_partitions(
    start_gated: StartGated,
) -> None:
    local, gates = await start_gated(3, topic={"partitions": 1})
    home = partition_of(PLAIN, 3)
    session = await local.session()
    consumer = session.open_consumer("mail", credit=100)
    gates.links[home].requests.close()
    begin = StartPosition(earliest=True)
    subscribing = asyncio.create_task(consumer.subscribe(PLAIN, start=begin))
    await in_time(gates.links[home].requests.until_held())

    growing = asyncio.create_task(grow(local, partitions=3))

    async def is_stored() -> bool:
        found = await local.storage.GetTopic(storage_pb2.GetTopicRequest(name="orders"))
        return found.topic.settings.partitions == 3

    await until(is_stored)
    gates.links[home].requests.let_go()
    await in_time(asyncio.gather(subscribing, growing))

    await local.publish(*(run_of(PLAIN, b"1", partition=number) for number in range(3)))
    deliveries = await take(consumer, 3)
    assert {each.partition for each in deliveries} == {0, 1, 2}


# --- faulty partitions ----------------------------------------------------------------------------


async def sweep(local: LocalBroker, partition: int, *, succeeded: bool) -> None:
    lease = storage_pb2.LeaseSweepRequest(
        partition=partition, sweeper_id="s", address="127.0.0.1:1", lease_ms=60_000
    )
    await local.storage.LeaseSweep(lease)
    request = storage_pb2.ReportSweepRequest(
        partition=partition, sweeper_id="s", succeeded=succeeded, detail="a test says so"
    )
    await local.storage.ReportSweep(request)


async def test_a_faulty_partition_gets_no_share_until_a_sweep_succeeds(
    start: StartBroker,
) -> None:
    """L4."""
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()

    await sweep(local, 1, succeeded=False)
    await until_share(session, 0, 2)
    during = [await session.publish(PLAIN, [b"1"]) for _ in range(10)]
    await sweep(local, 1, succeeded=True)
    await until_share(session, 0, 1, 2)
    after = [await session.publish(PLAIN, [b"1"]) for _ in range(9)]

    assert {each.partition for each in during} == {0, 2}
    assert {each.partition for each in after} == {0, 1, 2}


async def test_publishes_to_a_faulty_partition_are_refused_while_others_go_on(
    start: StartBroker,
) -> None:
    """L4."""
    local = await start(partitions=3, topic={"partitions": 3})
    session = await local.session()
    ((faulty,), (healthy,)) = local.names_in(1, 1), local.names_in(0, 1)
    await session.publish(faulty, [b"before"])

    await sweep(local, 1, succeeded=False)
    await until_share(session, 0, 2)
    with pytest.raises(PartitionFaulty) as refused:
        await session.publish(faulty, [b"1"])
    with pytest.raises(PartitionFaulty):
        await session.publish(PLAIN, [b"1"], partition=1)
    (unary,) = await local.publish(run_of(faulty, b"1"))
    await session.publish(healthy, [b"1"])

    assert refused.value.retry_after_ms is not None
    assert "SWEEP_FAILED" in refused.value.metadata["reasons"]
    assert reason_of(unary) == "PARTITION_FAULTY"
    # What is there is delivered and settled all the same.
    (delivery,) = await local.pull(faulty)
    assert payloads_of([delivery]) == [b"before"]
    assert (await local.settle(delivery.receipt, Ack())).messages == 1


async def test_a_queue_without_a_healthy_partition_is_unavailable(start: StartBroker) -> None:
    """L4."""
    local = await start(partitions=2, topic={"partitions": 2})
    session = await local.session()
    for partition in range(2):
        await sweep(local, partition, succeeded=False)
    await until_share(session)

    with pytest.raises(Unavailable):
        await session.publish(PLAIN, [b"1"])


async def test_a_partition_takes_no_publishes_before_its_first_sweep(start: StartBroker) -> None:
    """L4."""
    local = await start(partitions=2, storage={"await_sweep": True})
    session = await local.session()
    ((starting,), (served,)) = local.names_in(1, 1), local.names_in(0, 1)

    await sweep(local, 0, succeeded=True)

    async def is_served() -> bool:
        return reason_of(await session.submit(run_of(served, b"1"))) == ""

    await until(is_served)
    refused = await session.submit(run_of(starting, b"1"))
    assert reason_of(refused) == "LIFECYCLE_UNAVAILABLE"


async def test_publishes_before_the_first_sweep_do_not_cost_the_broker_its_link(
    start: StartBroker,
) -> None:
    """S2, L4: it does not pass on what the partition would refuse."""
    local = await start(partitions=2, storage={"await_sweep": True})
    await sweep(local, 0, succeeded=True)
    session = await local.session()
    (queue,) = local.names_in(1, 1)

    async def reason() -> str:
        return reason_of(await session.submit(run_of(queue, b"1")))

    async def epochs() -> list[int]:
        response = await local.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
        return [each.broker_epoch for each in response.partitions]

    async def is_served() -> bool:
        return await reason() == ""

    async def is_starting() -> bool:  # the topic has arrived
        return await reason() == "LIFECYCLE_UNAVAILABLE"

    await until(is_starting)
    before = await epochs()
    assert await reason() == "LIFECYCLE_UNAVAILABLE"
    await sweep(local, 1, succeeded=True)
    await until(is_served)
    assert await epochs() == before


# --- delegated actions ----------------------------------------------------------------------------


async def due(
    local: LocalBroker, partition: int, kind: storage_pb2.ScanKind.ValueType
) -> list[action_pb2.Action]:
    request = storage_pb2.ScanPartitionRequest(partition=partition, kind=kind)
    return [fact.action for fact in (await local.storage.ScanPartition(request)).facts]


async def delegate(
    local: LocalBroker, partition: int, *actions: action_pb2.Action
) -> list[action_pb2.ActionResult]:
    request = action_pb2.DelegateActionsRequest(partition=partition, actions=actions)
    return list((await local.owner.DelegateActions(request)).results)


async def test_the_owner_carries_out_what_a_sweep_planned_and_only_once(
    start: StartBroker,
) -> None:
    """L3, L8."""
    local = await start(topic={"max_attempts": 1})
    (queue,) = local.names_in(1, 1)
    await local.publish(run_of(queue, b"poison"))
    (delivery,) = await local.pull(queue)
    await local.settle(delivery.receipt, Nack())
    (planned,) = await due(local, 1, storage_pb2.SCAN_KIND_ATTEMPTS_EXHAUSTED)

    done, repeated = await delegate(local, 1, planned, planned)

    assert (done.outcome, done.messages) == (action_pb2.ACTION_OUTCOME_DONE, 1)
    assert repeated.outcome == action_pb2.ACTION_OUTCOME_STALE
    assert (await local.queue(queue)).messages == 0
    assert await due(local, 1, storage_pb2.SCAN_KIND_ATTEMPTS_EXHAUSTED) == []


async def test_an_action_that_cannot_be_done_is_refused_with_a_reason(start: StartBroker) -> None:
    """L3, L6."""
    local = await start(topic={"max_attempts": 1, "dead_letter_topic": "not-yet"})
    await local.delete_topic("not-yet")
    (queue,) = local.names_in(0, 1)
    await local.publish(run_of(queue, b"poison"))
    (delivery,) = await local.pull(queue)
    await local.settle(delivery.receipt, Nack())
    await delegate(local, 0, *await due(local, 0, storage_pb2.SCAN_KIND_ATTEMPTS_EXHAUSTED))
    (entry,) = await due(local, 0, storage_pb2.SCAN_KIND_OUTBOX)
    destination = entry.append_from_outbox.entry.destination_partition

    (refused,) = await delegate(local, destination, entry)
    await local.create_topic("not-yet")
    (done,) = await delegate(local, destination, entry)

    assert refused.outcome == action_pb2.ACTION_OUTCOME_REFUSED
    assert refused.HasField("error")
    assert done.outcome == action_pb2.ACTION_OUTCOME_DONE


async def test_delegated_actions_have_limits(local: LocalBroker) -> None:
    """S3."""
    stale = action_pb2.Action(
        expire_reservation=action_pb2.ExpireReservation(queue_id=1, reservation_id=1)
    )

    results = await delegate(local, 0, *[stale] * 1000)
    with pytest.raises(InvalidArgument):
        await delegate(local, 0, *[stale] * 1001)
    with pytest.raises(InvalidArgument):
        await delegate(local, 0)
    with pytest.raises(PartitionNotFound):
        await delegate(local, 2, stale)

    assert {each.outcome for each in results} == {action_pb2.ACTION_OUTCOME_STALE}
