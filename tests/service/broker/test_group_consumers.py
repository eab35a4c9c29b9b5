"""Which groups have a consumer, as a broker reports it to storage: those do not expire (R14)."""

import pytest

from broker_svc.idle.activity_leases import REPORTED_MAX
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.unanswered_operations import Answer
from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import QUEUE, LocalBroker, until
from tests.support.retention_calls import rows_of
from tests.support.session import Consumer
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.api.storage.v1.retention_pb2 import SCAN_TABLE_NAME_GROUPS
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.clock import ManualClock
from tidemark.rpc import open_channel
from tidemark.rpc.callbacks import Done

CLIENT_TIMEOUT_MS = 30_000
"""That long after a claim, storage relies on what the broker has reported."""


async def in_use(local: LocalBroker) -> dict[str, bool]:
    """The groups of the queue, and whether storage takes them for used."""
    async with open_channel(local.storage_address) as channel:
        stub = RetentionServiceStub(channel)
        found = await rows_of(stub, SCAN_TABLE_NAME_GROUPS, lmq_name=QUEUE)
    return {row["group"]: row["in_use"] for row in found}


async def until_in_use(
    local: LocalBroker, clock: ManualClock, *consumers: Consumer, **expected: bool
) -> None:
    """Let time pass, in which these consumers are not silent, until storage knows who is there."""

    async def reported() -> bool:
        for _ in range(3):
            await clock.advance_ms(CLIENT_TIMEOUT_MS // 3)
            for consumer in consumers:
                await consumer.subscribe(QUEUE)  # again: changes nothing
        return await in_use(local) == expected

    await until(reported)


async def test_a_subscription_keeps_its_group_and_no_other(start: StartBroker) -> None:
    """R14: without credit, over a lost link, and until the last one ends."""
    clock = ManualClock()
    local = await start(clock, partitions=1)
    for group in ("mail", "audit"):
        await local.pull(QUEUE, group=group)
    first, second = await local.session("bob"), await local.session("eve")
    consumers = first.open_consumer("mail"), second.open_consumer("mail")
    for consumer in consumers:
        await consumer.subscribe(QUEUE)

    await until_in_use(local, clock, *consumers, mail=True, audit=False)
    await local.stop_storage()
    await local.start_storage()
    await until_in_use(local, clock, *consumers, mail=True, audit=False)
    await first.abort()
    await until_in_use(local, clock, consumers[1], mail=True, audit=False)
    await second.abort()
    await until_in_use(local, clock, mail=False, audit=False)


async def test_a_subscription_loads_its_queue_and_reports_its_group_at_once(
    start: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: one operation, of many queues one each."""
    local = await start(ManualClock(), partitions=1)
    consumer = (await local.session("bob")).open_consumer("mail")
    loaded: list[list[str]] = []
    send = PartitionLink.send

    def noted(link: PartitionLink, operation: exchange_pb2.Operation) -> Answer:
        if operation.HasField("materialize"):
            loaded.append(list(operation.materialize.groups))
        return send(link, operation)

    monkeypatch.setattr(PartitionLink, "send", noted)
    await consumer.subscribe(QUEUE)
    await consumer.subscribe(QUEUE)  # again: changes nothing

    assert loaded == [["mail"]]


async def test_the_groups_of_many_queues_are_reported_together(
    start: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: of queues that are loaded; and all of them when the subscriptions end."""
    local = await start(ManualClock(), partitions=1)
    session = await local.session("bob")
    queues = [f"orders/{number}" for number in range(REPORTED_MAX + 1)]
    for queue in queues:
        await session.publish(queue, [b"1"])
    consumer = session.open_consumer("mail")
    asked: list[exchange_pb2.Operation] = []
    ask = PartitionLink.ask

    def noted(
        link: PartitionLink,
        operation: exchange_pb2.Operation,
        done: Done[exchange_pb2.OperationResult],
    ) -> None:
        asked.append(operation)
        ask(link, operation, done)

    monkeypatch.setattr(PartitionLink, "ask", noted)
    await consumer.subscribe(*queues)
    joined = [list(each.join_group.lmq_names) for each in asked if each.HasField("join_group")]
    await consumer.unsubscribe(*queues)
    left = [list(each.leave_group.lmq_names) for each in asked if each.HasField("leave_group")]

    assert joined == left == [queues[:-1], queues[-1:]]
    assert not any(each.HasField("materialize") for each in asked)
