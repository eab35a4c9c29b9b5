"""The commands that containers and `helm test` run, as processes against a real cluster."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tidemark.local.cluster import SERVICES, LocalCluster
from tidemark.local.ports import free_address

PATIENTLY = ("--timeout-ms", "60000")
"""Instead of the seconds that a probe gives a service that serves, on a machine that runs tests."""


async def run(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and everything it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},  # noqa: TID251 - handed on, not read
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_the_probe_passes_for_a_service_that_serves(shared_cluster: LocalCluster) -> None:
    """S1."""
    for name in SERVICES:
        assert await run("tidemark.probe", shared_cluster.address(name), *PATIENTLY) == (0, "")


async def test_the_probe_finds_the_service_that_the_environment_configures(
    shared_cluster: LocalCluster,
) -> None:
    """As in a container, where one of the services runs and listens on all addresses."""
    port = shared_cluster.address("broker").rpartition(":")[2]
    unused = free_address()
    environment = {
        "TIDEMARK_BROKER_LISTEN": f"0.0.0.0:{port}",
        "TIDEMARK_STORAGE_LISTEN": unused,
        "TIDEMARK_LIFECYCLE_LISTEN": unused,
    }

    assert await run("tidemark.probe", *PATIENTLY, environment=environment) == (0, "")


async def test_the_probe_fails_in_one_line_when_no_service_listens() -> None:
    address = free_address()

    status, output = await run("tidemark.probe", address)

    assert status == 1
    assert output.startswith(f"{address}: ")
    assert output.count("\n") == 1


async def test_the_probe_does_not_wait_for_a_service_that_hangs(
    shared_cluster: LocalCluster,
) -> None:
    with paused(shared_cluster.pid("lifecycle")):
        status, output = await run(
            "tidemark.probe", shared_cluster.address("lifecycle"), "--timeout-ms", "300"
        )

    assert status == 1
    assert output.startswith(shared_cluster.address("lifecycle"))


async def test_the_probe_fails_for_a_name_that_the_service_does_not_have(
    shared_cluster: LocalCluster,
) -> None:
    address = shared_cluster.address("broker")
    status, output = await run("tidemark.probe", address, "--service", "nonsense", *PATIENTLY)

    assert (status, output) == (1, f"{shared_cluster.address('broker')}: no such service\n")


@pytest.mark.parametrize("arguments", [("no-port",), ("127.0.0.1:7400", "--timeout-ms", "soon")])
async def test_the_probe_refuses_wrong_arguments(arguments: tuple[str, ...]) -> None:
    status, output = await run("tidemark.probe", *arguments)

    assert status == 2
    assert "usage:" in output


async def test_the_smoke_test_passes_again_and_again(shared_cluster: LocalCluster) -> None:
    """S5: what `helm test` runs."""
    for _ in range(2):
        status, output = await run("tidemark.smoke", shared_cluster.address("broker"))

        assert status == 0, output
        assert output.splitlines()[-1] == "Tidemark works."


async def test_the_smoke_test_fails_in_one_line_when_storage_is_gone(cluster: LocalCluster) -> None:
    await cluster.kill("storage")

    status, output = await run("tidemark.smoke", cluster.address("broker"), "--timeout-ms", "500")

    assert status == 1
    assert output.startswith("UNAVAILABLE: ")
    assert output.count("\n") == 1


async def test_the_smoke_test_gives_a_cluster_time_to_start(cluster: LocalCluster) -> None:
    await cluster.kill("storage")

    smoke = asyncio.create_task(run("tidemark.smoke", cluster.address("broker")))
    await cluster.restart("storage")
    status, output = await smoke

    assert status == 0, output
