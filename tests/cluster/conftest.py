"""Clusters for tests. When a test fails, the last lines of each service's log are shown."""

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster.cli_process import Cli
from tidemark.local.cluster import LocalCluster

StartCluster = Callable[..., Any]
LOG_LINES_SHOWN = 50
STOP_TIMEOUT_MS = 60_000
"""After which a service that was asked to stop is killed: only where it hangs."""

LOG_DIRECTORIES = pytest.StashKey[list[Path]]()


@pytest.fixture
async def start_cluster(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[StartCluster]:
    """Starts a healthy cluster with the options of `LocalCluster`; stopped after the test."""
    logs = request.node.stash.setdefault(LOG_DIRECTORIES, [])
    async with AsyncExitStack() as running:

        async def start(**options: Any) -> LocalCluster:
            number = len(logs)
            logs.append(tmp_path / f"logs-{number}")
            options = {
                "data_dir": tmp_path / f"data-{number}",
                "log_dir": logs[-1],
                "stop_timeout_ms": STOP_TIMEOUT_MS,
                **options,
            }
            return await running.enter_async_context(LocalCluster(**options))

        yield start


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> LocalCluster:
    """A healthy cluster of three processes on free ports, as it comes."""
    started: LocalCluster = await start_cluster()
    return started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cli(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cli]:
    """The command `tidemark`, with one cluster for all its tests: they differ in their topics."""
    directory = tmp_path_factory.mktemp("cli")
    async with LocalCluster(directory / "data", log_dir=directory / "logs") as cluster:
        yield Cli.of(cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for directory in item.stash.get(LOG_DIRECTORIES, []):
            for log in sorted(directory.glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
                report.sections.append((f"{directory.name}/{log.name}", "\n".join(lines)))
    return report
