"""Rules of every engine: what an opening finds and refuses, takeovers by another node, crashes.

The tests know the protocol only. Faults of one engine's files are tested where that engine is.
"""

import asyncio
from dataclasses import replace

import pytest

from storage_svc.engines.engine import (
    FORMAT_VERSION,
    Batch,
    Engine,
    EngineClosed,
    EngineFenced,
    Table,
)
from storage_svc.engines.keys import u32, u64
from tests.model.conftest import IDENTITY, Subject, everything, puts
from tidemark.errors import ClusterMismatch, DataDirectoryInUse, FormatNotSupported

# --- closing, opening, the fence ------------------------------------------------------------------


async def test_what_was_committed_is_there_after_closing_and_opening(subject: Subject) -> None:
    engine = await subject.engines().open(IDENTITY)
    await engine.commit(puts(Table.GROUPS, (b"a", b"1"), (b"b", b"2")))
    batch = Batch()
    batch.delete(Table.GROUPS, b"a")
    await engine.commit(batch)
    await engine.close()

    engine = await subject.engines().open(IDENTITY)

    assert engine.identity == IDENTITY
    assert await everything(engine, Table.GROUPS) == [(b"b", b"2")]
    await engine.close()


async def test_a_closed_engine_refuses_everything_and_may_be_closed_again(engine: Engine) -> None:
    reader = engine.reader()

    await engine.close()
    await engine.close()

    with pytest.raises(EngineClosed):
        await engine.commit(puts(Table.GROUPS, (b"a", b"")))
    with pytest.raises(EngineClosed):
        await engine.load(Table.GROUPS, [b"a"])
    with pytest.raises(EngineClosed):
        await engine.scan(Table.GROUPS, b"", None, limit=1)
    with pytest.raises(EngineClosed):
        await reader.scan(Table.GROUPS, b"", None, limit=1)
    with pytest.raises(EngineClosed):
        engine.reader()
    with pytest.raises(EngineClosed):
        await engine.verify()


async def test_a_reader_left_open_does_not_keep_the_partition(subject: Subject) -> None:
    engine = await subject.engines().open(IDENTITY)
    await engine.commit(puts(Table.GROUPS, *((u64(n), b"") for n in range(10))))
    chunks = engine.reader().scan_chunks(Table.GROUPS, b"", None, chunk_rows=2)
    await anext(chunks)
    await engine.close()

    engine = await subject.engines().open(IDENTITY)

    with pytest.raises(EngineClosed):
        await anext(chunks)
    await engine.close()


async def test_a_partition_that_is_open_in_this_process_cannot_be_opened_again(
    subject: Subject, engine: Engine
) -> None:
    if subject.is_shared:
        pytest.skip("it is taken over instead")

    with pytest.raises(DataDirectoryInUse) as refused:
        await subject.engines().open(IDENTITY)

    assert subject.location in refused.value.detail
    assert "\n" not in refused.value.detail
    await engine.commit(puts(Table.GROUPS, (b"still", b"works")))


async def test_a_partition_that_is_open_in_another_process_cannot_be_opened(
    subject: Subject,
) -> None:
    if subject.is_shared:
        pytest.skip("it is taken over instead")

    with subject.committer(), pytest.raises(DataDirectoryInUse):
        await subject.engines().open(IDENTITY)


@pytest.mark.parametrize("change", [{"cluster_id": "cluster-b"}, {"partitions": 8}])
async def test_data_of_another_cluster_or_layout_is_refused_and_stays_as_it_was(
    subject: Subject, change: dict[str, str | int]
) -> None:
    if subject.is_apart_by_cluster and "cluster_id" in change:
        pytest.skip("the data of another cluster is elsewhere")
    engine = await subject.engines().open(IDENTITY)
    await engine.commit(puts(Table.GROUPS, (b"a", b"1")))
    await engine.close()

    with pytest.raises(ClusterMismatch) as refused:
        await subject.engines().open(replace(IDENTITY, **change))  # type: ignore[arg-type]

    assert "'cluster-a'" in refused.value.detail
    engine = await subject.engines().open(IDENTITY)
    assert await everything(engine, Table.GROUPS) == [(b"a", b"1")]
    await engine.close()


@pytest.mark.parametrize("version", [2, FORMAT_VERSION + 1], ids=["older", "newer"])
async def test_data_in_another_format_is_refused(subject: Subject, version: int) -> None:
    """S2: an older one as well; what its rows mean is not guessed."""
    engine = await subject.engines().open(IDENTITY)
    (identity,) = await engine.load(Table.META, [b"identity"])
    assert identity is not None
    other = u32(version) + b"whatever another version may write here"
    await engine.commit(puts(Table.META, (b"identity", other)))
    await engine.close()

    with pytest.raises(FormatNotSupported) as refused:
        await subject.engines().open(IDENTITY)

    assert f"format {version}, this version reads {FORMAT_VERSION}" in refused.value.detail


async def test_partitions_of_one_data_directory_are_apart(subject: Subject) -> None:
    engines = subject.engines()
    first = await engines.open(replace(IDENTITY, partition=0))
    second = await engines.open(replace(IDENTITY, partition=1))

    await first.commit(puts(Table.GROUPS, (b"a", b"first")))
    await second.commit(puts(Table.GROUPS, (b"a", b"second")))

    assert await first.load(Table.GROUPS, [b"a"]) == [b"first"]
    assert await second.load(Table.GROUPS, [b"a"]) == [b"second"]
    await first.close()
    await second.close()


# --- takeover -------------------------------------------------------------------------------------


async def test_opening_a_shared_partition_fences_the_node_that_had_it(subject: Subject) -> None:
    """S9: the lower epoch writes nothing and confirms nothing."""
    if not subject.is_shared:
        pytest.skip("it is locked instead")
    engines = subject.engines()
    old = await engines.open(IDENTITY)
    await old.commit(puts(Table.LANES, (b"a", b"old")))
    await old.verify()

    new = await subject.engines().open(IDENTITY)

    with pytest.raises(EngineFenced):
        await old.verify()
    with pytest.raises(EngineFenced):
        await old.commit(puts(Table.LANES, (b"a", b"stale"), (b"b", b"stale")))
    assert await everything(new, Table.LANES) == [(b"a", b"old")]
    await new.commit(puts(Table.LANES, (b"a", b"new")))
    await new.verify()
    assert await new.load(Table.LANES, [b"a"]) == [b"new"]
    await old.close()
    with pytest.raises(EngineFenced):
        await engines.open(IDENTITY)
    await new.commit(puts(Table.LANES, (b"b", b"after the old one closed")))
    await new.close()


async def test_commits_on_their_way_at_a_takeover_are_there_before_it_or_never(
    subject: Subject,
) -> None:
    """S9: what the new node reads first is what stays."""
    if not subject.is_shared:
        pytest.skip("it is locked instead")
    old = await subject.engines().open(IDENTITY)
    batches = [puts(Table.LANES, (u64(number), b"")) for number in range(200)]
    commits = [asyncio.ensure_future(old.commit(batch)) for batch in batches]
    await commits[20]

    new = await subject.engines().open(IDENTITY)
    found = await everything(new, Table.LANES)

    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    done = sum(outcome is None for outcome in outcomes)
    assert len(found) == done
    assert await everything(new, Table.LANES) == found
    assert isinstance(outcomes[done], EngineFenced)
    await old.close()
    await new.close()


# --- crashes --------------------------------------------------------------------------------------


async def test_kill_9_loses_no_commit_that_was_reported(subject: Subject) -> None:
    """S2: `kill -9` at any moment loses nothing that was answered, and leaves no half commits."""
    if not subject.outlives_processes:
        pytest.skip("it ends with its process")
    reported: list[int] = []
    for round_number in range(5):
        with subject.committer(first=len(reported) + 1) as process:
            assert process.stdout is not None
            reports = 20 + 37 * round_number
            reported += [int(process.stdout.readline()) for _ in range(reports)]
            process.kill()
            reported += [int(line) for line in process.stdout.read().splitlines()]

        engine = await subject.engines().open(IDENTITY)
        left = await everything(engine, Table.GROUPS)
        right = await everything(engine, Table.RUN_HEADERS)
        await engine.close()

        numbers = list(range(1, len(left) + 1))
        assert [key for key, _ in left] == [u64(number) for number in numbers]
        assert [key for key, _ in right] == [key for key, _ in left]
        assert reported == numbers[: len(reported)]
        # One commit may have become durable without being reported: that is no fault.
        assert len(left) - len(reported) <= 1
        reported = numbers
