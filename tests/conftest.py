"""How thoroughly the tests search, in which order they run, and what is run side by side.

There is a short, repeatable way for every day and a long one on demand. Files run side by side,
each by itself in order, because its tests may share a cluster; tests of a Spark session share one.
"""

import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry.trace import ProxyTracer, Tracer
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.repository import without_collection

# Before any test imports gRPC, which else writes a line whenever a server stops.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251 - handed on, not read

# In the background of a shell it is ignored, also by the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.engine_choice", "tests.support.storage_fixtures"]

_TESTS = Path(__file__).parent
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)

_LONGEST_FIRST = ("spark", "cluster", "model", "service", "chart", "unit")
"""Directories by how long a file of theirs takes, so that no worker is left with a long one at the
end. One that is not named here goes first."""


_WITHOUT_SESSION = (
    "test_connect.py",
    "test_installed_alone.py",
    "test_planner.py",
    "test_retention_crash.py",
    "test_scheduler.py",
    "test_serving.py",
)
"""Files below `spark` whose tests start a Spark of their own, if any."""


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole files to the workers, and all tests of the Spark session to one of them.

    Not by groups (`xdist_group`), which have no effect with this pytest: each test then runs
    anywhere, and every worker starts the clusters and the Spark session again.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        directory, _, name = file.rpartition("/")
        shares_session = directory == "tests/spark" and name not in _WITHOUT_SESSION
        return directory if shares_session else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFile:
    return _ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="search at random, and for minutes")
    parser.addoption(
        "--members", type=int, default=1, help="brokers and storage nodes of clusters of processes"
    )
    parser.addoption(
        "--redis", action="store_true", help="all tests of the redis engine, also on a cluster"
    )
    parser.addoption(
        "--engine",
        choices=("rocksdb", "redis", "redis-cluster"),
        default="rocksdb",
        help="the engine under the storage services that tests start",
    )
    parser.addoption(
        "--redis-rounds", type=int, default=0, help="rounds of faults on a cluster of Valkeys"
    )
    parser.addoption("--seed", type=int, help="the one simulated history, or crash test, to repeat")
    parser.addoption("--histories", type=int, help="how many histories to simulate")
    parser.addoption(
        "--random-order-seed",
        type=int,
        metavar="N",
        help="shuffle files, and the tests within a file, by this seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("short", derandomize=True, deadline=None, suppress_health_check=_SLOW)
    settings.register_profile("long", deadline=None, suppress_health_check=_SLOW, print_blob=True)
    settings.load_profile("long" if config.getoption("--long") else "short")
    let_tracers_follow_the_provider()


def let_tracers_follow_the_provider() -> None:
    """A tracer keeps the first provider it meets: the provider of one test would outlive it."""
    kept: property = vars(ProxyTracer)["_tracer"]

    def current(self: ProxyTracer) -> Tracer:
        self._real_tracer = None
        tracer: Tracer = kept.__get__(self)
        return tracer

    ProxyTracer._tracer = property(current)  # type: ignore[method-assign, assignment]


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.option.random_order_seed
    return [] if seed is None else [f"random order: --random-order-seed {seed}"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """pytest parses the sources of a test that has failed."""
    with without_collection():
        return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in pytest_report_header(config):
        terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.option.random_order_seed
    if seed is None:
        items.sort(key=_rank)
    else:
        _shuffle(items, random.Random(seed))


def _rank(item: pytest.Item) -> int:
    directory = item.path.relative_to(_TESTS).parts[0]
    return _LONGEST_FIRST.index(directory) if directory in _LONGEST_FIRST else -1


def _shuffle(items: list[pytest.Item], chance: random.Random) -> None:
    """The tests of a file stay together, because they may share a cluster."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    chance.shuffle(shuffled)
    for tests in shuffled:
        chance.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


@pytest.fixture
def usual_hangups() -> Iterator[None]:
    """Processes of the test end by SIGHUP, also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
