"""The engine under the services that tests start in their process: RocksDB, or with `--engine
redis` a Valkey, which is emptied before each test."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.valkey import valkey

ENGINE: dict[str, Any] = {}
"""Settings of every storage service; none for RocksDB."""


@pytest.fixture(scope="session")
def durable_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that loses nothing; tests share it, and empty it."""
    with valkey(tmp_path_factory.mktemp("valkey"), durable=True) as server:
        yield server.connection_url


@pytest.fixture(scope="session", autouse=True)
def chosen_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.option.engine == "redis":
        ENGINE.update(engine="redis", redis_url=request.getfixturevalue("durable_valkey"))
    yield
    ENGINE.clear()


@pytest.fixture(autouse=True)
def empty_engine(request: pytest.FixtureRequest, chosen_engine: None) -> None:
    if ENGINE and request.node.get_closest_marker("rocksdb") is not None:
        pytest.skip("a test of RocksDB")
    if ENGINE:
        with redis.Redis.from_url(ENGINE["redis_url"]) as server:
            server.flushall()
