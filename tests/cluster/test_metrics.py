"""Metrics of real processes, scraped as Prometheus does, and the dashboard that shows them."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

import tidemark
from tests.cluster.conftest import StartCluster
from tests.rpc.broker.local_broker import in_time
from tests.unit.test_metrics import names_in_the_docs
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.local.ports import free_ports

DASHBOARD = Path(__file__).parents[2] / "helm" / "tidemark" / "dashboards" / "tidemark.json"
SCRAPED: tuple[ServiceName, ...] = ("storage", "broker", "lifecycle", "retention")
SUFFIXES = ("", "_total", "_seconds", "_bytes")

NOT_YET = {
    # What has attributes that are not known before it happens.
    "tidemark.storage.corrupt_records",
    "tidemark.lifecycle.outbox_refused",
    # What only a pass of Spark brings.
    "tidemark.retention.pass.duration",
}


class Metrics:
    """The Prometheus endpoints of a cluster."""

    def __init__(self, cluster: LocalCluster, ports: Mapping[ServiceName, int]) -> None:
        self.cluster = cluster
        self._ports = ports

    async def lines(self, *services: ServiceName) -> list[str]:
        """Lines about metrics of ours, comments included."""
        texts = [await asyncio.to_thread(_get, self._ports[name]) for name in services or SCRAPED]
        return [line for text in texts for line in text.splitlines() if "tidemark_" in line]

    async def families(self) -> dict[str, str]:
        """The type of each."""
        found = [line.split() for line in await self.lines() if line.startswith("# TYPE ")]
        return {name: kind for _, _, name, kind in found}

    async def samples(self, *services: ServiceName) -> list[str]:
        """Series without their values."""
        lines = await self.lines(*services)
        return [line.rpartition(" ")[0] for line in lines if line.startswith("tidemark_")]


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


@pytest.fixture
async def metrics(start_cluster: StartCluster) -> Metrics:
    ports = dict(zip(SCRAPED, free_ports("127.0.0.1", len(SCRAPED)), strict=True))
    environment = {
        name: {"TIDEMARK_METRICS_LISTEN": f"127.0.0.1:{port}"} for name, port in ports.items()
    }
    cluster = await start_cluster(environment=environment, partitions=2, retention=True)
    return Metrics(cluster, ports)


@pytest.fixture
async def client(metrics: Metrics) -> AsyncIterator[tidemark.Client]:
    address = metrics.cluster.address("broker")
    async with tidemark.connect(address, client_id="counted") as client:
        await client.create_topic("graveyard")
        await client.create_topic("orders", max_attempts=1, dead_letter_topic="graveyard")
        yield client


async def use(client: tidemark.Client, queues: list[str]) -> None:
    """A message to each queue, of which one is dead-lettered and all others are acknowledged."""
    publishers = [await client.publisher(queue) for queue in queues]
    await asyncio.gather(*(publisher.publish(b"x") for publisher in publishers))
    async with client.subscribe(queues) as deliveries:
        await (await in_time(anext(deliveries))).nack()
        for _ in queues[1:]:
            await (await in_time(anext(deliveries))).ack()
        await deliveries.flush()
    async with client.subscribe(["graveyard"]) as dead_letters:
        await (await in_time(anext(dead_letters))).ack()
        await dead_letters.flush()


async def test_services_export_what_is_documented_and_the_dashboard_asks_for_nothing_else(
    client: tidemark.Client, metrics: Metrics
) -> None:
    """S4."""
    await use(client, ["orders/a", "orders/b"])

    families = await metrics.families()

    exported = set(families)
    of_documented = {
        name: {name.replace(".", "_") + suffix for suffix in SUFFIXES} & exported
        for name in names_in_the_docs()
    }
    assert {name for name, found in of_documented.items() if not found} <= NOT_YET
    assert exported == set().union(*of_documented.values()), "some are not documented"
    for name, kind in families.items():
        assert name.endswith("_total") == (kind == "counter"), name
    samples = {re.split(r"[{ ]", line)[0] for line in await metrics.samples()}
    for title, query in queries():
        asked = set(re.findall(r"tidemark_\w+", query))
        assert asked, title
        assert asked <= samples, f"{title} asks for what nobody exports"


def queries() -> list[tuple[str, str]]:
    """The title and the query of every panel."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


async def test_the_labels_that_the_dashboard_groups_by_are_there(
    client: tidemark.Client, metrics: Metrics
) -> None:
    await use(client, ["orders/a", "orders/b"])

    samples = await metrics.samples()

    for title, query in queries():
        for labels, name in re.findall(r"by \(([^)]+)\) \((?:\w+\()?(tidemark_\w+)", query):
            of_metric = [sample for sample in samples if sample.startswith(name + "{")]
            for label in labels.split(", "):
                assert any(f'{label}="' in sample for sample in of_metric), (title, name, label)


async def test_the_number_of_series_does_not_grow_with_the_number_of_queues(
    client: tidemark.Client, metrics: Metrics
) -> None:
    """S4: per topic, never per lite queue."""
    await use(client, [f"orders/{number}" for number in range(5)])
    before = await metrics.samples("storage", "broker", "lifecycle")

    await use(client, [f"orders/more-{number}" for number in range(300)])

    after = await metrics.samples("storage", "broker", "lifecycle")
    assert sorted(set(after) - set(before)) == []
    assert not [sample for sample in after if "orders/" in sample or "more-" in sample]
