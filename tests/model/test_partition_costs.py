"""What a partition must not leave behind, and what it must not cost more than it is worth."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from storage_svc.engines.engine import Batch, Table
from storage_svc.engines.rocksdb import RocksReader
from storage_svc.loading.handles import RELOADED_RECORDS_MAX
from storage_svc.operations import reserve
from storage_svc.operations.history import RetentionType
from storage_svc.operations.loading import (
    Materialize,
    RunHousekeeping,
    UnloadOutcome,
    Unmaterialize,
)
from storage_svc.operations.operation import ActionOutcome
from storage_svc.operations.partition_time import StampTime
from storage_svc.operations.queues import Purge
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.retention import ApplyRetention
from storage_svc.operations.retention_rules import RetentionRow
from storage_svc.operations.settle import Settle
from storage_svc.partition.broker_hold import CLIENT_TIMEOUT_DEFAULT_MS
from storage_svc.partition.housekeeping import HOUSEKEEPING_MS
from storage_svc.queue import group as group_module
from storage_svc.queue.group import Group
from storage_svc.queue.run import Run
from storage_svc.reads import due_work, queues
from tests.support.partition_life import ACK, DAY_MS, NACK, Life, spans
from tidemark.receipts import Receipt


async def test_fairness_keys_that_come_and_go_leave_nothing_behind(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key per user or per request: neither memory nor disk may grow with all there ever were."""
    monkeypatch.setattr(group_module, "IDLE_LANES_MAX", 10)
    kept = life.run("t", 1, fairness_key="kept")
    await life.do(kept)
    await life.do(Reserve("t", "g", 1))

    for number in range(100):
        await life.do(life.run("t", 1, fairness_key=f"k{number}"))
        (slice_,) = (await life.do(Reserve("t", "g", 1))).slices
        await life.do(Settle(slice_.receipt, ACK))
    lanes, stored = len(life.group("t", "g").lanes), await life.rows(Table.LANES)
    (kept_slice,) = life.group("t", "g").live.values()
    receipt = Receipt(0, life.state("t").record.queue_id, kept_slice.reservation_id, 0).encode()
    await life.do(Settle(receipt, NACK))
    (again,) = (await life.do(Reserve("t", "g", 1))).slices
    await life.do(Settle(again.receipt, ACK))
    unloaded = await life.do(Unmaterialize("t"))

    assert lanes < 20
    assert stored < 20
    assert (again.fairness_key, again.attempt_count) == ("kept", 1)
    assert unloaded is UnloadOutcome.EVICTED
    assert await life.rows(Table.LANES) == 0


async def test_a_fairness_key_whose_settled_runs_are_kept_goes_on_where_it_was(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled is not handed out again, however many keys came since (R2)."""
    monkeypatch.setattr(group_module, "IDLE_LANES_MAX", 2)
    await life.topic("kept", retention_enabled=True)
    for number in range(10):
        await life.do(life.run("kept", 1, fairness_key=f"k{number}"))
        (slice_,) = (await life.do(Reserve("kept", "g", 1))).slices
        await life.do(Settle(slice_.receipt, ACK))

    await life.do(Unmaterialize("kept"))
    await life.do(life.run("kept", 1, fairness_key="k3"))

    assert spans(await life.do(Reserve("kept", "g", 100))) == [(10, 11)]


async def test_a_look_costs_what_it_shows_and_not_that_times_the_fairness_keys(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads hold the event loop, and with it every partition."""
    keys = 50
    reads = 0
    load, scan = RocksReader.load, RocksReader.scan

    async def counted_load(self: RocksReader, table: Table, wanted: Sequence[bytes]) -> Any:
        nonlocal reads
        reads += len(wanted)
        return await load(self, table, wanted)

    async def counted_scan(self: RocksReader, *where: Any, **how: Any) -> Any:
        nonlocal reads
        reads += 1
        return await scan(self, *where, **how)

    monkeypatch.setattr(RocksReader, "load", counted_load)
    monkeypatch.setattr(RocksReader, "scan", counted_scan)
    for number in (*range(keys), *range(keys)):
        await life.do(life.run("t", 2, fairness_key=f"k{number}"))

    peeked, _ = await queues.peek(life.partition, "t", 3, 1000, "")

    assert [each.offset for each in peeked] == list(range(3, 4 * keys))
    assert [each.message.payload for each in peeked] == [b"m%d" % each.offset for each in peeked]
    assert reads <= 6 * keys + 10


async def test_removing_many_queues_in_one_commit_costs_what_one_costs_times_many(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may name 10 000 inactive queues in one call, and all partitions wait for it (R3)."""
    walked = 0

    class Operations(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal walked
            walked += len(self)
            return super().__iter__()

    queues = 50
    made = await life.do(*[Materialize(f"t/{number}", True) for number in range(queues)])
    life.partition.state.handles.forget_trackers()
    life.partition.state.hold.begin(life.partition.now_ms())
    await life.clock.advance_ms(CLIENT_TIMEOUT_DEFAULT_MS)
    inactive = [RetentionRow(queue_id=each.queue_id, before_ms=1 << 60, age_ms=1) for each in made]
    make_batch = Batch.__init__

    def make_counted(batch: Batch) -> None:
        make_batch(batch)
        batch.operations = Operations()

    monkeypatch.setattr(Batch, "__init__", make_counted)
    removal = ApplyRetention("p", RetentionType.INACTIVE_QUEUE, tuple(inactive))
    removed = await life.do(removal)

    assert removed.queues == queues
    assert walked < 10 * queues


async def test_a_disk_that_cannot_be_looked_at_for_a_moment_does_not_end_housekeeping(
    life: Life, tmp_path: Path
) -> None:
    """S3, I9: the watermark is watched and idle queues are unloaded for as long as it serves."""
    directory = tmp_path / "node"
    await life.topic("brief", idle_after_ms=HOUSEKEEPING_MS)
    await life.do(life.run("brief", 1))
    await life.clock.until_sleepers(1)

    directory.rename(tmp_path / "away")
    await life.clock.advance_ms(HOUSEKEEPING_MS)
    (tmp_path / "away").rename(directory)
    async with asyncio.timeout(60):
        await life.clock.until_sleepers(1)
    await life.clock.advance_ms(HOUSEKEEPING_MS)
    await life.clock.until_sleepers(1)

    assert life.partition.state.handles.peek("brief") is None


async def test_housekeeping_without_anything_to_do_makes_no_commit(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3: an idle partition does nothing but look; what is due later is not forgotten."""
    await life.topic("used", idle_after_ms=HOUSEKEEPING_MS)
    await life.do(life.run("used", 1, producer_id="p", sequence=1), Materialize("used"))
    submitted: list[Any] = []
    submit = life.partition.submit

    def record(operations: Sequence[Any], *rest: Any, **named: Any) -> Any:
        submitted.extend(operations)
        return submit(operations, *rest, **named)

    monkeypatch.setattr(life.partition, "submit", record)

    for _ in range(10):
        await life.partition.housekeeping.run_once()
        await life.clock.advance_ms(HOUSEKEEPING_MS)
    while_tracked = list(submitted)
    life.partition.state.handles.forget_trackers()
    await life.partition.housekeeping.run_once()
    unloaded = life.partition.state.handles.peek("used") is None
    life.clock.set_wall_ms(life.clock.wall_ms() + 10 * DAY_MS)
    await life.partition.housekeeping.run_once()
    await life.partition.confirm_time()
    await life.partition.housekeeping.run_once()
    submitted_in_all = list(submitted)
    await life.partition.housekeeping.run_once()

    assert while_tracked == []
    assert unloaded
    # The suspension after the jump is stored, and its end; nothing is deleted in between.
    expected = [RunHousekeeping(), StampTime(), StampTime(), RunHousekeeping()]
    assert submitted == submitted_in_all == expected
    assert await life.rows(Table.PRODUCERS, Table.PRODUCER_INDEX) == 0


async def test_a_group_that_waits_for_room_among_returned_slices_is_ready_when_runs_leave(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2: at the cap nothing is handed out; what leaves by its time to live makes room as well."""
    monkeypatch.setattr(reserve, "RETURNED_SLICES_MAX", 1)
    await life.do(life.run("t", 1, ttl_ms=1000))
    (slice_,) = (await life.do(Reserve("t", "g", 1))).slices
    await life.do(Settle(slice_.receipt, NACK, delay_ms=DAY_MS))
    await life.do(life.run("t", 1))
    waiting = await life.do(Reserve("t", "g", 1))
    events = life.partition.connect(0, lambda: None)

    await life.clock.advance_ms(1000)
    await life.do(*await life.due(due_work.ScanKind.DEAD_DEADLINES))

    assert not waiting.slices
    assert ("t", "g") in events.ready
    assert spans(await life.do(Reserve("t", "g", 1))) == [(1, 2)]


@pytest.mark.parametrize("keys", [1, 7])
async def test_a_purge_looks_once_at_what_came_back(
    life: Life, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    """Not once for every run: thousands that are delayed would block the partition for seconds."""
    calls = 0
    drop_runs = Group.drop_runs

    def counted(self: Group, runs: Sequence[Run]) -> list[tuple[int, int]]:
        nonlocal calls
        calls += 1
        return drop_runs(self, runs)

    monkeypatch.setattr(Group, "drop_runs", counted)
    runs = [life.run("t", 2, fairness_key=f"k{number % keys}") for number in range(50)]
    await life.do(*runs)
    slices = (await life.do(Reserve("t", "g", 100))).slices
    for slice_ in slices[1:]:
        await life.do(Settle(slice_.receipt, NACK, delay_ms=1000))

    purged = await life.do(Purge("t"))

    assert (purged.messages, purged.skipped) == (98, 2)
    assert calls == keys
    assert await life.rows(Table.RETURNED, Table.DELAYS) == 0
    assert await life.rows(Table.RUN_HEADERS) == 1


async def test_a_sweep_does_not_read_all_that_a_queue_has_in_flight_with_every_commit(
    life: Life,
) -> None:
    """I9, L7: such a queue stays loaded until it is idle; others leave with the commit."""
    many = RELOADED_RECORDS_MAX + 1
    await life.do(*(life.run("t/many", 1) for _ in range(many)), life.run("t/few", 1))
    for name in ("t/many", "t/few"):
        taken = await life.do(Reserve(name, "g", many, visibility_ms=50))
        assert taken.slices
    await life.reopen()
    await life.clock.advance_ms(50)

    page = await due_work.scan(
        life.partition, due_work.ScanKind.EXPIRED_RESERVATIONS, b"", 2 * many
    )
    outcomes = [await life.do(due.action) for due in (page.due[0], page.due[-1])]

    assert {each.outcome for each in outcomes} == {ActionOutcome.DONE}
    assert [handle.state.record.lmq_name for handle in life.partition.state.handles] == ["t/many"]
