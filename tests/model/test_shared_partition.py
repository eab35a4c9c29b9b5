"""A partition on a store that nodes share: takeovers, lost answers and lost tails."""

import asyncio

import pytest

from storage_svc.engines.engine import EngineFailed
from storage_svc.operations.claim import ClaimPartition
from storage_svc.operations.operation import Operation
from storage_svc.operations.ownership import ConfirmOwnership
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.counters import Claim
from storage_svc.partition.housekeeping import HOUSEKEEPING_MS
from storage_svc.partition.partition import Partition
from tests.support.partition_life import ACK
from tests.support.shared_engine import LostAnswer, SharedEngines
from tests.support.shared_partitions import RUN, Nodes, do, reasons, started
from tidemark.errors import CommitOutcomeUnknown, PartitionFaulty, ReservationNotFound
from tidemark.receipts import Receipt
from tidemark.topics import Topic


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(RUN, id="a publish"),
        pytest.param(Reserve("t/a", "empty", 1), id="a reserve"),
        pytest.param(ConfirmOwnership("t/a", "g", "ada", 1), id="a confirmation of ownership"),
        pytest.param(Reserve("t/none", "g", 1), id="a refusal"),
    ],
)
async def test_a_node_that_lost_its_partition_answers_nothing_and_stays_away(
    nodes: Nodes, operation: Operation[object]
) -> None:
    """S9: also where nothing is written. The outcome is definite: the caller may repeat it."""
    old = await started(nodes)
    await do(old, Reserve("t/a", "g", 1), Reserve("t/a", "empty", 1))
    new = await nodes.start()
    await do(new, RUN)

    with pytest.raises(PartitionFaulty, match="another storage node"):
        await old.submit([operation])

    assert reasons(old) == ["TAKEN_OVER"]
    with pytest.raises(PartitionFaulty, match="TAKEN_OVER"):
        await old.submit([operation])
    await do(new, RUN)
    assert new.state.counters.messages == 3


@pytest.mark.parametrize("lost", LostAnswer)
async def test_a_lost_answer_is_resolved_by_asking(nodes: Nodes, lost: LostAnswer) -> None:
    """S9: the commit is applied once, and answered as if nothing had happened."""
    partition = await started(nodes)
    nodes.store.next_answer = lost

    await do(partition, RUN)

    assert partition.state.counters.messages == 2
    assert len((await do(partition, Reserve("t/a", "g", 10))).slices) == 2
    assert reasons(partition) == []


async def test_a_store_that_does_not_answer_leaves_the_outcome_unknown_and_comes_back(
    nodes: Nodes,
) -> None:
    """S2, S9: nothing is answered that was not confirmed."""
    partition = await started(nodes)
    nodes.store.is_down = True

    with pytest.raises(CommitOutcomeUnknown):
        await partition.submit([RUN])

    nodes.store.is_down = False
    while not partition.is_open:
        await nodes.clock.advance_ms(1_000)
        await asyncio.wait_for(nodes.store.trip(), 60)
    await do(partition, RUN)
    assert partition.state.counters.messages == 2


@pytest.mark.parametrize("operation", [RUN, Reserve("t/none", "g", 1)], ids=["writes", "reads"])
async def test_a_lost_tail_is_reported_and_not_served(
    nodes: Nodes, operation: Operation[object]
) -> None:
    """S9: the node that made the commits notices that they are gone."""
    partition = await started(nodes)
    await do(partition, RUN)
    nodes.store.lose_tail(0, 1)

    with pytest.raises(PartitionFaulty, match="lost"):
        await partition.submit([operation])

    assert reasons(partition) == ["DATA_LOST"]
    assert not partition.is_open


async def _taken_back(nodes: Nodes, *, commits: int) -> tuple[Partition, Partition]:
    """Two nodes: the store has lost the opening of the second, with some commits, and the first
    one, which did not learn of it, has opened the partition again twice since."""
    engines = SharedEngines(nodes.store)
    old = await nodes.start(engines)
    await do(old, PutTopic(Topic("t"), create=True))
    await do(old, RUN)
    mark = nodes.store.stored(0).mark
    new = await nodes.start()
    for _ in range(commits):
        await do(new, RUN)
    nodes.store.lose_tail(0, commits)
    nodes.store.stored(0).mark = mark
    for _ in range(2):
        await old.close()
        old = await nodes.start(engines)
    return old, new


async def test_a_node_whose_opening_was_lost_takes_the_partition_back(nodes: Nodes) -> None:
    """S9, C4: it is the later one, so that the one before stays away for good."""
    old, new = await _taken_back(nodes, commits=0)

    with pytest.raises(PartitionFaulty, match="another storage node"):
        await new.submit([RUN])
    while not new.is_open:
        await nodes.clock.advance_ms(1_000)
        await asyncio.wait_for(nodes.store.trip(), 60)

    assert reasons(new) == []
    await do(new, PutTopic(Topic("u"), create=True))
    with pytest.raises(PartitionFaulty, match="another storage node"):
        await old.submit([RUN])
    assert reasons(old) == ["TAKEN_OVER"]
    await do(new, PutTopic(Topic("v"), create=True))


async def test_a_node_whose_opening_was_lost_with_commits_reports_them(nodes: Nodes) -> None:
    """S9, C6: what it had answered is gone, and the other node has not seen it."""
    _, new = await _taken_back(nodes, commits=2)

    with pytest.raises(PartitionFaulty, match="another storage node"):
        await new.submit([RUN])
    while "DATA_LOST" not in reasons(new):
        await nodes.clock.advance_ms(1_000)
        await asyncio.wait_for(nodes.store.trip(), 60)

    assert not new.is_open
    with pytest.raises(PartitionFaulty, match="DATA_LOST"):
        await new.submit([RUN])
    await new.confirm_loss()
    assert reasons(new) == []


async def test_what_a_lost_tail_had_named_is_not_named_again(nodes: Nodes) -> None:
    """S9: an old receipt or epoch means nothing after the takeover, also where its commit is
    gone."""
    old = await started(nodes)
    claim = Claim("b", "b:1", 1, 1)
    claimed = await do(old, ClaimPartition(claim))
    receipt = (await do(old, Reserve("t/a", "g", 1))).slices[0].receipt
    nodes.store.lose_tail(0, 2)

    new = await nodes.start()
    again = await do(new, Reserve("t/a", "g", 1))

    assert again.slices[0].receipt != receipt
    assert isinstance(await do(new, Settle(receipt, ACK)), ReservationNotFound)
    later = await do(new, ClaimPartition(Claim("c", "c:1", 2, 1)))
    assert later.broker_epoch != claimed.broker_epoch


async def test_a_commit_over_many_queues_reads_them_together(nodes: Nodes) -> None:
    """S9: queues that are not loaded, their reservations and next messages; also new queues, and
    receipts that name queues which do not exist."""
    partition = await started(nodes)
    names = [f"t/{number}" for number in range(50)]
    runs = [RUN._replace(lmq_name=name) for name in names]
    await do(partition, *runs, *runs)
    reserved = await do(partition, *(Reserve(name, "g", 1) for name in names))
    restarted = await nodes.start()
    trips = under_way = 0
    trip = nodes.store.trip

    async def counted() -> None:
        nonlocal trips, under_way
        trips += under_way == 0
        under_way += 1
        await trip()
        under_way -= 1

    nodes.store.trip = counted
    settled = await do(
        restarted,
        *(Settle(each.slices[0].receipt, ACK) for each in reserved),
        *(RUN._replace(lmq_name=f"{name}-new") for name in names),
    )
    receipt = Receipt.decode(reserved[0].slices[0].receipt)
    unknown = await do(
        restarted,
        *(Settle(receipt._replace(queue_id=2**60 + each).encode(), ACK) for each in range(50)),
    )
    reserved = await do(restarted, *(Reserve(name, "g", 5) for name in names))

    assert {type(each) for each in unknown} == {ReservationNotFound}
    assert [each.messages for each in settled[:50]] == [1] * 50
    assert [len(each.slices) for each in reserved] == [1] * 50
    assert trips <= 15


async def test_a_partition_closes_although_its_engine_fails_in_place_of_a_cancellation(
    nodes: Nodes,
) -> None:
    """S9, S5: housekeeping that waits for a store which stood still must not outlive it."""
    partition = await started(nodes)
    asked = asyncio.Event()

    async def free_bytes() -> int:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise EngineFailed("the connection broke") from None
        raise AssertionError("not reached")

    partition.state.engine.free_bytes = free_bytes  # type: ignore[method-assign]
    await nodes.clock.advance_ms(HOUSEKEEPING_MS)
    await asyncio.wait_for(asked.wait(), 60)

    closing = asyncio.create_task(partition.close())
    while not closing.done():
        await nodes.clock.advance_ms(HOUSEKEEPING_MS)
        assert nodes.clock.monotonic_ms() < 100 * HOUSEKEEPING_MS, "it goes on for good"
