"""`tidemark up` from the outside: its output, the files it leaves, how it ends (S5, S6)."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

import tidemark
from tests.support.local_broker import until
from tests.support.up_process import UpProcess, ended
from tests.support.valkey import valkey
from tidemark.local.ports import listening_socket
from tidemark.rpc import open_channel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[UpProcess]:
    """A cluster that is ready, for tests that leave it alone."""
    async with UpProcess(tmp_path_factory.mktemp("up") / "data") as process:
        await process.ready()
        yield process


@pytest.fixture
async def up(tmp_path: Path, usual_hangups: None) -> AsyncIterator[UpProcess]:
    """A cluster that is ready."""
    async with UpProcess(tmp_path / "data") as process:
        await process.ready()
        yield process


async def test_a_ready_cluster_answers_where_it_says_it_does(shared_up: UpProcess) -> None:
    """S1, S6."""
    async with open_channel(shared_up.address("broker")) as channel:
        health: Any = HealthStub(channel)
        service = "tidemark.api.broker.v1.BrokerService"
        answer = await health.Check(HealthCheckRequest(service=service))

    assert answer.status == HealthCheckResponse.SERVING


async def test_the_command_that_is_shown_can_be_typed(shared_up: UpProcess) -> None:
    """S6: also where the environment is not on the PATH."""
    shown = next(line.split()[1:] for line in shared_up.output if line.split()[0] == "shell")
    program = shutil.which(shown[0])

    assert program is not None
    assert shown[1:] == ["top", "--address", shared_up.address("broker")]


async def test_a_cluster_without_retention_says_so(shared_up: UpProcess) -> None:
    """R11."""
    assert any(line.split()[:2] == ["retention", "off:"] for line in shared_up.output)


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


async def test_services_are_beyond_the_reach_of_the_terminals_interrupt(
    shared_up: UpProcess,
) -> None:
    groups = {os.getpgid(pid) for pid in shared_up.services().values()}

    assert len(groups) == 3
    assert os.getpgid(shared_up.process.pid) not in groups


@pytest.mark.parametrize("name", ["broker", "storage", "lifecycle"])
async def test_a_killed_service_comes_back_with_its_data(
    up: UpProcess, tmp_path: Path, name: str
) -> None:
    """S2, S6: the others go on, and clients find it where it was."""
    async with tidemark.connect(up.address("broker"), client_id="before") as client:
        await client.create_topic("kept")
        await (await client.publisher("kept")).publish(b"before")
    others = {other: pid for other, pid in up.services().items() if other != name}

    os.kill(up.services()[name], signal.SIGKILL)
    died = await up.complaint_with("SIGKILL")
    await up.complaint_with(f"{name} is serving again")

    log = tmp_path / "data" / "logs" / f"{name}.log"
    assert died == (
        f"tidemark up: {name} was killed by SIGKILL; restarting it in 0.5 s (log: {log})"
    )
    assert {other: up.services()[other] for other in others} == others
    async with tidemark.connect(up.address("broker"), client_id="after") as client:
        await (await client.publisher("kept")).publish(b"after")
        async with client.subscribe(["kept"]) as deliveries:
            payloads = [(await anext(deliveries)).payload for _ in range(2)]
    assert payloads == [b"before", b"after"]


async def test_a_service_that_keeps_dying_is_given_up_and_ends_the_others(up: UpProcess) -> None:
    """S6."""
    for _ in range(4):
        os.kill(up.services()["lifecycle"], signal.SIGKILL)
        await up.complaint_with("lifecycle is serving again")
    os.kill(up.services()["lifecycle"], signal.SIGKILL)

    assert await up.complaint() == (
        "tidemark up: lifecycle was killed by SIGKILL, failure 5 in a row: "
        "giving up, stopping the others\n"
    )
    assert await up.exit_code() == 1
    await up.services_ended()


async def test_it_can_be_stopped_while_a_service_waits_to_start_again(up: UpProcess) -> None:
    """S5."""
    os.kill(up.services()["storage"], signal.SIGKILL)
    await up.complaint_with("restarting it in")

    up.process.terminate()

    assert await up.exit_code() == 0
    assert await up.complaint() == ""
    await up.services_ended()


async def test_the_cluster_serves_while_retention_is_installed(tmp_path: Path) -> None:
    """S6, R11: and goes on if that fails."""
    os.mkfifo(tmp_path / "gate")
    setup = f"echo 500 MB; read -r _ <{tmp_path}/gate; exit 7"

    async with UpProcess(tmp_path / "data", "--retention", f"--retention-setup={setup}") as up:
        await up.ready()
        await up.line_with("retention: 500 MB")
        async with tidemark.connect(up.address("broker"), client_id="early") as client:
            await client.create_topic("early")
        await asyncio.to_thread((tmp_path / "gate").write_text, "\n")
        failed = await up.complaint_with("retention stays off")
        up.process.terminate()

        assert await up.exit_code() == 0
        assert failed.endswith(
            "ended with exit code 7: retention stays off, the other services continue"
        )
        await up.services_ended()


async def test_installing_ends_with_the_cluster(tmp_path: Path) -> None:
    """S5."""
    setup = "echo installer $$; sleep 1000; echo never"

    async with UpProcess(tmp_path / "data", "--retention", f"--retention-setup={setup}") as up:
        await up.ready()
        installer = int((await up.line_with("installer")).split()[-1])
        pidfd = os.pidfd_open(installer)
        up.process.terminate()

        assert await up.exit_code() == 0
        await ended(pidfd)
        os.close(pidfd)


async def test_nothing_is_installed_without_retention(tmp_path: Path) -> None:
    """S6."""
    setup = f"touch {tmp_path}/installed"

    async with UpProcess(tmp_path / "data", f"--retention-setup={setup}") as up:
        await up.ready()
        up.process.terminate()
        await up.exit_code()

    assert not (tmp_path / "installed").exists()


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


async def test_brokers_with_a_registry_share_the_partitions(tmp_path: Path) -> None:
    """S8, S6."""
    with valkey(tmp_path / "valkey") as server:
        options = ("--brokers=2", "--partitions=4", f"--registry={server.connection_url}")
        async with UpProcess(tmp_path / "data", *options) as up:
            await up.ready()
            async with tidemark.connect(up.address("broker")) as client:

                async def both_are_known() -> bool:
                    members = await client.admin.list_members()
                    brokers = {each.id for each in members if each.kind == "BROKER"}
                    return brokers == {"broker-0", "broker-1"}

                await until(both_are_known)
                described = await client.admin.describe_cluster()
            up.process.terminate()

            assert await up.exit_code() == 0
    assert sorted(described.assigned) == [0, 1, 2, 3]
    assert not described.static_members


async def test_a_registry_that_does_not_answer_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """S8, S3: before anything starts, and without the password."""
    options = ("--brokers=2", "--registry=redis://:secret@127.0.0.1:1")
    async with UpProcess(tmp_path / "data", *options) as up:
        complaint = await up.complaint()

        assert await up.exit_code() == 2
    assert complaint.count("\n") == 1
    assert "127.0.0.1:1" in complaint
    assert "--registry" in complaint
    assert "secret" not in complaint


async def test_a_data_directory_in_use_is_one_line_and_exit_code_2(shared_up: UpProcess) -> None:
    async with UpProcess(shared_up.data_dir) as second:
        complaint = await second.complaint()

        assert await second.exit_code() == 2
    assert complaint.count("\n") == 1
    assert f"{shared_up.data_dir} is in use" in complaint
    assert f"process {shared_up.process.pid}" in complaint


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
    assert "with 2 partitions, not to cluster 'tidemark' with 3" in complaint


async def test_logs_of_the_run_before_are_kept(up: UpProcess, tmp_path: Path) -> None:
    logs = tmp_path / "data" / "logs"
    first = (logs / "storage.log").read_text()
    up.process.terminate()
    await up.exit_code()

    async with UpProcess(tmp_path / "data") as again:
        await again.ready()

    assert (logs / "storage.previous.log").read_text().startswith(first)
    assert (logs / "storage.log").read_text()


async def test_a_valkey_beside_a_cluster_is_restarted_when_it_is_killed(tmp_path: Path) -> None:
    """S6, S9: as a service is, at its port and with its data; the terminal says so."""
    async with UpProcess(tmp_path / "data", "--engine=redis", "--partitions=1") as up:
        await up.ready()
        async with tidemark.connect(up.address("broker")) as client:
            await client.create_topic("jobs")
            publisher = await client.publisher("jobs")
            await publisher.publish(b"before")

            os.kill(up.valkey(), signal.SIGKILL)

            assert "restarting it in 0.5 s" in await up.complaint_with(
                "valkey was killed by SIGKILL"
            )
            await up.complaint_with("valkey is serving again")
            await publisher.publish(b"after")
            async with client.subscribe(["jobs"]) as deliveries:
                taken = [(await anext(aiter(deliveries))).payload for _ in range(2)]
        assert taken == [b"before", b"after"]
        up.process.terminate()
        assert await up.exit_code() == 0


async def test_a_cluster_on_redis_has_a_valkey_beside_it_that_ends_with_it(
    tmp_path: Path, usual_hangups: None
) -> None:
    """S6, S9: for trying the engine. Its data stays, below that of the cluster, and is there when
    the cluster is started again; with another engine there would be none."""
    data, options = tmp_path / "data", ("--engine=redis", "--partitions=1")
    async with UpProcess(data, *options) as process:
        await process.ready()
        async with tidemark.connect(process.address("broker")) as client:
            await client.create_topic("jobs")
            publisher = await client.publisher("jobs")
            await publisher.publish(b"acked")
            await publisher.publish(b"kept")
            async with client.subscribe(["jobs"]) as deliveries:
                first = await anext(aiter(deliveries))
                assert first.payload == b"acked"
                await first.ack(wait=True)
        (valkey,) = [line for line in process.output if " redis://127.0.0.1:" in line]
        assert valkey.split()[0] == "valkey"

        process.process.terminate()
        assert await process.process.wait() == 0

    assert "bye bye" in (data / "logs" / "valkey.log").read_text()
    async with UpProcess(data) as other:
        assert await other.exit_code() == 2
        assert "has the data of --engine redis" in await other.complaint()
    async with UpProcess(data, *options) as again:
        await again.ready()
        async with (
            tidemark.connect(again.address("broker")) as client,
            client.subscribe(["jobs"]) as deliveries,
        ):
            assert (await anext(aiter(deliveries))).payload == b"kept"
