"""`ServiceKeeper` over real processes: kills, hangs and ports that others took, at any time."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.unsteady_broker import HANGS_WHILE
from tidemark.clock import ManualClock
from tidemark.local.cluster import LocalCluster
from tidemark.local.ports import listening_socket
from tidemark.local.restarts import FAILURES_MAX, PAUSE_MS, STABLE_AFTER_MS, GaveUp, ServiceKeeper


class Lines:
    """What keepers report; can be waited for."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.all.append(line)
        self._changed.set()

    async def until(self, count: int) -> str:
        """The last line, once there are that many."""
        while len(self.all) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.all[count - 1]


@asynccontextmanager
async def kept(*keepers: ServiceKeeper) -> AsyncIterator[list["asyncio.Task[Any]"]]:
    tasks = [asyncio.create_task(keeper.keep()) for keeper in keepers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def clock() -> ManualClock:
    """Time of the pauses alone; services start in their own time."""
    return ManualClock()


@pytest.fixture
def lines() -> Lines:
    return Lines()


async def test_a_killed_service_is_started_again_after_a_pause(
    cluster: LocalCluster, clock: ManualClock, lines: Lines
) -> None:
    """S6."""
    keeper = ServiceKeeper(cluster, "storage", clock, lines)
    before = (cluster.pid("storage"), cluster.address("storage"))

    async with kept(keeper):
        await cluster.kill("storage")
        reported = await lines.until(1)
        await clock.until_sleepers(1)
        stopped = not keeper.serving.is_set() and not cluster.running("storage")
        await clock.advance_ms(PAUSE_MS)
        again = await lines.until(2)

        assert stopped
        assert reported == (
            "storage was killed by SIGKILL; restarting it in 0.5 s "
            f"(log: {cluster.log_file('storage')})"
        )
        assert again.startswith("storage is serving again")
        assert cluster.pid("storage") != before[0]
        assert cluster.address("storage") == before[1]


async def test_a_service_that_fails_again_and_again_is_given_up(
    cluster: LocalCluster, clock: ManualClock, lines: Lines
) -> None:
    """S6."""
    keeper = ServiceKeeper(cluster, "lifecycle", clock, lines)

    async with kept(keeper) as tasks:
        for failures in range(1, FAILURES_MAX):
            await cluster.kill("lifecycle")
            await lines.until(2 * failures - 1)
            await clock.until_sleepers(1)
            await clock.advance_ms(PAUSE_MS << (failures - 1))
            await lines.until(2 * failures)
        await cluster.kill("lifecycle")

        with pytest.raises(GaveUp, match="lifecycle was killed by SIGKILL, failure 5 in a row"):
            await tasks[0]
    assert not cluster.running("lifecycle")


async def test_failures_that_are_far_apart_do_not_add_up(
    cluster: LocalCluster, clock: ManualClock, lines: Lines
) -> None:
    """S6."""
    keeper = ServiceKeeper(cluster, "lifecycle", clock, lines)

    async with kept(keeper):
        for count in (1, 3):
            await keeper.serving.wait()
            await clock.advance_ms(STABLE_AFTER_MS)
            await cluster.kill("lifecycle")
            await lines.until(count)
            await clock.until_sleepers(1)
            await clock.advance_ms(PAUSE_MS)
            await lines.until(count + 1)

    assert "restarting it in 0.5 s" in lines.all[0]
    assert "restarting it in 0.5 s" in lines.all[2]


async def test_a_port_taken_meanwhile_is_a_failure_like_others(
    cluster: LocalCluster, clock: ManualClock, lines: Lines
) -> None:
    """S6: the service comes back where clients look for it, or not at all."""
    host, _, port = cluster.address("broker").rpartition(":")
    keeper = ServiceKeeper(cluster, "broker", clock, lines)

    async with kept(keeper):
        await cluster.kill("broker")
        with listening_socket(host, int(port)):
            await clock.until_sleepers(1)
            await clock.advance_ms(PAUSE_MS)
            refused = await lines.until(2)
            await clock.until_sleepers(1)
        await clock.advance_ms(2 * PAUSE_MS)
        again = await lines.until(3)

    assert refused.startswith("broker ended with exit code 2: ")
    assert port in refused
    assert "restarting it in 1 s" in refused
    assert again.startswith("broker is serving again")


async def test_a_service_that_does_not_become_healthy_is_stopped_and_tried_again(
    start_cluster: Callable[..., Any], clock: ManualClock, lines: Lines, tmp_path: Path
) -> None:
    """S6."""
    hang = tmp_path / "hang"
    cluster: LocalCluster = await start_cluster(
        modules={"broker": "tests.support.unsteady_broker"},
        environment={"broker": {HANGS_WHILE: str(hang)}},
    )
    keeper = ServiceKeeper(cluster, "broker", clock, lines, healthy_timeout_ms=100)
    hang.touch()

    async with kept(keeper) as tasks:
        await cluster.kill("broker")
        for failures in range(1, FAILURES_MAX):
            await clock.until_sleepers(1)
            await clock.advance_ms(PAUSE_MS << (failures - 1))
            if failures + 1 < FAILURES_MAX:
                await lines.until(failures + 1)

        with pytest.raises(GaveUp, match="broker is not healthy"):
            await tasks[0]
    assert lines.all[1].startswith("broker is not healthy: ")
    assert not cluster.running("broker")


async def test_a_service_waits_for_the_one_it_needs(
    cluster: LocalCluster, clock: ManualClock, lines: Lines
) -> None:
    """S6: a broker cannot become healthy without storage, which is not its failure."""
    storage = ServiceKeeper(cluster, "storage", clock, lines)
    broker = ServiceKeeper(cluster, "broker", clock, lines, after=storage)

    async with kept(storage, broker):
        await cluster.kill("storage")
        await lines.until(1)
        await cluster.kill("broker")
        waiting = await lines.until(2)
        await clock.until_sleepers(2)
        await clock.advance_ms(PAUSE_MS)
        again = [await lines.until(3), await lines.until(4)]

    assert "broker was killed by SIGKILL; restarting it once storage is serving" in waiting
    assert [line.split(" (")[0] for line in again] == [
        "storage is serving again",
        "broker is serving again",
    ]


@pytest.mark.parametrize("paused", [True, False])
async def test_a_keeper_can_be_ended_at_any_time(
    cluster: LocalCluster, clock: ManualClock, lines: Lines, paused: bool
) -> None:
    """S5: in its pause, or while the service starts; `stop` ends what runs."""
    keeper = ServiceKeeper(cluster, "storage", clock, lines)

    async with kept(keeper) as tasks:
        await cluster.kill("storage")
        await clock.until_sleepers(1)
        if not paused:
            await clock.advance_ms(PAUSE_MS)
        tasks[0].cancel()
        await asyncio.wait(tasks)
    stopped = await cluster.stop()

    assert not cluster.running("storage")
    assert {each.exit_code for each in stopped} <= {0, -signal.SIGTERM}
