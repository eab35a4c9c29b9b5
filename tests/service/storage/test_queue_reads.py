"""Looking at storage and its queues, in pages; looking wakes none."""

from typing import Any

import pytest

from storage_svc.engines.engine import FORMAT_VERSION, Table
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tests.support.faulty_engine import FaultyEngine, FaultyEngines
from tests.support.storage_client import RunningStorage, loaded
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.broker.v1.topic_pb2 import QUEUE_ACTIVITY_IDLE, QUEUE_ACTIVITY_MATERIALIZED
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_NACK,
    RemoveQueue,
)
from tidemark.api.storage.v1.storage_pb2 import (
    DescribeStorageRequest,
    GetTopicRequest,
    ListQueuesRequest,
    ListTopicsRequest,
    PeekQueueRequest,
)
from tidemark.clock import ManualClock


@pytest.mark.rocksdb(reason="it names the engine")
async def test_storage_describes_what_it_holds(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"), reserve("jobs/a"))

    described = await storage.storage.DescribeStorage(DescribeStorageRequest())

    (held,) = described.held
    assert (described.cluster_id, described.partitions) == ("cluster-a", 1)
    assert (described.format_version, described.engine) == (FORMAT_VERSION, "rocksdb")
    assert (held.queues, held.materialized_queues, held.reservations) == (2, 2, 1)
    assert (held.broker_id, held.broker_epoch, held.commits > 0) == ("broker-a", 1, True)


async def test_another_partition_or_none_is_refused_by_every_call(storage: RunningStorage) -> None:
    stub = storage.storage
    asked = [
        stub.GetTopic(GetTopicRequest(partition=1, name="jobs")),
        stub.ListTopics(ListTopicsRequest(partition=1)),
        stub.ListQueues(ListQueuesRequest(partition=1)),
        stub.GetQueue(storage_pb2.GetQueueRequest(partition=1, lmq_name="jobs")),
        stub.PeekQueue(PeekQueueRequest(partition=1, lmq_name="jobs", max_messages=1)),
    ]

    for call in asked:
        with pytest.raises(errors.PartitionNotFound):
            await call


async def list_names(storage: RunningStorage, **asked: Any) -> list[str]:
    names: list[str] = []
    token = ""
    while True:
        page = await storage.storage.ListQueues(ListQueuesRequest(page_token=token, **asked))
        names += [queue.lmq_name for queue in page.queues]
        token = page.next_page_token
        if not token:
            return names


async def test_queues_are_listed_in_pages_by_name_and_none_is_woken(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("job")
    names = ["job", "jobs", *(f"jobs/{n}" for n in range(5)), "jobs/user-1", "jobs/user-2"]
    await exchange.ask_all(*(append(name, b"x") for name in names))
    await storage.restart()

    everything = await list_names(storage, page_size=2)
    of_topic = await list_names(storage, topic="jobs")
    of_users = await list_names(storage, topic="jobs", lite_prefix="user-", page_size=1)

    assert everything == names
    assert of_topic == names[1:]
    assert of_users == names[-2:]
    assert await loaded(storage) == 0


@pytest.mark.parametrize(
    "fields", [{"page_token": "no hex"}, {"page_size": limits.PAGE_SIZE_MAX + 1}]
)
async def test_a_page_of_queues_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any]
) -> None:
    """S3."""
    await list_names(storage, page_size=limits.PAGE_SIZE_MAX)

    with pytest.raises(errors.InvalidArgument):
        await storage.storage.ListQueues(ListQueuesRequest(**fields))


async def test_a_token_of_another_listing_shows_no_queue_that_was_not_asked_for(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("other")
    await exchange.ask_all(*(append(f"jobs/{n}", b"x") for n in range(3)), append("other", b"x"))
    page = await storage.storage.ListQueues(ListQueuesRequest(topic="jobs", page_size=1))

    token = page.next_page_token
    try:
        asked = ListQueuesRequest(topic="other", page_token=token)
        page = await storage.storage.ListQueues(asked)
    except errors.InvalidArgument:
        return
    assert {queue.lmq_name for queue in page.queues} <= {"other"}


async def test_a_queue_is_described_from_memory_or_from_disk_alike(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """I9: with its durable last activity."""
    await exchange.ask(append("jobs/a", b"1", b"2", b"3"))
    await clock.advance_ms(100)
    await exchange.ask(append("jobs/a", b"later", delay_ms=1000))
    (got,) = (await exchange.ask(reserve("jobs/a", 2))).slices
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, (0, 1)))

    warm = await storage.queue("jobs/a")
    await storage.restart()
    cold = await storage.queue("jobs/a")

    assert warm.queue.activity == QUEUE_ACTIVITY_MATERIALIZED
    assert cold.queue.activity == QUEUE_ACTIVITY_IDLE
    for seen in (warm, cold):
        queue, (group,) = seen.queue, seen.groups
        assert (queue.messages, queue.next_offset) == (4, 3)
        assert queue.last_activity_time.ToMilliseconds() == clock.wall_ms()
        assert queue.oldest_publish_time.ToMilliseconds() == clock.wall_ms() - 100
        assert (group.name, group.cursor, group.unsettled, group.inflight) == ("default", 1, 2, 1)
    assert (warm.queue.inflight, cold.queue.inflight) == (1, 0)
    assert await loaded(storage) == 0


async def test_looking_for_what_is_not_there_says_so(storage: RunningStorage) -> None:
    with pytest.raises(errors.QueueNotFound):
        await storage.queue("jobs/none")
    with pytest.raises(errors.QueueNotFound):
        await storage.storage.PeekQueue(PeekQueueRequest(lmq_name="jobs/none", max_messages=1))
    with pytest.raises(errors.InvalidName):
        await storage.queue("no/such/name")


async def peek(storage: RunningStorage, **asked: Any) -> list[bytes]:
    request = PeekQueueRequest(lmq_name="jobs/a", **asked)
    answer = await storage.storage.PeekQueue(request)
    return [each.message.payload for each in answer.messages]


async def test_messages_can_be_looked_at_without_reserving_or_waking(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.ask_all(
        append("jobs/a", b"0", b"1", fairness_key="k"), append("jobs/a", b"2", b"3")
    )
    slices = (await exchange.ask(reserve("jobs/a", 3))).slices
    await exchange.ask(settle(slices[0].receipt, SETTLE_ACTION_ACK, (0, 1)))
    done = slices[0].first_offset
    await storage.restart()

    everything = await peek(storage, max_messages=1000)
    middle = await peek(storage, offset=1, max_messages=2)
    unsettled = await peek(storage, max_messages=10, group="default")

    assert everything == [b"0", b"1", b"2", b"3"]
    assert middle == [b"1", b"2"]
    assert unsettled == [b"%d" % at for at in range(4) if at != done]
    assert await loaded(storage) == 0
    with pytest.raises(errors.InvalidArgument):
        await peek(storage, max_messages=limits.PAGE_SIZE_MAX + 1)


async def test_large_messages_can_be_looked_at(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    for _ in range(5):
        await exchange.ask(append("jobs/a", *[bytes(1_000_000)] * 4))

    assert len(await peek(storage, max_messages=1000)) > 0


@pytest.mark.rocksdb(reason="its disk is made to wait")
async def test_a_queue_that_is_deleted_under_a_look_is_no_corrupt_one(
    start_storage: StartStorage,
    faulty_disks: list[FaultyEngines],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """V3: a peek reads beside the writer, and between two reads any record may be deleted."""
    storage = await start_storage()
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"x"))
        await exchange.ask(settle((await reserved(exchange, "jobs/a")).receipt, SETTLE_ACTION_NACK))
        (disk,) = faulty_disks
        disk.gate.clear()
        remove = RemoveQueue(lmq_name="jobs/a")
        (removal,) = await exchange.send(operation(remove_queue=remove))
        await disk.waiting.wait()
        scan, looked_at = FaultyEngine.scan, []

        async def scan_then_delete(
            self: FaultyEngine, table: Table, *where: Any, **how: Any
        ) -> Any:
            found = await scan(self, table, *where, **how)
            looked_at.append(table)
            if table is Table.RETURNED:
                disk.gate.set()
                await removal
            return found

        monkeypatch.setattr(FaultyEngine, "scan", scan_then_delete)
        await storage.queue("jobs/a")

    assert Table.RETURNED in looked_at
    assert "a record was left out" not in caplog.messages
