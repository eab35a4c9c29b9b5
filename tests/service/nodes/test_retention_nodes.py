"""Retention over several storage nodes, of which some are away."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from spark_batch.host import JobHost
from spark_batch.passes.outcome import JobName
from spark_batch.passes.without_work import pass_without_work
from spark_batch.planner.process import PlannerProcess
from spark_batch.scheduler import HOLD_MS
from tests.support.storage_nodes import StorageNodes, storage_nodes
from tidemark.clock import SystemClock
from tidemark.errors import Unavailable
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import RetentionSettings
from tidemark.system_metrics.aggregates import Aggregate

FIGURE = Aggregate("figure", 1, 1.0, 1.0, 1.0, 1.0)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[StorageNodes]:
    """Three nodes with four partitions."""
    async with storage_nodes(tmp_path) as several:
        for node in range(3):
            await several.start_node(node)
        await several.until_held(n0=[0, 3], n1=[1], n2=[2])
        yield several


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    async with ChannelPool() as channels:
        yield channels


def _host(nodes: StorageNodes, channels: ChannelPool, holder: str) -> JobHost:
    settings, clock = _settings(nodes), SystemClock()
    return JobHost(settings, channels, holder, PlannerProcess(settings, clock), clock)


def _settings(nodes: StorageNodes) -> RetentionSettings:
    return RetentionSettings(storage_addresses=nodes.addresses)


async def test_one_scheduler_runs_the_jobs_while_any_node_answers(
    nodes: StorageNodes, channels: ChannelPool
) -> None:
    """C1, R11: the lease does not depend on the first address, and neither do metrics."""
    first, second = _host(nodes, channels, "a"), _host(nodes, channels, "b")
    for away in (None, 0, 1):
        if away is not None:
            await nodes.stop_node(away)
        await first.check()
        assert await first.hold(HOLD_MS) == (True, "a")
        assert await second.hold(HOLD_MS) == (False, "a")
        await first.record([FIGURE])

    await first.hold(0)
    assert await second.hold(HOLD_MS) == (True, "b")
    await nodes.stop_node(2)
    with pytest.raises(Unavailable):
        await first.check()


async def test_a_pass_reports_the_partitions_of_a_node_that_is_away_and_serves_the_others(
    nodes: StorageNodes,
) -> None:
    """C1, R11: of the nodes, only one that holds the topics is needed."""
    await nodes.stop_node(1)

    done = await asyncio.to_thread(
        pass_without_work, _settings(nodes), JobName.RETENTION, False, SystemClock()
    )

    assert done is not None
    assert list(done.failed) == [1]
    assert nodes.addresses[1] in done.failed[1]
