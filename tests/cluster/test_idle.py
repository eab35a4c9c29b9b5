"""An unused cluster, as a collector sees it."""

import pytest

import tidemark
from tests.cluster.conftest import StartCluster
from tests.support.otlp_receiver import OtlpReceiver, ReceivedPoint
from tidemark.clock import SystemClock
from tidemark.local.cluster import SERVICES, LocalCluster

OFTEN = {"TIDEMARK_SWEEP_LEASE_MS": "1000", "TIDEMARK_SWEEP_INTERVAL_MS_MAX": "1000"}
"""Lifecycle renews its leases and looks for work several times in the time of this test."""

EXPORTS = 25
"""Of a fifth of a second each: longer than any round that the services make by themselves."""

COMMITS = "tidemark.storage.commits"
DURATIONS = "tidemark.storage.commit.duration"


@pytest.fixture
async def cluster(receiver: OtlpReceiver, start_cluster: StartCluster) -> LocalCluster:
    """Traces everything that begins a trace, and sends it with all metrics to the receiver."""
    environment = {**receiver.environment, "OTEL_METRICS_EXPORTER": "otlp", **OFTEN}
    environment |= receiver.metrics_environment
    cluster: LocalCluster = await start_cluster(environment=dict.fromkeys(SERVICES, environment))
    return cluster


def exports_of(points: list[ReceivedPoint], name: str) -> list[float]:
    """What a metric of partition 0, or of the process, was at each export."""
    return [
        point.value
        for point in points
        if point.name == name and point.attributes.get("partition", 0) == 0
    ]


async def test_a_cluster_that_is_not_used_traces_and_commits_nothing(
    cluster: LocalCluster, receiver: OtlpReceiver
) -> None:
    """O3: not its heartbeats, leases, sweeps that find nothing, nor consumers that wait."""
    async with tidemark.connect(cluster.address("broker"), client_id="waits") as client:
        await client.create_topic("orders")
        async with client.subscribe(["orders/ada"]):
            await client.pull("orders/bea", wait_ms=1)
            before = len(exports_of(receiver.points, COMMITS))
            idle_since_ns = SystemClock().wall_ms() * 1_000_000

            def enough() -> bool | None:
                return len(exports_of(receiver.points, COMMITS)) > before + EXPORTS or None

            await receiver.until(enough, lambda: "storage has stopped exporting")

    assert [span for span in receiver.spans if span.begin_ns > idle_since_ns] == []
    last = {
        point.attributes["partition"]: point.value
        for point in receiver.points
        if point.name == COMMITS
    }
    durations = exports_of(receiver.points, DURATIONS)
    assert durations[-1] == durations[-EXPORTS]
    # Commits of several partitions that became durable together are one measurement.
    assert 0 < durations[-1] <= sum(last.values()), "all are real commits"
