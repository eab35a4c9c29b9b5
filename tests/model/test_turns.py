"""No turn of the event loop works on many rows, however many a queue has (L1, P3).

Reads of the engine never suspend: storage serves no partition until the turn ends.
"""

from collections.abc import Sequence

import pytest

from storage_svc.engines.engine import Batch
from storage_svc.operations.claim import ReleaseUnreported
from storage_svc.operations.loading import Materialize
from storage_svc.operations.operation import Operation, Removed
from storage_svc.operations.queues import Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from tests.support.faulty_engine import Fault
from tests.support.partition_life import ACK, DAY_MS, NACK, Life
from tests.support.turn_rows import TurnRows
from tidemark.errors import CommitOutcomeUnknown

TURN_ROWS_MAX = 1_500
RUNS = 2_000
_FRAME = 1_000


@pytest.fixture
def turn_rows(monkeypatch: pytest.MonkeyPatch) -> TurnRows:
    return TurnRows(monkeypatch)


async def fill(life: Life, **fields: int) -> None:
    for _ in range(0, RUNS, _FRAME):
        await life.do(*[life.run("t", 1, **fields) for _ in range(_FRAME)])


async def reserve_all(life: Life) -> list[bytes]:
    reserved = await life.do(Reserve("t", "g", RUNS, visibility_ms=DAY_MS))
    assert len(reserved.slices) == RUNS
    return [each.receipt for each in reserved.slices]


def settlements(receipts: Sequence[bytes], **fields: int) -> list[Settle]:
    ending = NACK if fields else ACK
    return [Settle(each, ending, delay_ms=fields.get("delay_ms", 0)) for each in receipts]


async def test_a_large_hand_out_and_its_settlements_give_way(
    life: Life, turn_rows: TurnRows
) -> None:
    """L1: a consumer may ask for 10 000 messages, and a frame may settle as many."""
    await fill(life)

    with turn_rows.counted():
        receipts = await reserve_all(life)
        await life.do(*settlements(receipts))

    assert turn_rows.most <= TURN_ROWS_MAX


async def test_opening_a_partition_and_loading_a_queue_give_way(
    life: Life, turn_rows: TurnRows
) -> None:
    """L1: the first use after a start loads the queue, such as that of a sweep."""
    await fill(life)
    receipts = await reserve_all(life)
    await life.do(*settlements(receipts[: RUNS // 2], delay_ms=DAY_MS))

    with turn_rows.counted():
        await life.reopen()
        await life.do(Materialize("t"))

    assert turn_rows.most <= TURN_ROWS_MAX
    assert life.partition.reservations == RUNS


async def test_everything_that_expires_at_once_gives_way(life: Life, turn_rows: TurnRows) -> None:
    """V5: a commit that expires what is due does so in parts."""
    await fill(life)
    await reserve_all(life)

    with turn_rows.counted():
        released = await life.do(ReleaseUnreported({}))

    assert released.released == RUNS
    assert turn_rows.most <= TURN_ROWS_MAX


async def test_a_frame_of_many_operations_is_cut_into_commits(life: Life) -> None:
    """S2: a commit has a bounded number of operations; the frame has all results, in order."""
    before = life.partition.commits

    appended = await life.do(*[life.run("t", 1) for _ in range(2_500)])

    assert [each.first_offset for each in appended] == list(range(2_500))
    assert life.partition.commits - before == 3


async def test_a_frame_fails_as_a_whole_when_a_part_of_it_fails(life: Life) -> None:
    """S2: whether its operations were applied is unknown, as of any frame whose commit failed."""
    written = life.engines.commits
    life.engines.is_meant = lambda _: life.engines.commits > written
    life.engines.next_commit = Fault.BEFORE_WRITING

    with pytest.raises(CommitOutcomeUnknown):
        await life.do(*[life.run("t", 1) for _ in range(2_500)])

    assert life.engines.commits == written + 1


@pytest.mark.parametrize("removal", [Purge("t"), RemoveQueue("t")])
async def test_a_large_queue_is_removed_in_small_commits_with_others_in_between(
    life: Life, turn_rows: TurnRows, removal: Operation[Removed]
) -> None:
    """L1, S2: the removal is answered first, and operations on other queues wait for one step."""
    await fill(life, ttl_ms=DAY_MS)
    await reserve_all(life)
    await fill(life, ttl_ms=DAY_MS)
    sizes: list[int] = []

    def measure(batch: Batch) -> bool:
        sizes.append(len(batch))
        return True

    life.engines.is_meant = measure

    with turn_rows.counted():
        await life.do(removal)
        answered = 0
        while life.partition.state.erasures:
            await life.do(life.run("t/other", 1))
            answered += 1

    assert answered > 3
    assert max(sizes) < 1_000
    assert turn_rows.most <= TURN_ROWS_MAX
    kept = 0 if isinstance(removal, RemoveQueue) else RUNS
    assert life.partition.state.counters.messages == kept + answered
