"""The storage service on the redis engine, against a real Valkey."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.exchange_client import append, payloads, reserve, reserved, settle
from tests.support.storage_client import CLUSTER_ID, RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON
from tidemark.api.storage.v1.storage_pb2 import ConfirmLossRequest, DescribeStorageRequest
from tidemark.errors import DiskFull, PartitionFaulty, StoreNotFit, Unavailable
from tidemark.settings import StorageSettings
from tidemark.settings.variables import SettingsError

Start = Callable[..., Awaitable[RunningStorage]]


@pytest.fixture
def start(start_storage: StartStorage, durable_valkey: str) -> Start:
    with redis.Redis.from_url(durable_valkey) as server:
        server.flushall()

    async def start(**settings: Any) -> RunningStorage:
        return await start_storage(
            engine="redis", redis_url=durable_valkey, redis_durability="local", **settings
        )

    return start


async def described(storage: RunningStorage) -> Any:
    return await storage.storage.DescribeStorage(DescribeStorageRequest())


async def test_what_was_answered_is_there_after_a_restart_and_receipts_stay_good(
    start: Start,
) -> None:
    """S2, S9: the node keeps nothing; the directory is not even created."""
    storage = await start()
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"one", b"two"))
        held = await reserved(exchange, "jobs/a")

    await storage.restart()

    async with storage.exchange() as exchange:
        settled = await exchange.ask(settle(held.receipt))
        await exchange.ask(append("jobs/a", b"three"))
        again = await reserved(exchange, "jobs/a")
    assert settled.messages == 2
    assert again.first_offset == 2
    assert (await described(storage)).engine == "redis"
    assert not storage.data_dir.exists()


async def test_a_second_storage_node_takes_over_and_the_first_confirms_nothing(
    start: Start, tmp_path: Path
) -> None:
    """S9: both believe that they hold the partition. The lower epoch writes and answers nothing."""
    old = await start()
    await old.create_topic("jobs")
    async with old.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"one"))
        new = await start()

        with pytest.raises((PartitionFaulty, Unavailable)):
            await exchange.ask(append("jobs/a", b"stale"))

    async with new.exchange() as exchange:
        assert (await reserved(exchange, "jobs/a")).count == 1
        await exchange.ask(append("jobs/b", b"fresh"))
    ((fault,),) = [each.faults for each in (await described(old)).held]
    assert fault.reason == "TAKEN_OVER"


async def test_a_store_that_went_back_is_noticed_by_a_claim_and_confirmed(
    start: Start, durable_valkey: str
) -> None:
    """S9: as after a failover to a replica that lagged behind, while storage was away."""
    storage = await start()
    await storage.create_topic("jobs")
    with redis.Redis.from_url(durable_valkey) as server:
        async with storage.exchange() as exchange:
            await exchange.ask(append("jobs/a", b"kept"))
            replica = {key: server.dump(key) for key in server.scan_iter()}
            await exchange.ask(append("jobs/a", b"lost"))
        await storage.stop()
        server.flushall()
        for key, value in replica.items():
            server.restore(key, 0, value)
    await storage.start()

    with pytest.raises(PartitionFaulty, match=f"commit {exchange.commit} was answered"):
        await storage.claim(witnessed_commit=exchange.commit)

    confirmed = await storage.storage.ConfirmLoss(ConfirmLossRequest(partition=0))
    assert confirmed.witnessed_commit == exchange.commit
    async with storage.exchange(witnessed_commit=exchange.commit) as exchange:
        await exchange.ask(append("jobs/a", b"later"))
        got = (await exchange.ask(reserve("jobs/a"))).slices
    assert [each for slice_ in got for each in payloads(slice_.body)] == [b"kept", b"later"]


async def test_the_number_of_partitions_comes_from_the_stored_data(start: Start) -> None:
    """S5: a node that does not set it opens what is there."""
    await start(partitions=3)

    storage = await start(partitions=0)

    assert (await described(storage)).partitions == 3


async def test_a_node_does_not_start_on_a_server_that_would_lose_data(
    start: Start, durable_valkey: str
) -> None:
    """S9: the reason is one line, for the operator."""
    with redis.Redis.from_url(durable_valkey) as server:
        server.config_set("appendfsync", "everysec")
        try:
            with pytest.raises(StoreNotFit, match="appendfsync everysec"):
                await start()
        finally:
            server.config_set("appendfsync", "always")


async def test_publishes_are_refused_past_the_memory_watermark_and_settlements_are_not(
    start: Start, durable_valkey: str
) -> None:
    """S9: the memory of the server is watched as a disk is."""
    storage = await start()
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"one"))

    await storage.restart(disk_free_bytes_min=1 << 50)

    async with storage.exchange() as exchange:
        with pytest.raises(DiskFull):
            await exchange.ask(append("jobs/a", b"two"))
        await exchange.ask(settle((await reserved(exchange, "jobs/a")).receipt))


async def test_consumption_is_recorded_only_where_a_topic_asks_for_it(
    start: Start, durable_valkey: str
) -> None:
    """R13, S9: a record of each settlement would fill the memory of the server."""
    storage = await start(partitions=1)
    await storage.create_topic("jobs")
    await storage.create_topic("recorded", consumption_records=CONSUMPTION_RECORDS_ON)
    consumed = "{tidemark/" + CLUSTER_ID + "/0}:consumed<"
    with redis.Redis.from_url(durable_valkey) as server:
        async with storage.exchange() as exchange:
            for topic, records in (("jobs", 0), ("recorded", 1)):
                await exchange.ask(append(topic, b"one"))
                await exchange.ask(settle((await reserved(exchange, topic)).receipt))

                assert server.zcard(consumed) == records


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": "redis"}, "TIDEMARK_REDIS_URL"),
        (
            {
                "engine": "redis",
                "redis_url": "redis://a",
                "storage_addresses": ("127.0.0.1:7410", "b:1"),
            },
            "TIDEMARK_STORAGE_ADDRESSES",
        ),
    ],
)
def test_settings_that_do_not_fit_the_engine_are_refused(
    settings: dict[str, Any], named: str
) -> None:
    """S5."""
    with pytest.raises(SettingsError, match=named):
        StorageSettings(**settings)
