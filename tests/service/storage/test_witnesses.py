"""What a storage node answers it still holds, and what brokers saw answered is still there (S9)."""

import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests.support.exchange_client import append, reserved
from tests.support.shared_engine import SharedEngines, SharedStore
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import retention_pb2, storage_pb2
from tidemark.errors import InvalidArgument, PartitionFaulty, TidemarkError
from tidemark.rpc.witnesses import witness_of

READS: dict[str, Any] = {
    "ListQueues": storage_pb2.ListQueuesRequest(),
    "GetQueue": storage_pb2.GetQueueRequest(lmq_name="jobs/a"),
    "PeekQueue": storage_pb2.PeekQueueRequest(lmq_name="jobs/a", max_messages=1),
    "ListDeadLetters": storage_pb2.ListDeadLettersRequest(lmq_name="jobs/a"),
    "ListOutbox": storage_pb2.ListOutboxRequest(),
    "GetTopic": storage_pb2.GetTopicRequest(name="jobs"),
    "ListTopics": storage_pb2.ListTopicsRequest(),
    "ScanPartition": storage_pb2.ScanPartitionRequest(kind=storage_pb2.SCAN_KIND_SCHEDULES_DUE),
    "ScanTable": retention_pb2.ScanTableRequest(table=retention_pb2.SCAN_TABLE_NAME_QUEUES),
    "ListRetentionHistory": retention_pb2.ListRetentionHistoryRequest(partition=0),
    "NextDue": retention_pb2.NextDueRequest(types=[retention_pb2.RETENTION_TYPE_INACTIVE_QUEUE]),
}
"""Every call that reads beside the writer."""
WITNESSED = (
    "ListQueues",
    "GetQueue",
    "PeekQueue",
    "ListDeadLetters",
    "ListOutbox",
    "GetTopic",
    "ListTopics",
)
"""Those that brokers make."""


async def read(storage: RunningStorage, name: str, partition: int) -> str:
    """The reason for which a node answers nothing; "" if it answers."""
    request = type(READS[name])()
    request.CopyFrom(READS[name])
    stub = storage.storage if hasattr(storage.storage, name) else storage.retention
    try:
        if name == "NextDue":
            return str((await stub.NextDue(request)).partitions[partition].error)
        request.partition = partition
        call = getattr(stub, name)(request)
        _ = [each async for each in call] if name == "ScanTable" else await call
    except PartitionFaulty as error:
        return error.detail
    return ""


async def test_a_deposed_node_answers_no_read(start_storage: StartStorage) -> None:
    """S9: what it has in memory, or finds in the store, another node may have changed. A refusal,
    such as that there is no queue, is an answer as well."""
    store = SharedStore()
    partitions = len(READS)
    old = await start_storage(engines=SharedEngines(store), partitions=partitions)
    await start_storage(engines=SharedEngines(store), partitions=partitions)

    refused = {name: await read(old, name, number) for number, name in enumerate(READS)}

    assert {name for name, why in refused.items() if "another storage node" in why} == set(READS)


async def test_a_call_of_a_broker_that_saw_a_lost_commit_is_refused_and_reports_the_loss(
    start_storage: StartStorage,
) -> None:
    """C6: before its claim arrives. An empty list, or that there is no queue, would be an answer
    from what is left; a topic would be stored there."""
    asked = {
        **{name: READS[name] for name in WITNESSED},
        "PutTopic": storage_pb2.PutTopicRequest(topic=topic_pb2.Topic(name="new"), create=True),
        "DeleteTopic": storage_pb2.DeleteTopicRequest(name="jobs"),
    }

    for name, request in asked.items():
        storage = await start_storage(engines=SharedEngines(SharedStore()), partitions=1)
        call = getattr(storage.storage, name)
        assert await refusal(call(request, metadata=witness_of(0))) != "PARTITION_FAULTY"
        for wrong in ("x", "-1", str(2**62 + 1), "9" * 5_000):
            told = (("tidemark-witnessed-commit", wrong),)
            assert await refusal(call(request, metadata=told)) == "INVALID_ARGUMENT"

        refused = await refusal(call(request, metadata=witness_of(2**61)))

        assert (name, refused) == (name, "PARTITION_FAULTY")
        assert [each.reason for each in (await storage.info()).faults] == ["DATA_LOST"]


async def refusal(call: Awaitable[Any]) -> str:
    """The reason for which a call fails; "" if it succeeds."""
    try:
        await call
    except TidemarkError as error:
        return error.reason
    return ""


async def test_an_answer_names_a_commit_that_a_later_claim_can_bring(
    start_storage: StartStorage,
) -> None:
    """S9: over a restart; a partition that has it takes the claim."""
    storage = await start_storage()
    await storage.create_topic("jobs")
    claimed = await storage.claim()
    async with storage.bound(0, claimed.broker_epoch) as exchange:
        await exchange.ask(append("jobs/a", b"one"))
    answered = exchange.commit

    await storage.restart()

    assert answered > claimed.commit > 0
    async with storage.exchange(witnessed_commit=answered) as exchange:
        assert (await reserved(exchange, "jobs/a")).count == 1
    with pytest.raises(InvalidArgument):
        await storage.claim(witnessed_commit=2**63)


@pytest.mark.rocksdb(reason="its files are put back")
async def test_an_old_backup_is_noticed_by_a_broker_and_can_be_confirmed(
    start_storage: StartStorage, tmp_path: Path
) -> None:
    """C6, S9: nothing is served, over restarts as well, until an operator confirms the loss."""
    storage = await start_storage()
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"one"))
        old_receipt = (await reserved(exchange, "jobs/a")).receipt
        restored = exchange.commit
    await storage.stop()
    shutil.copytree(storage.data_dir, tmp_path / "backup")
    await storage.restart()
    async with storage.exchange(witnessed_commit=restored) as exchange:
        await exchange.ask(append("jobs/a", b"two"))
        second = await reserved(exchange, "jobs/a")
        witnessed = exchange.commit
    await storage.stop()
    shutil.rmtree(storage.data_dir)
    shutil.copytree(tmp_path / "backup", storage.data_dir)
    await storage.restart()

    with pytest.raises(PartitionFaulty, match=f"commit {witnessed} was answered"):
        await storage.claim(witnessed_commit=witnessed)

    await storage.restart()
    ((fault,),) = [(await storage.info()).faults]
    assert fault.reason == "DATA_LOST"
    with pytest.raises(PartitionFaulty, match="DATA_LOST"):
        await storage.claim()
    request = storage_pb2.ConfirmLossRequest(partition=0)
    confirmed = await storage.storage.ConfirmLoss(request)
    assert confirmed.witnessed_commit == witnessed
    assert await storage.storage.ConfirmLoss(request) == confirmed
    async with storage.exchange(witnessed_commit=witnessed) as exchange:
        await exchange.ask(append("jobs/a", b"other"))
        third = await reserved(exchange, "jobs/a")
    assert third.first_offset == second.first_offset
    assert third.reservation_id > second.reservation_id
    assert old_receipt != third.receipt


async def test_a_partition_that_lost_nothing_has_nothing_to_confirm(
    start_storage: StartStorage,
) -> None:
    """S9."""
    storage = await start_storage()

    with pytest.raises(InvalidArgument, match="has lost nothing"):
        await storage.storage.ConfirmLoss(storage_pb2.ConfirmLossRequest(partition=0))
