"""How many rows a partition writes and deletes for the work that Tidemark is made for."""

from storage_svc.engines.engine import Table
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from tests.support.partition_life import ACK, Life
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
    assert sum(per_cycle.values()) <= 11.1, per_cycle


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
