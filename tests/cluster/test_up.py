"""`tidemark up` from the outside: what it says, what it leaves behind, how it ends (S5, S6)."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.cluster.up_process import UpProcess
from tidemark.local.ports import listening_socket
from tidemark.rpc import open_channel


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[UpProcess]:
    """A cluster that is ready."""
    async with UpProcess(tmp_path / "data") as process:
        await process.ready()
        yield process


async def test_a_ready_cluster_answers_where_it_says_it_does(up: UpProcess) -> None:
    """S1, S6."""
    broker = next(line.split()[1] for line in up.output if line.split()[0] == "broker")

    async with open_channel(broker) as channel:
        health: Any = HealthStub(channel)
        service = "tidemark.api.broker.v1.BrokerService"
        answer = await health.Check(HealthCheckRequest(service=service))

    assert answer.status == HealthCheckResponse.SERVING


async def test_a_cluster_without_retention_says_so(up: UpProcess) -> None:
    """R11."""
    assert any(line.split()[:2] == ["retention", "off:"] for line in up.output)


@pytest.mark.parametrize("ask", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_stops_the_services_in_order(up: UpProcess, ask: signal.Signals) -> None:
    """S5."""
    up.process.send_signal(ask)

    await up.line_with("Stopped lifecycle, broker, storage.")
    assert await up.exit_code() == 0
    assert await up.complaint() == ""
    await up.services_ended()


async def test_it_can_be_stopped_before_it_is_ready(tmp_path: Path) -> None:
    """S5."""
    async with UpProcess(tmp_path / "data", "--verbose") as up:
        assert up.process.stderr is not None
        await up.process.stderr.readline()  # a service has begun to talk
        pidfds = [os.pidfd_open(pid) for pid in up.services().values()]

        up.process.terminate()

        assert await up.exit_code() == 0
        for pidfd in pidfds:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, 0)
            os.close(pidfd)


async def test_a_second_signal_kills_at_once(up: UpProcess) -> None:
    os.kill(up.services()["lifecycle"], signal.SIGSTOP)  # it will not stop by itself
    up.process.terminate()
    await up.line_with("Stopping")

    up.process.terminate()

    assert await up.exit_code() == 1
    assert (await up.complaint()).count("\n") == 1
    await up.services_ended()


async def test_services_do_not_outlive_a_supervisor_that_was_killed(up: UpProcess) -> None:
    up.process.kill()

    await up.services_ended()


async def test_services_are_beyond_the_reach_of_the_terminals_interrupt(up: UpProcess) -> None:
    groups = {os.getpgid(pid) for pid in up.services().values()}

    assert len(groups) == 3
    assert os.getpgid(up.process.pid) not in groups


@pytest.mark.parametrize("name", ["broker", "storage", "lifecycle"])
async def test_a_service_that_dies_ends_the_others_and_is_named(up: UpProcess, name: str) -> None:
    os.kill(up.services()[name], signal.SIGKILL)

    assert await up.exit_code() == 1
    expected = f"tidemark up: {name} was killed by SIGKILL; stopping the others\n"
    assert await up.complaint() == expected
    await up.services_ended()


@pytest.mark.parametrize("name", ["broker", "storage", "lifecycle"])
async def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path, name: str) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        async with UpProcess(tmp_path / "data", f"--{name}-port={port}") as up:
            complaint = await up.complaint()

            assert await up.exit_code() == 2
    assert complaint.count("\n") == 1
    assert f"{name} cannot listen on 127.0.0.1:{port}: already in use" in complaint


async def test_one_port_for_two_services_is_refused(tmp_path: Path) -> None:
    with listening_socket("127.0.0.1", 0) as freed:
        port = freed.getsockname()[1]

    ports = (f"--broker-port={port}", f"--storage-port={port}")
    async with UpProcess(tmp_path / "data", *ports) as up:
        complaint = await up.complaint()

        assert await up.exit_code() == 2
    assert complaint.count("\n") == 1
    assert "already in use" in complaint


async def test_a_data_directory_in_use_is_one_line_and_exit_code_2(
    up: UpProcess, tmp_path: Path
) -> None:
    async with UpProcess(tmp_path / "data") as second:
        complaint = await second.complaint()

        assert await second.exit_code() == 2
    assert complaint.count("\n") == 1
    assert f"{tmp_path / 'data'} is in use" in complaint
    assert f"process {up.process.pid}" in complaint


async def test_a_data_directory_that_is_a_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async with UpProcess(tmp_path / "file" / "data") as up:
        complaint = await up.complaint()

        assert await up.exit_code() == 2
    assert complaint.count("\n") == 1
    assert "cannot use data directory" in complaint


async def test_what_storage_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    """The number of partitions is fixed once data is stored."""
    async with UpProcess(tmp_path / "data", "--partitions=2") as first:
        await first.ready()
        first.process.terminate()
        await first.exit_code()

    async with UpProcess(tmp_path / "data", "--partitions=3") as second:
        complaint = await second.complaint()

        assert await second.exit_code() == 2
    assert complaint.count("\n") == 1
    assert complaint.startswith("tidemark up: storage ended with exit code 2: ")
    assert " of 2 of cluster" in complaint


async def test_logs_of_the_run_before_are_kept(up: UpProcess, tmp_path: Path) -> None:
    logs = tmp_path / "data" / "logs"
    first = (logs / "storage.log").read_text()
    up.process.terminate()
    await up.exit_code()

    async with UpProcess(tmp_path / "data") as again:
        await again.ready()

    assert (logs / "storage.previous.log").read_text().startswith(first)
    assert (logs / "storage.log").read_text()
