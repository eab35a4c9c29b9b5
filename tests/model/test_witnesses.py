"""A partition that is behind a witness is DATA_LOST, until an operator confirms that (S9)."""

import asyncio

import pytest

from storage_svc.engines.engine import Batch
from storage_svc.operations.claim import ClaimPartition
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.counters import Claim
from storage_svc.partition.partition import Partition
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.partition_life import ACK
from tests.support.shared_engine import SharedEngines
from tests.support.shared_partitions import RUN, Nodes, do, reasons, started
from tidemark.errors import (
    CommitOutcomeUnknown,
    Fenced,
    InvalidArgument,
    PartitionFaulty,
    ReservationNotFound,
)
from tidemark.topics import Topic

CLAIM = Claim("b", "b:1", 1, 1)


async def claim(partition: Partition, witnessed_commit: int = 0) -> None:
    await do(partition, ClaimPartition(CLAIM, witnessed_commit=witnessed_commit))


async def lost_tail(nodes: Nodes, commits: int = 2) -> int:
    """A node that has ended, and whose last commits are gone; returns the last that it answered."""
    node = await started(nodes)
    await claim(node)
    for _ in range(3):
        await do(node, RUN)
    await node.close()
    nodes.store.lose_tail(0, commits)
    return node.last_commit


async def behind(nodes: Nodes, witnessed: int) -> Partition:
    """A node that a broker has shown to be behind."""
    node = await nodes.start()
    with pytest.raises(PartitionFaulty, match="has lost commits"):
        await claim(node, witnessed)
    return node


async def test_a_claim_that_witnessed_a_lost_commit_stops_the_partition_everywhere(
    nodes: Nodes,
) -> None:
    """S9: nothing is served, here and where it is opened next; the reason names both commits."""
    witnessed = await lost_tail(nodes)
    node = await behind(nodes, witnessed)

    another = await nodes.start()

    for each in (node, another):
        with pytest.raises(PartitionFaulty, match="DATA_LOST"):
            await claim(each)
        (fault,) = each.health.faults
        assert f"commit {witnessed} was answered" in fault.detail
        assert f"stored is {witnessed - 2}" in fault.detail
        with pytest.raises(PartitionFaulty, match="DATA_LOST"):
            each.reader()


async def test_a_lost_commit_is_missed_after_another_node_has_made_more(nodes: Nodes) -> None:
    """S9: numbers that another node gave do not stand in for those that are lost."""
    witnessed = await lost_tail(nodes)
    between = await nodes.start()
    for _ in range(10):
        await do(between, RUN)

    await behind(nodes, witnessed)


async def test_a_claim_that_witnessed_what_is_stored_is_taken(nodes: Nodes) -> None:
    """S9: at the same node, and over takeovers."""
    node = await started(nodes)
    witnessed = [node.last_commit]
    for _ in range(3):
        await claim(node, witnessed[-1])
        await do(node, RUN)
        witnessed.append(node.last_commit)
        node = await nodes.start()
        witnessed.append(node.last_commit)

    for each in witnessed:
        await claim(node, each)

    assert reasons(node) == []


async def test_a_deposed_node_does_not_take_the_commits_of_another_for_lost(nodes: Nodes) -> None:
    """S9: the broker was at the other node since; a false alarm would stop the partition."""
    old = await started(nodes)
    new = await nodes.start()
    await do(new, RUN)

    with pytest.raises(PartitionFaulty, match="another storage node"):
        await claim(old, new.last_commit)

    assert reasons(old) == ["TAKEN_OVER"]
    await claim(await nodes.start(), new.last_commit)


async def test_a_node_that_opens_its_partition_again_notices_what_is_gone(nodes: Nodes) -> None:
    """S9: a failover between a commit of unknown outcome and the reopening."""
    node = await started(nodes)
    await do(node, RUN)
    nodes.store.is_down = True
    with pytest.raises(CommitOutcomeUnknown):
        await do(node, RUN)
    nodes.store.lose_tail(0, 1)

    nodes.store.is_down = False

    await until_lost(nodes, node)
    assert not node.is_open


async def test_a_node_opens_nothing_that_is_behind_the_registry(nodes: Nodes) -> None:
    """S9: no broker is needed that has seen the lost commits."""
    witnessed = await lost_tail(nodes)

    async def registry(partition: int) -> int:
        return witnessed

    node = await nodes.start(witness=registry)

    assert reasons(node) == ["DATA_LOST"]
    assert reasons(await nodes.start()) == ["DATA_LOST"]


async def until_lost(nodes: Nodes, node: Partition) -> None:
    for _ in range(100):
        await nodes.clock.advance_ms(1_000)
        await nodes.store.trip()
        if "DATA_LOST" in reasons(node):
            return
    raise AssertionError(f"no loss is reported: {node.health.faults}")


def not_storing_the_loss(nodes: Nodes) -> FaultyEngines:
    """Engines of a node that fails to store its first loss."""

    def is_loss(batch: Batch) -> bool:
        return any(key == b"loss" for _, key, *_ in batch.operations)

    engines = FaultyEngines(SharedEngines(nodes.store))
    engines.next_commit, engines.is_meant = Fault.BEFORE_WRITING, is_loss
    return engines


@pytest.mark.parametrize("witness", ["broker", "registry"])
async def test_a_loss_that_could_not_be_stored_is_stored_when_the_partition_is_opened_again(
    nodes: Nodes, witness: str
) -> None:
    """C6: it would be forgotten with the witness otherwise, and what is left would be served."""
    witnessed = await lost_tail(nodes)
    engines = not_storing_the_loss(nodes)

    async def registry(partition: int) -> int:
        return witnessed if witness == "registry" else 0

    node = await nodes.start(engines, witness=registry)
    if witness == "broker":
        with pytest.raises(PartitionFaulty, match="has lost commits"):
            await claim(node, witnessed)
    await until_lost(nodes, node)
    await nodes.clock.advance_ms(1_000)
    assert engines.next_commit is None
    await node.close()

    assert reasons(await nodes.start()) == ["DATA_LOST"]


async def noticed_while_away(nodes: Nodes) -> Partition:
    """A node that has noticed a loss by itself, of a store that is not there to take it."""
    node = await started(nodes)
    nodes.store.lose_tail(0, 1)
    nodes.store.is_down = True
    with pytest.raises(PartitionFaulty, match="has lost commits"):
        await node.verify()
    assert reasons(node) == ["DATA_LOST"]
    return node


async def test_a_loss_that_a_node_has_noticed_is_stored_once_the_store_takes_it(
    nodes: Nodes,
) -> None:
    """C6: no other witness is left after the node."""
    node = await noticed_while_away(nodes)
    await nodes.clock.advance_ms(60_000)
    nodes.store.is_down = False
    await nodes.clock.advance_ms(60_000)
    await node.close()

    assert reasons(await nodes.start()) == ["DATA_LOST"]


async def test_a_loss_that_is_still_to_be_stored_can_be_confirmed(nodes: Nodes) -> None:
    """C6: the operator need not wait for it."""
    node = await noticed_while_away(nodes)
    await nodes.clock.advance_ms(60_000)
    nodes.store.is_down = False

    await asyncio.wait_for(node.confirm_loss(), 60)

    assert reasons(node) == []
    await do(node, RUN)
    await node.close()
    assert reasons(await nodes.start()) == []


async def test_a_partition_whose_loss_is_still_to_be_stored_is_closed_at_any_time(
    nodes: Nodes,
) -> None:
    """C6."""
    node = await noticed_while_away(nodes)

    await asyncio.wait_for(node.close(), 60)


async def test_a_confirmed_loss_is_over_for_all_witnesses(nodes: Nodes) -> None:
    """S9: the partition serves what is left, also for brokers that saw more of what is gone."""
    witnessed = await lost_tail(nodes)
    node = await behind(nodes, witnessed - 1)

    loss = await node.confirm_loss()

    assert loss == (witnessed - 1, witnessed - 2)
    assert await node.confirm_loss() == loss
    assert reasons(node) == []
    assert len((await do(node, Reserve("t/a", "g", 10))).slices) == 2
    later = await nodes.start()
    for each in (node.last_commit, witnessed, witnessed - 2):
        await claim(later, each)
    assert reasons(later) == []


async def test_commits_after_a_confirmed_loss_can_be_lost_as_well(nodes: Nodes) -> None:
    """S9."""
    node = await behind(nodes, await lost_tail(nodes))
    await node.confirm_loss()
    await do(node, RUN)
    await node.close()
    nodes.store.lose_tail(0, 1)

    again = await behind(nodes, node.last_commit)

    assert (await again.confirm_loss()).witnessed == node.last_commit


async def test_a_confirmation_that_is_lost_is_made_again_under_other_numbers(nodes: Nodes) -> None:
    """S9: a witness of the first one would take the second for it otherwise."""
    node = await behind(nodes, await lost_tail(nodes))
    await node.confirm_loss()
    first = node.last_commit
    await node.close()
    nodes.store.lose_tail(0, 1)
    again = await nodes.start()
    assert reasons(again) == ["DATA_LOST"]

    await again.confirm_loss()

    assert again.last_commit != first
    assert not again.state.numbers.is_stored(first)


async def test_a_broker_learns_of_a_confirmed_loss_when_it_claims(nodes: Nodes) -> None:
    """S9, E1: it is fenced until then. What it knows of owners may be undone."""
    node = await started(nodes)
    claimed = await do(node, ClaimPartition(CLAIM))
    await do(node, RUN)
    nodes.store.lose_tail(0, 1)
    with pytest.raises(PartitionFaulty):
        await do(node, RUN)
    witnessed = node.last_commit
    await node.confirm_loss()

    (fenced,) = await node.submit([RUN], broker_epoch=claimed.broker_epoch)
    again = await do(node, ClaimPartition(CLAIM, claimed.broker_epoch, 0, witnessed))
    later = await do(node, ClaimPartition(CLAIM, again.broker_epoch, 0, node.last_commit))

    assert isinstance(fenced, Fenced)
    assert again.broker_epoch > claimed.broker_epoch
    assert (again.lost_commits, later.lost_commits) == (True, False)


async def test_what_lost_commits_named_is_not_named_again(nodes: Nodes) -> None:
    """S9: old receipts settle nothing, and topics get versions that no partition has seen."""
    node = await started(nodes)
    receipt = (await do(node, Reserve("t/a", "g", 1))).slices[0].receipt
    lost = await do(node, PutTopic(Topic("u"), create=True))
    await node.close()
    nodes.store.lose_tail(0, 2)
    after = await behind(nodes, node.last_commit)

    await after.confirm_loss()

    assert (await do(after, Reserve("t/a", "g", 1))).slices[0].receipt != receipt
    assert isinstance(await do(after, Settle(receipt, ACK)), ReservationNotFound)
    assert (await do(after, PutTopic(Topic("v"), create=True))).version > lost.version


async def test_a_loss_is_confirmed_only_where_there_is_one(nodes: Nodes) -> None:
    """S9."""
    node = await started(nodes)

    with pytest.raises(InvalidArgument, match="has lost nothing"):
        await node.confirm_loss()


async def test_a_loss_is_not_confirmed_at_a_node_that_was_deposed(nodes: Nodes) -> None:
    """S9: the operator asks the node that holds the partition."""
    node = await behind(nodes, await lost_tail(nodes))
    another = await nodes.start()

    with pytest.raises(PartitionFaulty, match="TAKEN_OVER"):
        await node.confirm_loss()

    await another.confirm_loss()
    await do(another, RUN)


async def test_a_partition_with_a_loss_is_closed_at_any_time(nodes: Nodes) -> None:
    """S9: also while it waits for an operator."""
    node = await behind(nodes, await lost_tail(nodes))

    await asyncio.wait_for(node.close(), 60)
