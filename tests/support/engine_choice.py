"""The engine under the storage services that tests start: RocksDB, or with `--engine` a Valkey, or
a cluster of three Valkeys with a replica each, which confirm every commit. Before each test they
are emptied.

Some tests of each suite run on a Valkey also without it (`also_on_redis`)."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.support.valkey import valkey
from tests.support.valkey_cluster import ValkeyCluster

ENGINE: dict[str, Any] = {}
"""Settings of every storage service; none for RocksDB."""

_OF_PROCESSES = "processes-"
"""How the ids of clusters of processes begin: tests share them, so that their data stays."""


def engine_variables() -> dict[str, str]:
    """The same settings as variables, for a storage service in a process of its own."""
    if not ENGINE:
        return {}
    return {
        "TIDEMARK_STORAGE_ENGINE": "redis",
        "TIDEMARK_REDIS_URL": ENGINE["redis_url"],
        "TIDEMARK_REDIS_DURABILITY": ENGINE.get("redis_durability", "local"),
    }


def cluster_variables(given: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The environments of a cluster of processes, with the chosen engine under a new id."""
    if not ENGINE:
        return {name: dict(variables) for name, variables in given.items()}
    cluster_id = {"TIDEMARK_CLUSTER_ID": _OF_PROCESSES + uuid4().hex}
    own = {kind: dict(cluster_id) for kind in ("storage", "broker", "lifecycle", "retention")}
    own["storage"] |= engine_variables()
    return {name: {**own.get(name, {}), **given.get(name, {})} for name in {*own, *given}}


@pytest.fixture(scope="session")
def durable_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that loses nothing; tests share it, and empty it."""
    with valkey(tmp_path_factory.mktemp("valkey"), durable=True) as server:
        yield server.connection_url


@pytest.fixture(scope="session")
def replicated_valkeys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Three masters and three replicas."""
    directory = tmp_path_factory.mktemp("valkeys")
    with ValkeyCluster.running(directory, masters=3, replicas=3) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def chosen_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of the servers; None with RocksDB."""
    if request.config.option.engine == "rocksdb":
        yield None
        return
    client: Any
    if request.config.option.engine == "redis":
        url = request.getfixturevalue("durable_valkey")
        client = redis.Redis.from_url(url)
    else:
        servers: ValkeyCluster = request.getfixturevalue("replicated_valkeys")
        url = servers.url
        client = redis.RedisCluster(host="127.0.0.1", port=servers.servers[0].port)
        ENGINE.update(redis_durability="replicated")
    ENGINE.update(engine="redis", redis_url=url)
    yield client
    ENGINE.clear()
    client.close()


@pytest.fixture(autouse=True)
def empty_engine(request: pytest.FixtureRequest, chosen_engine: Any) -> Iterator[None]:
    """The parameter is the engine of one test (`also_on_redis`)."""
    if getattr(request, "param", "") == "redis":
        url = request.getfixturevalue("durable_valkey")
        with redis.Redis.from_url(url) as client:
            _empty(client)
        ENGINE.update(engine="redis", redis_url=url)
        yield
        ENGINE.clear()
        return
    if chosen_engine is not None:
        marker = request.node.get_closest_marker("rocksdb")
        if marker is not None:
            pytest.skip(f"a test of RocksDB: {marker.kwargs.get('reason', 'it needs its files')}")
        _empty(chosen_engine)
    yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked on both engines, where `--engine` chooses none: the short form of
    `make test-redis`."""
    marked = metafunc.definition.get_closest_marker("also_on_redis") is not None
    if marked and metafunc.config.option.engine == "rocksdb":
        metafunc.parametrize("empty_engine", ("rocksdb", "redis"), indirect=True)


def _empty(client: Any) -> None:
    for key in list(client.scan_iter(count=1_000)):
        if not key.startswith(b"{tidemark/" + _OF_PROCESSES.encode()):
            client.unlink(key)
