"""The committer: what gathers for one sync, and whom a fault concerns. The log is scripted, because
no real disk fails or waits on request."""

import asyncio
from collections.abc import Sequence

import pytest

from storage_svc.engines.committer import GATHER_BYTES_MAX, Commit, Committer
from storage_svc.engines.disk_thread import WorkEnded
from storage_svc.engines.engine import Batch, Table
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown


class ScriptedLog:
    """A log whose syncs wait for the test, and whose faults come when the test wants them."""

    def __init__(self) -> None:
        self.writes: list[list[bytes]] = []
        """The keys of each write, with their prefixes."""
        self.encodings = 0
        self.stalls = 0
        self.refusals: list[Exception] = []
        self.encoding_refusals: list[Exception] = []
        """How the next encodings of more than one commit fail, in any call."""
        self._syncs: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    def encode(self, commits: Sequence[Commit], onto: list[bytes] | None) -> list[bytes]:
        self.encodings += len(commits)
        encoded = [] if onto is None else onto
        if self.encoding_refusals and (encoded or len(commits) > 1):
            raise self.encoding_refusals.pop()
        for prefix, batch, _ in commits:
            for _, key, value, _ in batch.operations:
                encoded.append(prefix + key)
                if value == b"bad":
                    raise TypeError("cannot be encoded")
        return encoded

    def write(self, encoded: list[bytes]) -> bool:
        if self.refusals:
            raise self.refusals.pop()
        if self.stalls:
            self.stalls -= 1
            encoded.clear()
            return False
        self.writes.append(encoded)
        return True

    def begin_sync(self, ended: WorkEnded) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda synced: ended(synced.exception()))
        self._syncs.put_nowait(done)

    async def next_sync(self) -> asyncio.Future[None]:
        """The sync that is under way, or the next one."""
        async with asyncio.timeout(60):
            return await self._syncs.get()


def row(key: bytes, value: bytes = b"") -> Batch:
    batch = Batch()
    batch.put(Table.QUEUES, key, value)
    return batch


@pytest.fixture
async def log() -> ScriptedLog:
    return ScriptedLog()


@pytest.fixture
async def committer(log: ScriptedLog) -> Committer[list[bytes]]:
    return Committer(log, "/data/node")


def start(committer: Committer[list[bytes]], prefix: bytes, batch: Batch) -> asyncio.Task[None]:
    return asyncio.ensure_future(committer.commit(prefix, batch))


async def test_what_arrives_during_a_sync_shares_the_next_one(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2, L1, C7: nothing is answered before its sync, and syncs do not grow with partitions."""
    first = start(committer, b"0", row(b"a"))
    sync = await log.next_sync()
    others = [start(committer, b"%d" % number, row(b"a")) for number in range(1, 64)]
    await SystemClock().sleep_ms(0)

    assert not first.done()
    sync.set_result(None)
    second = await log.next_sync()
    assert first.done()
    assert not any(other.done() for other in others)
    second.set_result(None)
    await asyncio.gather(*others)

    assert log.writes == [[b"0a"], [b"%da" % number for number in range(1, 64)]]
    assert log.encodings == 64  # each once, while the sync before it was under way


async def test_commits_of_one_moment_share_a_sync(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """C7."""
    commits = [start(committer, b"p", row(b"%d" % number)) for number in range(8)]

    (await log.next_sync()).set_result(None)
    await asyncio.gather(*commits)

    assert log.writes == [[b"p%d" % number for number in range(8)]]


async def test_a_failed_sync_is_an_unknown_outcome_for_everything_in_it_and_behind_it(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2: nothing is answered as stored, and nothing is written behind it."""
    within = [start(committer, b"%d" % number, row(b"a")) for number in range(3)]
    sync = await log.next_sync()
    behind = start(committer, b"9", row(b"a"))
    await SystemClock().sleep_ms(0)

    sync.set_exception(OSError("No space left on device"))

    outcomes = await asyncio.gather(*within, behind, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CommitOutcomeUnknown] * 4
    assert committer.failed.is_set()
    with pytest.raises(CommitOutcomeUnknown, match="opened again: No space left on device"):
        await committer.commit(b"1", row(b"b"))
    assert log.writes == [[b"0a", b"1a", b"2a"]]


async def test_a_failed_write_is_an_unknown_outcome_as_well(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    log.refusals.append(OSError("Input/output error"))

    with pytest.raises(CommitOutcomeUnknown, match="Input/output error"):
        await committer.commit(b"1", row(b"a"))

    assert committer.failed.is_set()


async def test_a_commit_that_cannot_be_encoded_fails_alone_and_leaves_nothing_behind(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2: half of it is never written, and the commits beside it are."""
    before = start(committer, b"1", row(b"a"))
    bad = start(committer, b"2", row(b"a", b"bad"))
    after = start(committer, b"3", row(b"a"))

    (await log.next_sync()).set_result(None)
    await asyncio.gather(before, after)

    with pytest.raises(TypeError):
        await bad
    assert log.writes == [[b"1a", b"3a"]]
    assert committer.fault is None


async def test_commits_that_could_not_be_encoded_together_are_all_written_later(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2: none is answered without being written, also where memory was short for a moment."""
    first = start(committer, b"1", row(b"a"))
    sync = await log.next_sync()
    second = start(committer, b"2", row(b"a"))
    await SystemClock().sleep_ms(0)
    log.encoding_refusals = [MemoryError(), MemoryError()]
    third = start(committer, b"3", row(b"a"))
    while log.encoding_refusals:
        await SystemClock().sleep_ms(0)

    sync.set_result(None)
    (await log.next_sync()).set_result(None)
    await asyncio.gather(first, second, third)

    assert log.writes == [[b"1a"], [b"2a", b"3a"]]


async def test_a_write_that_the_log_refuses_for_now_is_repeated_whole(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    log.stalls = 3
    commits = [start(committer, b"%d" % number, row(b"a")) for number in range(2)]

    (await log.next_sync()).set_result(None)
    await asyncio.gather(*commits)

    assert log.writes == [[b"0a", b"1a"]]


async def test_a_committer_that_is_closed_does_not_wait_for_a_log_that_refuses_writes(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    log.stalls = 1_000_000
    commit = start(committer, b"1", row(b"a"))
    await SystemClock().sleep_ms(0)

    async with asyncio.timeout(60):
        await committer.close()

    with pytest.raises(CommitOutcomeUnknown):
        await commit


async def test_closing_waits_for_what_was_handed_over(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    commit = start(committer, b"1", row(b"a"))
    sync = await log.next_sync()
    closing = asyncio.ensure_future(committer.close())
    await SystemClock().sleep_ms(0)

    assert not closing.done()
    sync.set_result(None)
    await closing
    await commit


async def test_a_cancelled_commit_does_not_hold_up_those_beside_it(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    cancelled = start(committer, b"1", row(b"a"))
    beside = start(committer, b"2", row(b"a"))
    sync = await log.next_sync()
    cancelled.cancel()
    await asyncio.wait({cancelled})

    sync.set_result(None)
    await beside

    assert log.writes == [[b"1a", b"2a"]]


async def test_a_write_is_bounded_and_the_rest_follows_in_order(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S3: a write holds the event loop; large commits of many partitions take turns."""
    large = bytes(GATHER_BYTES_MAX // 2)
    commits = [start(committer, b"%d" % number, row(b"a", large)) for number in range(3)]
    larger = start(committer, b"9", row(b"a", bytes(GATHER_BYTES_MAX + 1)))

    for _ in range(4):
        (await log.next_sync()).set_result(None)
    await asyncio.gather(*commits, larger)

    assert log.writes == [[b"0a"], [b"1a"], [b"2a"], [b"9a"]]


async def test_an_outcome_that_cannot_be_taken_holds_up_no_other_commit(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2, L1: neither those of the same sync, nor those that follow, nor closing."""

    def refuse(_: Exception | None) -> None:
        raise RuntimeError("cannot be taken")

    committer.begin(b"1", row(b"a"), refuse)
    beside = start(committer, b"2", row(b"a"))
    sync = await log.next_sync()
    behind = start(committer, b"3", row(b"a"))
    await SystemClock().sleep_ms(0)
    sync.set_result(None)
    (await log.next_sync()).set_result(None)
    await asyncio.gather(beside, behind)

    committer.begin(b"1", row(b"b"), refuse)
    failed = start(committer, b"2", row(b"b"))
    sync = await log.next_sync()
    committer.begin(b"1", row(b"c"), refuse)
    sync.set_exception(OSError("Input/output error"))
    with pytest.raises(CommitOutcomeUnknown):
        await failed
    async with asyncio.timeout(60):
        await committer.close()


async def test_a_commit_that_begins_as_another_ends_is_written_at_once(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """The turn that ends a sync begins the next one, also with what its outcome has led to."""
    second: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def go_on(error: Exception | None) -> None:
        assert error is None
        committer.begin(b"1", row(b"b"), second.set_result)

    committer.begin(b"1", row(b"a"), go_on)
    (await log.next_sync()).set_result(None)
    (await log.next_sync()).set_result(None)

    assert await second is None
    assert log.writes == [[b"1a"], [b"1b"]]


async def test_closing_waits_for_everything_that_gathered_behind_a_sync_that_hangs(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2: what was handed over is made durable, however long the disk takes."""
    first = start(committer, b"1", row(b"a"))
    hanging = await log.next_sync()
    behind = [start(committer, b"%d" % number, row(b"a")) for number in range(2, 5)]
    await SystemClock().sleep_ms(0)
    closing = asyncio.ensure_future(committer.close())
    for _ in range(100):
        await SystemClock().sleep_ms(0)
    assert not closing.done()
    assert not first.done()

    hanging.set_result(None)
    last = await log.next_sync()
    assert not closing.done()
    last.set_result(None)
    await closing

    await asyncio.gather(first, *behind)
    assert log.writes == [[b"1a"], [b"2a", b"3a", b"4a"]]


async def test_a_sync_that_fails_while_the_committer_closes_ends_both(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S2."""
    within = start(committer, b"1", row(b"a"))
    sync = await log.next_sync()
    behind = start(committer, b"2", row(b"a"))
    await SystemClock().sleep_ms(0)
    closing = asyncio.ensure_future(committer.close())
    await SystemClock().sleep_ms(0)

    sync.set_exception(OSError("Input/output error"))

    async with asyncio.timeout(60):
        await closing
    outcomes = await asyncio.gather(within, behind, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CommitOutcomeUnknown] * 2


async def test_what_arrives_while_the_log_refuses_writes_follows_in_its_order(
    committer: Committer[list[bytes]], log: ScriptedLog
) -> None:
    """S3: the commits that wait are written first, and each once."""
    log.stalls = 2
    first = start(committer, b"1", row(b"a"))
    while log.stalls == 2:
        await SystemClock().sleep_ms(0)
    second = start(committer, b"2", row(b"a"))

    (await log.next_sync()).set_result(None)
    (await log.next_sync()).set_result(None)
    await asyncio.gather(first, second)

    assert log.writes == [[b"1a"], [b"2a"]]


async def test_a_sync_that_the_log_cannot_begin_is_an_unknown_outcome(
    committer: Committer[list[bytes]], log: ScriptedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2."""

    def refuse(_: WorkEnded) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(log, "begin_sync", refuse)

    with pytest.raises(CommitOutcomeUnknown, match="no thread"):
        await committer.commit(b"1", row(b"a"))
    async with asyncio.timeout(60):
        await committer.close()
