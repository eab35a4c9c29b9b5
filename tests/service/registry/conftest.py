"""One Valkey server for all tests of the registry; each test has a cluster of its own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.valkey import Members, members, valkey
from tidemark.clock import ManualClock


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.connection_url


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def cluster(
    server_url: str, clock: ManualClock, request: pytest.FixtureRequest
) -> AsyncIterator[Members]:
    async with members(server_url, request.node.name[:100], clock) as made:
        yield made
