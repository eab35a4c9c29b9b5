"""How thoroughly the tests search: a short, repeatable way for every day, a long one on demand."""

import pytest
from hypothesis import HealthCheck, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="search at random, and for minutes")
    parser.addoption("--seed", type=int, help="the one simulated history to repeat")
    parser.addoption("--histories", type=int, help="how many histories to simulate")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("short", derandomize=True, deadline=None, suppress_health_check=_SLOW)
    settings.register_profile("long", deadline=None, suppress_health_check=_SLOW, print_blob=True)
    settings.load_profile("long" if config.getoption("--long") else "short")
