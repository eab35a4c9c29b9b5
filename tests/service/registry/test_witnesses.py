"""Commit numbers in the registry: the highest stays, and garbage is no number (S9)."""

from contextlib import AsyncExitStack

import pytest

from storage_svc.operations.partition_time import StampTime
from storage_svc.placement.witness_reports import WitnessReports
from tests.support.shared_partitions import RUN, Nodes, do, reasons, started
from tests.support.valkey import Members
from tidemark.clock import ManualClock
from tidemark.errors import PartitionFaulty, RegistryUnavailable
from tidemark.registry.redis_registry import COMMIT_MAX, RedisRegistry

EPOCH = 2**60
"""A double cannot hold both neighbours."""


@pytest.fixture
def witnesses(cluster: Members) -> RedisRegistry:
    return cluster.registry()


async def test_the_highest_number_of_each_partition_stays(witnesses: RedisRegistry) -> None:
    """S9: a node that was deposed reports lower ones for a while."""
    await witnesses.report_commits({0: EPOCH + 1, 3: 9})
    await witnesses.report_commits({0: EPOCH + 2, 3: 10})
    await witnesses.report_commits({0: EPOCH + 1, 3: 8})

    found = [await witnesses.highest_commit(number) for number in (0, 1, 3)]

    assert found == [EPOCH + 2, 0, 10]


@pytest.mark.parametrize("garbage", ["", "x", "9", "9" * 20, "-" + "1" * 19])
async def test_garbage_is_no_number_and_is_replaced(
    cluster: Members, witnesses: RedisRegistry, garbage: str
) -> None:
    """S9: it must not stop a partition."""
    await cluster.redis.hset(cluster.key("commits"), "0", garbage)

    found = await witnesses.highest_commit(0)
    await witnesses.report_commits({0: 7})
    await witnesses.report_commits({0: COMMIT_MAX})

    assert found == 0
    assert await witnesses.highest_commit(0) == COMMIT_MAX


async def test_a_registry_that_is_away_reports_that() -> None:
    """S9."""
    witnesses = RedisRegistry("redis://user:secret@127.0.0.1:1", "c", "storages")

    for call in (witnesses.report_commits({0: 1}), witnesses.highest_commit(0)):
        with pytest.raises(RegistryUnavailable) as away:
            await call
        assert "secret" not in str(away.value)
    await witnesses.close()


async def test_a_node_reports_its_commits_and_another_opens_nothing_behind_them(
    witnesses: RedisRegistry, clock: ManualClock
) -> None:
    """S9: no broker is left that has seen the lost commits."""
    reports = WitnessReports(witnesses, clock)
    async with AsyncExitStack() as stack:
        nodes = Nodes(stack)
        node = await started(nodes)
        await do(node, RUN)
        await reports.run_once([node])
        await node.close()
        await reports.run_once([node])
        again = await nodes.start(witness=reports.highest)
        assert reasons(again) == []
        await again.close()
        nodes.store.lose_tail(0, 1)

        behind = await nodes.start(witness=reports.highest)

        assert reasons(behind) == ["DATA_LOST"]
        await behind.confirm_loss()
        await reports.run_once([behind])
        assert await witnesses.highest_commit(0) == behind.last_commit


async def test_a_loss_that_a_node_has_noticed_is_known_after_its_end(
    witnesses: RedisRegistry, clock: ManualClock
) -> None:
    """C6: of commits that were made since the last report. The node that knows of it, and did not
    open the partition again to see what is left, is gone."""
    reports = WitnessReports(witnesses, clock)
    async with AsyncExitStack() as stack:
        nodes = Nodes(stack)
        node = await started(nodes)
        await reports.run_once([node])
        await do(node, RUN)
        nodes.store.lose_tail(0, 1)
        with pytest.raises(PartitionFaulty):
            await node.verify()
        assert reasons(node) == ["DATA_LOST"]

        await reports.run_once([node])
        await node.close()

        assert reasons(await nodes.start(witness=reports.highest)) == ["DATA_LOST"]


async def test_partitions_are_opened_while_the_registry_is_away(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """S9: it advises. Fewer losses are noticed then."""
    witnesses = RedisRegistry("redis://127.0.0.1:1", "c", "storages")
    reports = WitnessReports(witnesses, clock)
    async with AsyncExitStack() as stack:
        node = await Nodes(stack).start(witness=reports.highest)
        await node.call(StampTime())
        await reports.run_once([node])

        assert reasons(node) == []
        assert "without asking the registry" in caplog.text
        assert "commits are not reported" in caplog.text
    await witnesses.close()
