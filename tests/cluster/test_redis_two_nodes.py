"""Two storage nodes, as processes, that both believe they hold the same partition on one Valkey."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.layout import mark_key
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    outcome_of,
    payloads,
    reserve,
    reserved,
    settle,
)
from tests.support.local_broker import in_time
from tests.support.storage_client import CLUSTER_ID, StorageClient, storage_process
from tests.support.valkey import valkey
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.api.storage.v1.exchange_pb2 import ConfirmOwnership, TakeOwnership
from tidemark.api.storage.v1.storage_pb2 import GetQueueRequest
from tidemark.errors import TidemarkError
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

Start = Callable[[str], Awaitable[tuple[ServiceProcess, StorageClient]]]


@pytest.fixture
def server_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if not request.config.option.redis:
        pytest.skip("part of make test-redis")
    with valkey(tmp_path / "valkey", durable=True) as server:
        yield server.connection_url


@pytest.fixture
async def start(server_url: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a storage node of the cluster; each opens the only partition."""
    async with AsyncExitStack() as running:

        async def start(name: str) -> tuple[ServiceProcess, StorageClient]:
            process = storage_process(
                tmp_path / name,
                tmp_path / f"{name}.log",
                partitions="1",
                storage_engine="redis",
                redis_url=server_url,
            )
            running.push_async_callback(process.kill)
            await process.start()
            await process.wait_healthy()
            channel = await running.enter_async_context(open_channel(process.address))
            return process, StorageClient(channel)

        yield start


async def is_refused(answer: Awaitable[Any]) -> bool:
    """Whether an answer is an error; a call that is answered with success is not."""
    try:
        outcome = outcome_of(await in_time(answer))
    except TidemarkError:
        return True
    return isinstance(outcome, TidemarkError)


async def refused_all(exchange: ExchangeClient, *operations: Any) -> list[bool]:
    return [await is_refused(each) for each in await exchange.send(*operations)]


async def test_the_redis_node_with_the_lower_epoch_writes_nothing_and_confirms_nothing(
    start: Start, server_url: str
) -> None:
    """S9, E8: it was stopped while the other opened the partition, and does not know of it. What
    reached it before, and what reaches it after, is refused."""
    old_process, old = await start("old")
    await old.create_topic("jobs")
    await old.create_topic("own", subscription=SUBSCRIPTION_KIND_EXCLUSIVE)
    async with AsyncExitStack() as stack:
        at_old = await stack.enter_async_context(old.exchange())
        await at_old.ask_all(append("jobs/a", b"1", b"2"), append("own/a", b"1"))
        held = await reserved(at_old, "jobs/a", 1)
        take = TakeOwnership(lmq_name="own/a", group="g", client_id="ada")
        owned = await at_old.ask(operation(take_ownership=take))
        confirm = ConfirmOwnership(lmq_name="own/a", group="g", client_id="ada", epoch=owned.epoch)
        asked = [
            append("jobs/a", b"stale"),
            reserve("jobs/a"),
            reserve("jobs/a", group="empty"),
            settle(held.receipt),
            operation(confirm_ownership=confirm),
        ]

        old_process.signal(signal.SIGSTOP)
        waiting = await at_old.send(*asked)
        _, new = await start("new")
        at_new = await stack.enter_async_context(new.exchange())
        await at_new.ask(append("jobs/a", b"3"))
        with redis.Redis.from_url(server_url) as server:
            mark = server.hgetall(mark_key(Identity(CLUSTER_ID, 0, 1)))
            old_process.signal(signal.SIGCONT)

            assert [await is_refused(each) for each in waiting] == [True] * len(asked)
            assert await refused_all(at_old, *asked) == [True] * len(asked)
            with pytest.raises(TidemarkError):
                await old.claim()
            with pytest.raises(TidemarkError):
                await old.storage.GetQueue(GetQueueRequest(partition=0, lmq_name="jobs/a"))
            assert server.hgetall(mark_key(Identity(CLUSTER_ID, 0, 1))) == mark

        (info,) = [await old.info()]
        assert [fault.reason for fault in info.faults] == ["TAKEN_OVER"]
        (settled,) = [await at_new.ask(settle(held.receipt))]
        assert settled.messages == 1
        rest = (await at_new.ask(reserve("jobs/a"))).slices
        assert [each for slice_ in rest for each in payloads(slice_.body)] == [b"2", b"3"]
        confirmed = await at_new.ask(operation(confirm_ownership=confirm))
        assert confirmed is not None
