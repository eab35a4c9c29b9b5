"""A pool of channels: one per address, a bounded number of them, all closed in the end."""

import pytest
from grpc.aio import UsageError

from tests.support.storage_client import RunningStorage
from tidemark.api.storage.v1.storage_pb2 import DescribeStorageRequest
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.rpc.channel_pool import ChannelPool


async def test_an_address_keeps_its_channel_until_others_need_the_room() -> None:
    async with ChannelPool(channels_max=2) as pool:
        first = await pool.to("127.0.0.1:1")
        await pool.to("127.0.0.1:2")
        again = await pool.to("127.0.0.1:1")
        await pool.to("127.0.0.1:3")

        kept = await pool.to("127.0.0.1:1")

    assert first is again is kept, "the one that was not used for longest leaves first"


async def test_who_asks_at_every_call_never_meets_a_closed_channel(storage: RunningStorage) -> None:
    """S1: whatever else the pool is asked for in between."""
    async with ChannelPool(channels_max=1) as pool:
        held = StorageServiceStub(await pool.to(storage.address))
        await held.DescribeStorage(DescribeStorageRequest())
        await pool.to("127.0.0.1:1")

        asked = StorageServiceStub(await pool.to(storage.address))
        described = await asked.DescribeStorage(DescribeStorageRequest())

        assert described.partitions == 1
        with pytest.raises(UsageError):
            await held.DescribeStorage(DescribeStorageRequest())
