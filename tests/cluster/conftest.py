"""Clusters for tests. When a test fails, the last lines of each service's log are shown."""

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.cli_process import Cli
from tests.support.engine_choice import cluster_variables
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tidemark.local.cluster import LocalCluster

StartCluster = Callable[..., Any]
LOG_LINES_SHOWN = 50
STOP_TIMEOUT_MS = 60_000
"""After which a service that was asked to stop is killed: only where it hangs."""

LOG_DIRECTORIES = pytest.StashKey[list[Path]]()
SHARED_LOGS = pytest.StashKey[dict[str, Path]]()
"""Log directories of clusters that tests share, by the name of the fixture."""


PARTITIONS = 4
"""Fewer than a new cluster has by default: a cluster starts and stops sooner."""


def members(request: pytest.FixtureRequest) -> dict[str, int]:
    """How many brokers, storage nodes and partitions a cluster has, unless its test decides."""
    count = request.config.getoption("members")
    return {"brokers": count, "storages": count, "partitions": PARTITIONS}


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
                **members(request),
                "data_dir": tmp_path / f"data-{number}",
                "log_dir": logs[-1],
                "stop_timeout_ms": STOP_TIMEOUT_MS,
                **options,
            }
            options["environment"] = cluster_variables(options.get("environment", {}))
            return await running.enter_async_context(LocalCluster(**options))

        yield start


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> LocalCluster:
    """A healthy cluster of three processes on free ports, as it comes."""
    started: LocalCluster = await start_cluster()
    return started


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    """Receives what services export. A cluster that needs it asks for it first: it stops last."""
    async with otlp_receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    """A cluster for tests that kill nothing, and delete the topics that they created."""
    async with shared(request) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cli(request: pytest.FixtureRequest) -> AsyncIterator[Cli]:
    """The command `tidemark`, with one cluster for all its tests: they differ in their topics."""
    async with shared(request) as cluster:
        yield Cli.of(cluster)


@asynccontextmanager
async def shared(request: pytest.FixtureRequest, **options: Any) -> AsyncIterator[LocalCluster]:
    """A cluster for a fixture that several tests share, with the options of `LocalCluster`."""
    fixture = str(request.fixturename)
    directory = request.getfixturevalue("tmp_path_factory").mktemp(fixture)
    request.config.stash.setdefault(SHARED_LOGS, {})[fixture] = directory / "logs"
    options = {
        **members(request),
        "log_dir": directory / "logs",
        "stop_timeout_ms": STOP_TIMEOUT_MS,
        **options,
    }
    options["environment"] = cluster_variables(options.get("environment", {}))
    async with LocalCluster(directory / "data", **options) as cluster:
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        shared = item.config.stash.get(SHARED_LOGS, {})
        used = [logs for fixture, logs in shared.items() if fixture in item.fixturenames]
        for directory in (*item.stash.get(LOG_DIRECTORIES, []), *used):
            for log in sorted(directory.glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
                report.sections.append((f"{directory.name}/{log.name}", "\n".join(lines)))
    return report
