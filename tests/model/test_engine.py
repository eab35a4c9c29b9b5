"""Rules of every engine: order, atomicity, commits, and reads beside the writer.

The tests know the protocol only. Faults of one engine's files are tested where that engine is.
"""

import asyncio
import random

import pytest

from storage_svc.engines.engine import (
    Batch,
    Engine,
    EngineClosed,
    Row,
    Table,
)
from storage_svc.engines.keys import prefix_end, u64
from tests.model.conftest import Subject, everything, puts

# --- reading and writing --------------------------------------------------------------------------


async def test_loads_values_in_the_order_of_the_keys_and_none_for_missing_ones(
    engine: Engine,
) -> None:
    await engine.commit(puts(Table.GROUPS, (b"a", b"1"), (b"b", b"2")))

    loaded = await engine.load(Table.GROUPS, (b"b", b"nothing", b"a", b"b"))

    assert loaded == [b"2", None, b"1", b"2"]
    assert await engine.load(Table.GROUPS, []) == []


async def test_a_reader_loads_keys_in_any_order_and_those_that_are_missing(engine: Engine) -> None:
    """Also behind a missing one, behind the last one, and of rows that were deleted."""
    batch = Batch()
    for key in (b"a", b"b", b"c", b"d"):
        batch.put(Table.QUEUES, key, key * 2)
    await engine.commit(batch)
    gone = Batch()
    gone.delete(Table.QUEUES, b"c")
    await engine.commit(gone)

    with engine.reader() as reader:
        loaded = await reader.load(Table.QUEUES, [b"b", b"a", b"a", b"c", b"d", b"z", b"b", b""])
        nothing = await reader.load(Table.QUEUES, [])

    assert loaded == [b"bb", b"aa", b"aa", None, b"dd", None, b"bb", None]
    assert nothing == []


async def test_a_reader_loads_neighbours_on_both_sides_of_many_deleted_keys(engine: Engine) -> None:
    """P3: rows in a row are read without a seek each, and deleted ones hide none behind them."""
    keys = [u64(number) for number in range(3_000)]
    await engine.commit(puts(Table.QUEUES, *((key, key) for key in keys)))
    gone = Batch()
    gone.delete_all(Table.QUEUES, keys[10:2_900])
    await engine.commit(gone)
    wanted = keys[:10] + keys[2_900:2_950]

    with engine.reader() as reader:
        around = await reader.load(Table.QUEUES, wanted)
        through = await reader.load(Table.QUEUES, [*wanted[:5], keys[20], *wanted[5:], keys[1]])

    assert around == wanted
    assert through == [*wanted[:5], None, *wanted[5:], keys[1]]


async def test_an_empty_value_is_a_value(engine: Engine) -> None:
    await engine.commit(puts(Table.DEADLINES, (b"key", b"")))

    assert await engine.load(Table.DEADLINES, [b"key"]) == [b""]
    assert await everything(engine, Table.DEADLINES) == [(b"key", b"")]


async def test_keys_of_any_bytes_sort_bytewise(engine: Engine) -> None:
    keys = [b"\x00", b"\x00\x00", b"\x00\xff", b"\x01", b"a", b"a\x00", b"a\xff", b"b", b"\xff\xff"]
    shuffled = random.Random(7).sample(keys, len(keys))

    await engine.commit(puts(Table.CATALOG, *((key, key[::-1]) for key in shuffled)))

    assert await everything(engine, Table.CATALOG) == [(key, key[::-1]) for key in keys]
    assert await engine.load(Table.CATALOG, keys) == [key[::-1] for key in keys]


async def test_a_scan_includes_its_start_excludes_its_end_and_keeps_its_limit(
    engine: Engine,
) -> None:
    rows = [(u64(number), b"") for number in range(10)]
    await engine.commit(puts(Table.TTL, *rows))

    async def scan(start: int, end: int, limit: int) -> list[Row]:
        return await engine.scan(Table.TTL, u64(start), u64(end), limit=limit)

    assert await scan(3, 7, 100) == rows[3:7]
    assert await scan(3, 7, 2) == rows[3:5]
    assert await scan(3, 7, 0) == []
    assert await scan(3, 3, 100) == []
    assert await scan(7, 3, 100) == []
    assert await engine.scan(Table.TTL, u64(8), None, limit=100) == rows[8:]
    assert await engine.scan(Table.TTL, u64(10), None, limit=100) == []


async def test_a_prefix_scan_sees_its_prefix_only(engine: Engine) -> None:
    inside = [(b"ab", b""), (b"ab\x00", b""), (b"ab\xff\xff", b"")]
    await engine.commit(puts(Table.LANES, (b"aa\xff", b""), *inside, (b"ac", b"")))

    assert await engine.scan(Table.LANES, b"ab", prefix_end(b"ab"), limit=100) == inside


async def test_tables_do_not_see_each_other(engine: Engine) -> None:
    batch = Batch()
    for table in Table:
        batch.put(table, b"same key", table.encode())

    await engine.commit(batch)

    for table in Table:
        assert await engine.load(table, [b"same key"]) == [table.encode()]


async def test_the_last_change_to_a_key_in_a_batch_wins(engine: Engine) -> None:
    await engine.commit(puts(Table.GROUPS, (b"deleted", b"old"), (b"gone", b"old")))
    batch = Batch()
    batch.put(Table.GROUPS, b"kept", b"first")
    batch.delete(Table.GROUPS, b"kept")
    batch.put(Table.GROUPS, b"kept", b"last")
    batch.put(Table.GROUPS, b"deleted", b"new")
    batch.delete(Table.GROUPS, b"deleted")
    batch.delete_range(Table.GROUPS, b"g", b"h")
    batch.put(Table.GROUPS, b"gap", b"after the range delete")

    await engine.commit(batch)

    rows = await everything(engine, Table.GROUPS)
    assert rows == [(b"gap", b"after the range delete"), (b"kept", b"last")]


async def test_a_range_delete_takes_its_start_and_leaves_its_end(engine: Engine) -> None:
    rows = [(u64(number), b"x") for number in range(1_000)]
    await engine.commit(puts(Table.RUN_HEADERS, *rows))
    await engine.commit(puts(Table.RETURNED, *rows))
    batch = Batch()
    batch.delete_range(Table.RUN_HEADERS, u64(10), u64(990))
    batch.delete_range(Table.RUN_HEADERS, u64(995), u64(995))
    batch.delete_range(Table.RUN_HEADERS, u64(995), u64(3))

    await engine.commit(batch)

    assert await everything(engine, Table.RUN_HEADERS) == rows[:10] + rows[990:]
    assert await everything(engine, Table.RETURNED) == rows


async def test_values_of_4_mib_come_back_as_they_were(engine: Engine) -> None:
    value = random.Random(4).randbytes(4 * 1024 * 1024)

    await engine.commit(puts(Table.RUN_BODIES, (b"a", value), (b"b", value[::-1])))

    assert await engine.load(Table.RUN_BODIES, [b"b", b"a"]) == [value[::-1], value]


async def test_a_hundred_thousand_keys_are_all_there_in_order(engine: Engine) -> None:
    numbers = random.Random(1).sample(range(100_000), 100_000)
    for start in range(0, 100_000, 10_000):
        chunk = numbers[start : start + 10_000]
        await engine.commit(puts(Table.GROUPS, *((u64(n), b"%d" % n) for n in chunk)))

    rows = await everything(engine, Table.GROUPS)

    assert rows == [(u64(n), b"%d" % n) for n in range(100_000)]


async def test_a_batch_knows_its_size_and_can_be_used_again(engine: Engine) -> None:
    batch = puts(Table.GROUPS, (b"key", b"value"))
    batch.delete_range(Table.GROUPS, b"x", b"y")
    assert (len(batch), batch.bytes_approx) == (2, 10)

    batch.clear()
    assert (len(batch), batch.bytes_approx) == (0, 0)
    await engine.commit(batch)

    assert await everything(engine, Table.GROUPS) == []


# --- commits --------------------------------------------------------------------------------------


async def test_commits_made_at_once_take_effect_in_the_order_of_their_calls(
    engine: Engine,
) -> None:
    batches = []
    for number in range(50):
        batch = puts(Table.GROUPS, (b"last", u64(number)), (u64(number), b""))
        if number:
            batch.delete(Table.GROUPS, u64(number - 1))
        batches.append(batch)

    await asyncio.gather(*(engine.commit(batch) for batch in batches))

    rows = await everything(engine, Table.GROUPS)
    assert rows == [(u64(49), b""), (b"last", u64(49))]


async def test_a_commit_that_is_cancelled_leaves_all_of_it_or_nothing(engine: Engine) -> None:
    async def commit(number: int) -> None:
        batch = puts(Table.GROUPS, (u64(number), b""))
        batch.put(Table.LANES, u64(number), b"")
        await engine.commit(batch)

    for number in range(20):
        task = asyncio.ensure_future(commit(number))
        await engine.load(Table.META, [b"x"])
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.wait({task})
    await commit(100)

    assert await everything(engine, Table.GROUPS) == await everything(engine, Table.LANES)
    assert (u64(100), b"") in await everything(engine, Table.GROUPS)


async def test_the_event_loop_runs_while_a_commit_waits_for_the_disk(
    subject: Subject, engine: Engine
) -> None:
    """L1: a disk that takes its time holds up its own partition only.

    One commit shows it: during another, the machine may have no time for this thread.
    """
    if not subject.outlives_processes:
        pytest.skip("it waits for no disk")

    async def turns_during_a_commit() -> int:
        large = puts(Table.RUN_BODIES, (b"k", bytes(4_000_000)))
        task = asyncio.ensure_future(engine.commit(large))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.wait({task}, timeout=0)
        return turns

    assert max([await turns_during_a_commit() for _ in range(10)]) > 2


async def test_an_engine_that_works_can_be_verified_and_has_not_failed(engine: Engine) -> None:
    failed = asyncio.ensure_future(engine.wait_failed())
    await engine.commit(puts(Table.GROUPS, (b"a", b"1")))

    await engine.verify()

    assert not failed.done()
    failed.cancel()


# --- readers --------------------------------------------------------------------------------------


async def test_a_reader_sees_every_key_that_does_not_change_while_the_writer_goes_on(
    engine: Engine,
) -> None:
    """L2: phase one reads beside the writer, without blocking it."""
    kept = [(u64(number), b"kept") for number in range(0, 4_000, 2)]
    await engine.commit(puts(Table.RUN_HEADERS, *kept))
    seen: list[Row] = []

    with engine.reader() as reader:
        written = 1
        async for chunk in reader.scan_chunks(Table.RUN_HEADERS, b"", None, chunk_rows=100):
            seen += chunk
            behind, ahead = u64(written), u64(4_000 - written)
            await engine.commit(puts(Table.RUN_HEADERS, (behind, b"new"), (ahead, b"new")))
            batch = Batch()
            batch.delete(Table.RUN_HEADERS, behind)
            batch.delete(Table.RUN_HEADERS, u64(4_002 - written))
            await engine.commit(batch)
            written += 2

    assert [row for row in seen if row[1] == b"kept"] == kept
    assert seen == sorted(seen)
    assert written > 30


async def test_a_chunk_shows_one_moment(engine: Engine) -> None:
    async def write() -> None:
        for number in range(200):
            await engine.commit(puts(Table.GROUPS, (b"a", u64(number)), (b"z", u64(number))))

    await engine.commit(puts(Table.GROUPS, (b"a", u64(0)), (b"z", u64(0))))
    writer = asyncio.ensure_future(write())

    with engine.reader() as reader:
        moments = 0
        while not writer.done():
            (_, left), (_, right) = await reader.scan(Table.GROUPS, b"a", None, limit=10)
            loaded = await reader.load(Table.GROUPS, [b"a", b"z"])
            assert left == right
            assert loaded[0] == loaded[1]
            moments += 1
            await asyncio.wait({writer}, timeout=0)
    await writer

    assert moments > 1


async def test_chunks_hold_what_was_asked_for_and_let_others_run(engine: Engine) -> None:
    rows = [(u64(number), b"") for number in range(1_000)]
    await engine.commit(puts(Table.HISTORY, *rows))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        with engine.reader() as other:
            async for _ in other.scan_chunks(Table.HISTORY, b"", None, chunk_rows=100):
                turns += 1

    counter = asyncio.ensure_future(count_turns())
    with engine.reader() as reader:
        chunks = [
            chunk
            async for chunk in reader.scan_chunks(Table.HISTORY, u64(5), u64(995), chunk_rows=100)
        ]

    assert [row for chunk in chunks for row in chunk] == rows[5:995]
    assert [len(chunk) for chunk in chunks] == [100] * 9 + [90]
    assert turns >= 8
    await counter


async def test_large_values_come_in_small_chunks(engine: Engine) -> None:
    rows = [(u64(number), bytes(200_000)) for number in range(10)]
    await engine.commit(puts(Table.HISTORY, *rows))

    with engine.reader() as reader:
        chunks = [chunk async for chunk in reader.scan_chunks(Table.HISTORY, b"", None)]

    assert [row for chunk in chunks for row in chunk] == rows
    assert max(len(chunk) for chunk in chunks) <= 2


async def test_a_closed_reader_refuses_to_read(engine: Engine) -> None:
    reader = engine.reader()
    reader.close()

    with pytest.raises(EngineClosed):
        await reader.load(Table.GROUPS, [b"a"])
