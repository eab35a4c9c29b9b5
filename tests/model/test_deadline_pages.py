"""Opening a partition reads one page of deadlines; the rest is read when its turn comes."""

from collections import Counter

import pytest

from storage_svc.engines.engine import Row, Table
from storage_svc.engines.rocksdb import RocksEngine
from storage_svc.loading import deadline_pages
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from tests.support.partition_life import ACK, NACK, Life, spans


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Counter[Table]:
    """Rows that the writer has scanned, by table; pages have three rows."""
    rows: Counter[Table] = Counter()
    scan = RocksEngine.scan

    async def counted(
        self: RocksEngine, table: Table, start: bytes, end: bytes | None, *, limit: int
    ) -> list[Row]:
        page = await scan(self, table, start, end, limit=limit)
        rows[table] += len(page)
        return page

    monkeypatch.setattr(RocksEngine, "scan", counted)
    monkeypatch.setattr(deadline_pages, "PAGE_ROWS", 3)
    return rows


async def reserve(life: Life, visibility_ms: int) -> bytes:
    reserved = await life.do(Reserve("t/a", "g", 1, visibility_ms=visibility_ms))
    receipt: bytes = reserved.slices[0].receipt
    return receipt


async def test_a_partition_opens_with_one_page_of_its_deadlines(
    life: Life, scanned: Counter[Table]
) -> None:
    """S2, V5: opening costs no more with a million reservations than with a few."""
    await life.do(life.run("t/a", 20))
    for number in range(20):
        await reserve(life, 1_000 + 100 * number)
    scanned.clear()

    await life.reopen()

    assert scanned[Table.DEADLINES] == 3
    assert life.partition.reservations == 20
    assert life.partition.next_deadline_ms == life.partition.now_ms() // 10 * 10 + 1_010


async def test_every_reservation_expires_at_its_time_also_beyond_the_first_page(
    life: Life, scanned: Counter[Table]
) -> None:
    """V1: reservations and delays, several of the same millisecond among them."""
    await life.do(life.run("t/a", 12))
    for number in range(12):
        await reserve(life, 1_000 + 100 * (number // 4))
    await life.reopen()

    for left in (8, 4, 0):
        due_ms = life.partition.next_deadline_ms
        assert due_ms is not None
        await life.clock.advance_ms(due_ms - life.partition.now_ms())
        await life.do(ExpireDue())
        await life.partition.submit([])  # a commit begins with the page that is needed

        assert life.partition.reservations == left
    assert life.partition.next_deadline_ms is None
    assert len(spans(await life.do(Reserve("t/a", "g", 12)))) == 12


async def test_what_is_settled_beyond_the_page_no_longer_counts(
    life: Life, scanned: Counter[Table]
) -> None:
    """V5: also nack delays, which begin beyond it."""
    await life.do(life.run("t/a", 9))
    receipts = [await reserve(life, 1_000 + 100 * number) for number in range(9)]
    await life.reopen()

    await life.do(*(Settle(each, ACK) for each in receipts[4:]))
    await life.do(Settle(receipts[0], NACK, delay_ms=60_000))

    assert life.partition.reservations == 4
    await life.reopen()
    assert life.partition.reservations == 4
