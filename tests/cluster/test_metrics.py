"""Metrics of real processes, pushed over OTLP and scraped by Prometheus, and their dashboard.

One cluster serves all tests: its retention starts Spark.
"""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

import tidemark
from tests.cluster.conftest import shared
from tests.support.local_broker import in_time
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.repository import ROOT, documented_metrics
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.local.ports import free_ports

pytestmark = pytest.mark.asyncio(loop_scope="module")

DASHBOARD = ROOT / "helm" / "tidemark" / "dashboards" / "tidemark.json"
SCRAPED: tuple[ServiceName, ...] = ("storage", "broker", "lifecycle", "retention")
SUFFIXES = ("", "_total", "_seconds", "_bytes")

PROMETHEUS_LABELS = {"job", "instance"}
"""Prometheus adds them itself, by what it scrapes."""

FIRST_PASS_MS = 500_000
"""Ends a hang: the first pass waits for Spark, which a busy machine starts slowly."""


class Metrics:
    """The Prometheus endpoints of a cluster, and the receiver that it pushes to."""

    def __init__(
        self, cluster: LocalCluster, ports: Mapping[ServiceName, int], pushed: OtlpReceiver
    ) -> None:
        self.cluster = cluster
        self.pushed = pushed
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metrics(request: pytest.FixtureRequest) -> AsyncIterator[Metrics]:
    ports = dict(zip(SCRAPED, free_ports("127.0.0.1", len(SCRAPED)), strict=True))
    async with otlp_receiver() as receiver:
        environment = {
            name: {"TIDEMARK_METRICS_LISTEN": f"127.0.0.1:{port}", **receiver.metrics_environment}
            for name, port in ports.items()
        }
        options = {"environment": environment, "partitions": 2, "retention": True}
        async with shared(request, **options) as cluster:
            yield Metrics(cluster, ports, receiver)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(metrics: Metrics) -> AsyncIterator[tidemark.Client]:
    address = metrics.cluster.address("broker")
    async with tidemark.connect(address, client_id="counted") as client:
        await client.create_topic("graveyard")
        await client.create_topic("orders", max_attempts=1, dead_letter_topic="graveyard")
        await client.create_topic("lost", max_attempts=1, dead_letter_topic="nowhere")
        await client.admin.delete_topic("nowhere")  # so that its dead letters are refused
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


async def lose(client: tidemark.Client, queue: str) -> None:
    """A message whose dead-letter topic does not exist."""
    await (await client.publisher(queue)).publish(b"x")
    async with client.subscribe([queue]) as deliveries:
        await (await in_time(anext(deliveries))).nack()


@pytest.mark.timeout(600)  # the first pass of retention waits for Spark
async def test_every_documented_metric_arrives_over_otlp_and_over_prometheus(
    client: tidemark.Client, metrics: Metrics
) -> None:
    """O1, S4: and nothing else does; the dashboard asks for nothing else."""
    await use(client, ["orders/a", "orders/b"])
    await lose(client, "lost/a")

    documented = set(documented_metrics())
    await metrics.pushed.metrics(*documented, within_ms=FIRST_PASS_MS)
    families = await metrics.families()

    assert {point.name for point in metrics.pushed.points} == documented
    attributes = {key for point in metrics.pushed.points for key in point.attributes}
    assert not attributes & PROMETHEUS_LABELS
    exported = set(families)
    scraped = {
        name: {name.replace(".", "_") + suffix for suffix in SUFFIXES} & exported
        for name in documented
    }
    assert [name for name, found in scraped.items() if not found] == []
    assert exported == set().union(*scraped.values()), "some are not documented"
    for name, kind in families.items():
        assert name.endswith("_total") == (kind == "counter"), name
    samples = {re.split(r"[{ ]", line)[0] for line in await metrics.samples()}
    for title, query in queries():
        asked = set(re.findall(r"tidemark_\w+", query))
        assert asked, title
        assert asked <= samples, f"{title} asks for what no service exports"
    for log in metrics.cluster.log_dir.glob("*.log"):  # type: ignore[union-attr]
        assert "Traceback" not in log.read_text(), log.name


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
            for label in set(labels.split(", ")) - PROMETHEUS_LABELS:
                assert any(f'{label}="' in sample for sample in of_metric), (title, name, label)


async def test_the_number_of_series_does_not_grow_with_the_number_of_queues(
    client: tidemark.Client, metrics: Metrics
) -> None:
    """S4: per topic, never per lite queue."""
    await use(client, [f"orders/{number}" for number in range(5)])
    before = await metrics.samples("storage", "broker", "lifecycle")

    await use(client, [f"orders/more-{number}" for number in range(300)])

    after = await metrics.samples("storage", "broker", "lifecycle")
    # A busy machine adds one or the other, such as a release; 300 queues must not.
    assert len(set(after) - set(before)) < 30
    assert not [sample for sample in after if "orders/" in sample or "more-" in sample]
