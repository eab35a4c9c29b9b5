"""Spark on demand: its process starts for a pass, and ends when idle, lost or stuck (P4)."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_batch.passes.findings import Finding
from spark_batch.passes.outcome import JobName, Pass, Phase, Progress
from spark_batch.planner.__main__ import LOST, serve
from spark_batch.planner.lines import (
    PassDone,
    PassFailed,
    PassProgress,
    PassRequest,
    Ready,
    Reply,
    SparkFailed,
    decode_reply,
    failure_of,
)
from spark_batch.planner.process import (
    BACKOFF_MS,
    START_MS,
    PlannerProcess,
    SparkNotStarted,
)
from spark_batch.planner.spark_passes import INTERRUPT_MS, lost_spark
from tests.support.local_broker import until
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import DeadlineExceeded, TopicNotFound, Unavailable
from tidemark.settings import RetentionSettings

OUTCOME = Pass("retention-1", False, (Finding("t", "expired", 3),), 5, {2: "UNAVAILABLE: gone"})

PROGRAM = """
import sys
from spark_batch.passes.outcome import JobName, Pass
from spark_batch.planner.lines import PassDone, PassProgress, PassRequest, Ready, SparkFailed

def send(reply):
    sys.stdout.buffer.write(reply.encode())
    sys.stdout.buffer.flush()

mode = sys.argv[1]
if mode == "broken":
    send(SparkFailed("no Java"))
    sys.exit(1)
if mode == "silent":
    sys.stdin.read()
send(Ready())
for line in sys.stdin.buffer:
    request = PassRequest.decode(line)
    if mode == "stuck":
        continue
    if mode == "dying":
        sys.exit(7)
    if mode == "noisy":
        print("not a reply", flush=True)
    send(PassProgress(request.number, 2, 1, 30, 10))
    send(PassDone(request.number, Pass(request.job, request.dry_run, (), 1)))
if mode == "lingering":
    while True:
        sys.stdin.read()
        __import__("signal").pause()
"""
"""Answers as the planner does, without Spark: each way in which a child can behave."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planner_stand_in.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "planner_stand_in"


@asynccontextmanager
async def planner(program: str, mode: str, clock: ManualClock) -> AsyncIterator[PlannerProcess]:
    made = PlannerProcess(RetentionSettings(), clock, (program, mode))
    try:
        yield made
    finally:
        await made.close()


def ignore(_: Progress) -> None:
    """For passes whose progress is of no interest."""


async def until_changed(made: PlannerProcess) -> None:
    async with asyncio.timeout(60):
        await made.changed.wait()
    made.changed.clear()


def test_every_line_is_read_as_it_was_written() -> None:
    """P4."""
    request = PassRequest(4, JobName.EVICTION, True)
    failed = decode_reply(PassFailed(9, TopicNotFound("no topic", topic="t")).encode())
    unknown = decode_reply(failure_of(9, ZeroDivisionError("oh")).encode())

    assert PassRequest.decode(request.encode()) == request
    assert decode_reply(Ready().encode()) == Ready()
    assert decode_reply(SparkFailed("why").encode()) == SparkFailed("why")
    progress = PassProgress(3, 2, 1, 30, 10)
    assert decode_reply(progress.encode()) == progress
    assert decode_reply(PassDone(3, OUTCOME).encode()) == PassDone(3, OUTCOME)
    assert isinstance(failed, PassFailed)
    assert isinstance(failed.error, TopicNotFound)
    assert failed.error.metadata == {"topic": "t"}
    assert isinstance(unknown, PassFailed)
    assert unknown.error.detail == "oh"


async def test_spark_starts_with_the_first_pass_and_stops_when_none_followed(
    program: str, clock: ManualClock
) -> None:
    """P4: one process for the passes in between, another one after the stop."""
    async with planner(program, "plain", clock) as made:
        before = made.pid
        first, second = await asyncio.gather(
            made.run(JobName.RETENTION, True, ignore), made.run(JobName.EVICTION, False, ignore)
        )
        began = made.pid
        idle_ms = RetentionSettings().spark_idle_stop_s * 1000
        await until_changed(made)
        await clock.advance_ms(idle_ms - 1)
        await made.run(JobName.RETENTION, False, ignore)
        kept = made.pid
        await clock.advance_ms(idle_ms)
        await until_changed(made)
        idle = made.pid
        await made.run(JobName.RETENTION, False, ignore)
        again = made.pid

    assert (before, idle) == (None, None)
    assert (first.pass_id, first.dry_run) == ("retention", True)
    assert (second.pass_id, second.dry_run) == ("eviction", False)
    assert began is not None
    assert kept == began
    assert again not in (None, began)


async def test_a_pass_reports_what_it_does(program: str, clock: ManualClock) -> None:
    """P4, R11: the start of Spark, if it does not run, and then its tasks and rows."""
    reported: list[Progress] = []
    async with planner(program, "plain", clock) as made:
        await made.run(JobName.RETENTION, False, reported.append)
        first, reported = reported, []
        await made.run(JobName.RETENTION, False, reported.append)

    running = [Progress(Phase.RUNNING), Progress(Phase.RUNNING, 2, 1, 30, 10)]
    assert first == [Progress(Phase.STARTING_SPARK), *running]
    assert reported == running


async def test_a_spark_that_does_not_start_names_its_fault_and_backs_off(
    program: str, clock: ManualClock
) -> None:
    """P4, R11: each attempt is made later than the last."""
    waits = []
    async with planner(program, "broken", clock) as made:
        for _ in range(3):
            with pytest.raises(SparkNotStarted, match="no Java") as failed:
                await made.run(JobName.RETENTION, False, ignore)
            waits.append(failed.value.retry_after_ms)

    assert waits == [BACKOFF_MS, 2 * BACKOFF_MS, 4 * BACKOFF_MS]
    assert made.pid is None


async def test_a_spark_that_hangs_while_it_starts_is_killed(
    program: str, clock: ManualClock
) -> None:
    """P4."""
    async with planner(program, "silent", clock) as made:
        running = asyncio.ensure_future(made.run(JobName.RETENTION, False, ignore))
        await clock.until_sleepers(1)
        await clock.advance_ms(START_MS)

        with pytest.raises(SparkNotStarted, match=f"no answer within {START_MS} ms"):
            await running


async def test_closing_while_spark_starts_does_not_wait_for_it(
    program: str, clock: ManualClock
) -> None:
    """S5, P4: time stands still, so that nothing is waited for."""
    async with planner(program, "silent", clock) as made:
        running = asyncio.ensure_future(made.run(JobName.RETENTION, False, ignore))
        await clock.until_sleepers(1)

        async with asyncio.timeout(60):
            await made.close()

        with pytest.raises(SparkNotStarted):
            await running


@pytest.mark.parametrize(("mode", "why"), [("dying", "status 7"), ("noisy", "status -9")])
async def test_a_lost_spark_fails_its_pass_and_the_next_one_starts_another(
    program: str, clock: ManualClock, mode: str, why: str
) -> None:
    """R9, R11, P4: an unreadable reply counts as lost."""
    started: list[int | None] = []
    async with planner(program, mode, clock) as made:

        def note_start(progress: Progress) -> None:
            if progress.phase is Phase.RUNNING:
                started.append(made.pid)

        for _ in range(2):
            with pytest.raises(Unavailable, match=f"Spark is lost.*{why}"):
                await made.run(JobName.RETENTION, False, note_start)
            assert made.pid is None

    assert None not in started
    assert len(set(started)) == 2


@pytest.fixture
def java() -> Iterator["subprocess.Popen[bytes]"]:
    """A process in place of Java."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


async def test_a_pass_that_loses_its_java_names_the_cause(
    java: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: calls of PySpark fail before the end of Java is noticed, with errors of sockets."""
    session = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local", _gateway=SimpleNamespace(proc=java))
    )

    class LosingJobs:
        """Passes during which Java is killed."""

        def __init__(self, *_: object) -> None: ...

        def retention(self, dry_run: bool) -> Pass:
            java.kill()
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("spark_batch.planner.spark_passes.start_session", lambda _: session)
    monkeypatch.setattr("spark_batch.passes.jobs.Jobs", LosingJobs)
    requests = asyncio.StreamReader()
    requests.feed_data(PassRequest(1, JobName.RETENTION, False).encode())
    replies: list[Reply] = []

    async with asyncio.timeout(60):
        status = await serve(requests, replies.append, RetentionSettings(), SystemClock())

    why = "its Java ended with status -9"
    failed = [each.error for each in replies if isinstance(each, PassFailed)]
    assert status == LOST
    assert replies[0] == Ready()
    assert SparkFailed(why) in replies
    # The process may end before it has answered for its passes.
    assert [each.detail for each in failed] in ([], [lost_spark(why).detail])


async def test_a_planner_that_does_not_end_a_pass_is_killed(
    program: str, clock: ManualClock
) -> None:
    """R11: the child has its own limit; this is for a child that is stuck."""
    async with planner(program, "stuck", clock) as made:
        running = asyncio.ensure_future(made.run(JobName.RETENTION, False, ignore))
        await until_changed(made)
        await clock.until_sleepers(1)
        await clock.advance_ms(RetentionSettings().pass_timeout_ms + 2 * INTERRUPT_MS)

        with pytest.raises(DeadlineExceeded):
            await running


async def test_a_spark_that_does_not_stop_is_killed(program: str, clock: ManualClock) -> None:
    """S5."""
    async with planner(program, "lingering", clock) as made:
        await made.run(JobName.RETENTION, False, ignore)
        closing = asyncio.ensure_future(made.close())
        await clock.until_sleepers(1)
        await clock.advance_ms(60_000)

        async with asyncio.timeout(60):
            await closing
        assert made.pid is None


async def test_a_spark_that_was_stopping_when_a_pass_came_does_not_stay(
    program: str, clock: ManualClock
) -> None:
    """P4: the pass gets another one at once."""

    async def is_gone() -> bool:
        try:
            os.kill(stopping, 0)
        except ProcessLookupError:
            return True
        return False

    async with planner(program, "lingering", clock) as made:
        await made.run(JobName.RETENTION, False, ignore)
        stopping = made.pid or 0
        await clock.until_sleepers(1)
        await clock.advance_ms(RetentionSettings().spark_idle_stop_s * 1000)
        await clock.until_sleepers(1)  # it waits for Spark to stop
        assert made.pid is None

        await made.run(JobName.RETENTION, False, ignore)

        await until(is_gone)
        closing = asyncio.ensure_future(made.close())
        await clock.until_sleepers(1)
        await clock.advance_ms(60_000)
        await closing


async def test_the_scheduler_imports_no_spark() -> None:
    """P4: its memory would stay, also while nothing is due."""
    script = (
        "import sys, spark_batch.__main__; print([m for m in ('pyspark', 'pyarrow', 'pandas')"
        " if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE
    )
    found, _ = await process.communicate()

    assert found.decode().strip() == "[]"
