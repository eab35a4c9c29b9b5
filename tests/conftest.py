"""How thoroughly the tests search, and what is run side by side.

There is a short, repeatable way for every day and a long one on demand. Files run side by side,
each by itself in order, because its tests may share a cluster; those with Spark share a session.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_TESTS = Path(__file__).parent
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="search at random, and for minutes")
    parser.addoption("--seed", type=int, help="the one simulated history to repeat")
    parser.addoption("--histories", type=int, help="how many histories to simulate")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("short", derandomize=True, deadline=None, suppress_health_check=_SLOW)
    settings.register_profile("long", deadline=None, suppress_health_check=_SLOW, print_blob=True)
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.path.relative_to(_TESTS)
        item.add_marker(pytest.mark.xdist_group("spark" if file.parts[0] == "spark" else str(file)))


@pytest.fixture
def usual_hangups() -> Iterator[None]:
    """Processes of the test end by SIGHUP, also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
