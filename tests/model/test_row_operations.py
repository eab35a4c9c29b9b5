"""How many rows a partition writes and deletes for the work that Tidemark is made for."""

import pytest

from storage_svc.engines.engine import Table
from storage_svc.engines.queue_rows import SETTLED_INLINE_MAX
from storage_svc.operations.loading import UnloadOutcome, Unmaterialize
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from tests.support.partition_life import ACK, NACK, Life
from tidemark.errors import AlreadySettled
from tidemark.limits import PRODUCER_SEQUENCES_MAX

QUEUES = 64
ROUNDS_BEFORE = PRODUCER_SEQUENCES_MAX // QUEUES + 1
"""After so many, each publish pushes another one out of the window of its producer."""

ROUNDS = 40


async def test_a_cycle_of_one_message_takes_few_row_operations(life: Life) -> None:
    """One message to each of many queues, delivered and acked; each step is one commit."""
    await life.topic("t")
    for number in range(ROUNDS_BEFORE):
        await _run_round(life, number)
    before = life.engines.row_operations.copy()

    for number in range(ROUNDS_BEFORE, ROUNDS_BEFORE + ROUNDS):
        await _run_round(life, number)

    counted = life.engines.row_operations - before
    cycles = ROUNDS * QUEUES
    # Counters of the partition: once per commit, whatever it holds.
    per_cycle = {table: n / cycles for table, n in counted.items() if table is not Table.META}
    assert sum(per_cycle.values()) <= 8, per_cycle


async def test_a_queue_that_was_used_once_is_unloaded_without_writing_anything(life: Life) -> None:
    """I1: an idle queue costs nothing; a repeated settlement still gets its answer (V6)."""
    await life.topic("t")
    await life.do(life.run("t/a", 1))
    (slice_,) = (await life.do(Reserve("t/a", "default", 1))).slices
    await life.do(Settle(slice_.receipt, ACK))
    before = life.engines.commits

    unloaded = await life.do(Unmaterialize("t/a"))

    assert (unloaded, life.engines.commits) == (UnloadOutcome.EVICTED, before)
    assert (await life.do(Settle(slice_.receipt, ACK))).messages == 0


@pytest.mark.parametrize("messages", [1, SETTLED_INLINE_MAX, 3 * SETTLED_INLINE_MAX + 1])
async def test_settlements_are_repeatable_after_a_restart_wherever_they_are_stored(
    life: Life, messages: int
) -> None:
    """V4, V6: in the row of their queue, in one with others, or in one of their own."""
    await life.topic("t")
    receipts = []
    for _ in range(messages):
        await life.do(life.run("t/a", 2))
        (slice_,) = (await life.do(Reserve("t/a", "default", 2))).slices
        await life.do(Settle(slice_.receipt, ACK))
        receipts.append(slice_.receipt)
    await life.do(life.run("t/a", 2))
    (mixed,) = (await life.do(Reserve("t/a", "default", 2))).slices
    await life.do(Settle(mixed.receipt, ACK, ((0, 1),)), Settle(mixed.receipt, NACK))
    await life.reopen()

    repeated = await life.do(*(Settle(receipt, ACK) for receipt in (receipts[0], *receipts)))
    others = await life.do(*(Settle(receipt, NACK) for receipt in (receipts[0], *receipts)))
    first, second = await life.do(
        Settle(mixed.receipt, ACK, ((0, 1),)), Settle(mixed.receipt, ACK, ((1, 2),))
    )

    assert [each.messages for each in repeated] == [0] * (messages + 1)
    assert {type(each) for each in others} == {AlreadySettled}
    assert first.messages == 0
    assert isinstance(second, AlreadySettled)


async def _run_round(life: Life, number: int) -> None:
    names = [f"t/{queue}" for queue in range(QUEUES)]
    first = number * QUEUES + 1
    runs = [
        life.run(name, 1, producer_id="p", sequence=sequence)
        for sequence, name in enumerate(names, first)
    ]
    await life.do(*runs)
    reserved = await life.do(*(Reserve(name, "default", 1) for name in names))
    await life.do(*(Settle(each.slices[0].receipt, ACK) for each in reserved))
