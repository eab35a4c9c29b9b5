"""`LocalCluster`: what tests and benchmarks do to services."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_broker import until
from tidemark.local.cluster import LocalCluster
from tidemark.local.service_process import ServiceFailed


async def test_a_killed_service_comes_back_at_the_same_address(cluster: LocalCluster) -> None:
    before = (cluster.pid("storage"), cluster.address("storage"))

    await cluster.kill("storage")
    assert not cluster.running("storage")
    await cluster.restart("storage")

    assert cluster.running("storage")
    assert cluster.pid("storage") != before[0]
    assert cluster.address("storage") == before[1]


async def test_services_stop_cleanly_when_asked(cluster: LocalCluster) -> None:
    """S5."""
    stopped = await cluster.stop()

    names_and_codes = [(each.name, each.exit_code) for each in stopped]
    assert names_and_codes == [("lifecycle", 0), ("broker", 0), ("storage", 0)]


async def test_a_service_that_does_not_stop_in_time_is_killed(start_cluster: Any) -> None:
    cluster = await start_cluster(stop_timeout_ms=100)
    os.kill(cluster.pid("lifecycle"), signal.SIGSTOP)

    exit_code = await cluster.terminate("lifecycle")

    assert exit_code == -signal.SIGKILL


async def test_a_service_that_refuses_to_start_is_quoted(start_cluster: Any) -> None:
    environment = {"broker": {"TIDEMARK_BROKER_LISTEN": "nowhere"}}

    with pytest.raises(ServiceFailed) as failed:
        await start_cluster(environment=environment)

    assert failed.value.exit_code == 2
    assert str(failed.value).startswith(
        "broker ended with exit code 2: TIDEMARK_BROKER_LISTEN='nowhere': must be host:port"
    )


async def test_a_service_that_cannot_reach_its_data_says_why_while_others_wait_for_it(
    tmp_path: Path,
) -> None:
    """S9, S6."""
    environment = {
        "storage": {
            "TIDEMARK_STORAGE_ENGINE": "redis",
            "TIDEMARK_REDIS_URL": "redis://:secret@127.0.0.1:1",
        }
    }
    cluster = LocalCluster(
        tmp_path / "data", log_dir=tmp_path / "logs", partitions=1, environment=environment
    )
    starting = asyncio.create_task(cluster.start())
    try:

        async def says_why() -> bool:
            return bool(cluster.last_error("storage"))

        await until(says_why)
        why = cluster.last_error("storage")
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await cluster.stop()

    assert "127.0.0.1:1" in why
    assert "secret" not in why


async def test_two_clusters_run_side_by_side(start_cluster: Any) -> None:
    one, other = await start_cluster(), await start_cluster()

    names = ("storage", "broker", "lifecycle")
    addresses = {cluster.address(name) for cluster in (one, other) for name in names}

    assert len(addresses) == 6
