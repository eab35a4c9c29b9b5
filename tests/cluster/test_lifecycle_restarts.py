"""Services that go away, for a while or for good, and what sweeps make of it (L2, L4, L7)."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.conftest import StartCluster
from tests.support.lifecycle_client import (
    PARTITIONS,
    WITHIN_MS,
    Client,
    another_replica,
    client_of,
    payloads,
    sweepers_at,
    until,
)
from tests.support.local_broker import run_of
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING, PARTITION_STATE_STARTING
from tidemark.api.lifecycle.v1.lifecycle_pb2 import SWEEPER_STATE_STANDING_BY
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_DELAYS_OVER, LeaseSweepRequest
from tidemark.clock import SystemClock
from tidemark.errors import LifecycleUnavailable
from tidemark.local.cluster import SERVICES, LocalCluster, ServiceName
from tidemark.local.service_process import ServiceProcess
from tidemark.names import partition_of

LEASE_MS = 2_000
SHORT_LEASE = {"TIDEMARK_SWEEP_LEASE_MS": str(LEASE_MS)}
SCHEDULED = 25
"""Messages in a queue."""

BUSY_MS = 30_000
"""What a busy machine may add to anything."""

UNTIL_DUE_MS = 5_000
"""Time to look at what is not due yet, also on a machine that stands still for a while."""

LONG_LEASE_MS = 90_000
LONG_LEASE = {"TIDEMARK_SWEEP_LEASE_MS": str(LONG_LEASE_MS)}


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> LocalCluster:
    """A cluster with a short lease: a lifecycle that was killed sweeps again soon."""
    started: LocalCluster = await start_cluster(environment={"lifecycle": SHORT_LEASE})
    return started


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with client_of(cluster) as client:
        yield client


async def states(client: Client) -> list[int]:
    return [(await client.storage.info(partition)).state for partition in range(PARTITIONS)]


# --- the broker never comes back -----------------------------------------------------------------


async def test_storage_expires_reservations_whose_broker_never_comes_back(
    cluster: LocalCluster, client: Client
) -> None:
    """V1, L2, L5: and what has no attempts left goes on to the dead-letter topic."""
    await client.create_topic("dead")
    await client.create_topic("jobs", visibility_timeout_ms=1_000)
    await client.create_topic(
        "once", max_attempts=1, dead_letter_topic="dead", visibility_timeout_ms=1_000
    )
    for lmq_name in ("jobs/ada", "once/ada"):
        await client.publish(lmq_name, lmq_name.encode())
        await client.take(lmq_name)

    await cluster.kill("broker")
    (dead,) = await client.until_stored("dead", 1)

    async def is_free() -> bool:
        return (await client.queue("jobs/ada")).inflight == 0

    await until(is_free)
    assert dead.payload == b"once/ada"
    assert dead.headers["tidemark-dead-reason"] == "attempts_exhausted"
    await cluster.restart("broker")
    again = await client.take("jobs/ada")
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_storage_ends_nack_delays_when_the_broker_never_comes_back(
    cluster: LocalCluster, client: Client
) -> None:
    """L5, V8."""
    await client.create_topic("jobs")
    await client.publish("jobs/ada", b"again")
    await client.nack(await client.take("jobs/ada"), delay_ms=UNTIL_DUE_MS)
    partition = partition_of("jobs/ada", PARTITIONS)
    assert (await client.storage.scan(SCAN_KIND_DELAYS_OVER, partition)).HasField("next_due_in_ms")

    await cluster.kill("broker")

    async def is_over() -> bool:
        delays = await client.storage.scan(SCAN_KIND_DELAYS_OVER, partition)
        return not delays.facts and not delays.HasField("next_due_in_ms")

    await until(is_over)
    await cluster.restart("broker")
    assert (await client.take("jobs/ada")).attempt_count == 1


async def test_scheduled_messages_and_times_to_live_need_no_broker(
    cluster: LocalCluster, client: Client
) -> None:
    """L5: both are due while there is none."""
    await client.create_topic("dead")
    await client.create_topic("jobs", dead_letter_topic="dead")
    await client.publish("jobs/ada", b"due", delay_ms=UNTIL_DUE_MS)
    await client.publish("jobs/bob", b"dead", ttl_ms=UNTIL_DUE_MS)
    assert (await client.queue("jobs/ada")).next_offset == 0

    await cluster.kill("broker")
    dead = await client.until_stored("dead", 1)
    due = await client.until_stored("jobs/ada", 1)

    assert (payloads(dead), payloads(due)) == ([b"dead"], [b"due"])


# --- lifecycle is away ---------------------------------------------------------------------------


async def test_without_lifecycle_a_cluster_that_starts_takes_no_publishes_until_it_comes(
    cluster: LocalCluster, client: Client
) -> None:
    """L4: refused with LIFECYCLE_UNAVAILABLE and a time after which to try again."""
    await client.create_topic("jobs")
    await client.publish("jobs/ada", b"before")
    for name in SERVICES:
        await cluster.kill(name)

    await cluster.restart("storage")
    await cluster.restart("broker")

    assert await states(client) == [PARTITION_STATE_STARTING] * PARTITIONS
    for number in range(8):  # whatever the partition
        with pytest.raises(LifecycleUnavailable) as refused:
            await client.publish(f"jobs/{number}", b"refused")
        assert refused.value.retry_after_ms
    stored = await client.take("jobs/ada")
    assert payloads(stored.batch.messages) == [b"before"], "what is stored is delivered"
    assert await client.ack(stored) == 1
    await cluster.restart("lifecycle")

    async def serving() -> bool:  # it is healthy once it has tried every partition
        return await states(client) == [PARTITION_STATE_SERVING] * PARTITIONS

    await until(serving)
    for number in range(8):
        await client.publish(f"jobs/{number}", b"taken")


async def test_lifecycle_that_was_killed_finds_what_became_due_without_it(
    cluster: LocalCluster, client: Client
) -> None:
    """L7: nothing is kept in its memory that cannot be read again."""
    await client.create_topic("dead")
    await client.create_topic("jobs", max_attempts=1, dead_letter_topic="dead")
    await client.publish("jobs/before", b"scheduled before", delay_ms=500)

    await cluster.kill("lifecycle")
    await client.publish("jobs/while", b"scheduled meanwhile", delay_ms=500)
    await client.publish("jobs/after", b"due after", delay_ms=60_000)
    await client.publish("jobs/dead", b"exhausted")
    await client.nack(await client.take("jobs/dead"))
    waits = await client.pull("jobs/while", wait_ms=1_500)
    assert waits == [], "no service makes it ready"
    await cluster.restart("lifecycle")

    before, meanwhile = await client.take("jobs/before"), await client.take("jobs/while")
    assert payloads(before.batch.messages) == [b"scheduled before"]
    assert payloads(meanwhile.batch.messages) == [b"scheduled meanwhile"]
    assert payloads(await client.until_stored("dead", 1)) == [b"exhausted"]
    assert await client.pull("jobs/after", wait_ms=0) == []


@pytest.mark.parametrize("name", SERVICES)
async def test_scheduled_messages_survive_a_crash_of_any_service(
    name: ServiceName, cluster: LocalCluster, client: Client
) -> None:
    """L5, L7: each arrives once, none early, whichever service is killed before it is due."""
    await client.create_topic("jobs")
    clock = SystemClock()
    due_ms: dict[str, dict[bytes, int]] = {}
    for lmq_name in (f"jobs/{number}" for number in range(2 * PARTITIONS)):
        delays_ms = {b"%d" % number: 2_000 + 100 * number for number in range(SCHEDULED)}
        begin_ms = clock.monotonic_ms()
        await client.publish_each(
            *(run_of(lmq_name, payload, delay_ms=each) for payload, each in delays_ms.items())
        )
        due_ms[lmq_name] = {payload: begin_ms + each for payload, each in delays_ms.items()}

    await cluster.kill(name)
    await cluster.restart(name)

    async def arrive(lmq_name: str) -> None:
        arrived: list[bytes] = []
        while len(arrived) < SCHEDULED:
            for delivery in await until(lambda: client.pull(lmq_name)):
                taken = payloads(delivery.batch.messages)
                assert all(clock.monotonic_ms() >= due_ms[lmq_name][each] for each in taken)
                arrived += taken
        assert sorted(arrived) == sorted(due_ms[lmq_name])

    await asyncio.gather(*map(arrive, due_ms))
    for lmq_name in due_ms:
        assert (await client.queue(lmq_name)).next_offset == SCHEDULED, "each was stored once"


# --- several replicas ----------------------------------------------------------------------------


@pytest.fixture
async def replica(cluster: LocalCluster, tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """The second replica, which runs and has tried every partition; the cluster's own sweeps."""
    process = another_replica(cluster, tmp_path / "replica.log", **SHORT_LEASE)
    try:
        await process.start()
        await process.wait_healthy()
        yield process
    finally:
        if process.running:
            await process.kill()


async def swept_by(address: str) -> set[int]:
    return {
        each.partition
        for each in await sweepers_at(address)
        if each.state != SWEEPER_STATE_STANDING_BY
    }


async def until_it_sweeps(address: str) -> None:
    async def sweeps_all() -> bool:
        return await swept_by(address) == set(range(PARTITIONS))

    await until(sweeps_all)


async def test_of_two_replicas_one_sweeps_and_the_other_stands_by(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """L2: also while there is work. The lease is one that no pause of the machine outlasts."""
    cluster = await start_cluster(environment={"lifecycle": LONG_LEASE})
    replica = another_replica(cluster, tmp_path / "replica.log", **LONG_LEASE)
    try:
        await replica.start()
        await replica.wait_healthy()
        async with client_of(cluster) as client:
            await client.create_topic("jobs")
            for number in range(20):
                await client.publish(f"jobs/{number}", b"due", delay_ms=50)
                await client.take(f"jobs/{number}")
        sweeping = await swept_by(cluster.address("lifecycle"))
        standing_by = await sweepers_at(replica.address)
    finally:
        await replica.kill()

    assert sweeping == set(range(PARTITIONS))
    assert [each.partition for each in standing_by] == list(range(PARTITIONS))
    assert {each.state for each in standing_by} == {SWEEPER_STATE_STANDING_BY}
    assert not any(each.HasField("last_sweep_time") for each in standing_by)


async def test_the_other_replica_takes_over_within_the_lease(
    cluster: LocalCluster, client: Client, replica: ServiceProcess
) -> None:
    """L2, L7: after `kill -9`; what was told to the dead one is found by the other."""
    clock = SystemClock()
    await client.create_topic("jobs")
    await client.publish("jobs/ada", b"due", delay_ms=LEASE_MS // 2)

    await cluster.kill("lifecycle")
    begin_ms = clock.monotonic_ms()
    delivery = await client.take("jobs/ada")
    took_ms = clock.monotonic_ms() - begin_ms

    assert payloads(delivery.batch.messages) == [b"due"]
    # Its last renewal, a turn of the one that stands by, and a busy machine.
    assert took_ms <= LEASE_MS + LEASE_MS // 3 + BUSY_MS
    await until_it_sweeps(replica.address)


async def test_a_replica_that_gets_a_partition_back_looks_at_what_it_missed(
    cluster: LocalCluster, client: Client, replica: ServiceProcess
) -> None:
    """L7: work that was added while the other replica swept was announced to that one only."""
    first = cluster.pid("lifecycle")
    await client.create_topic("jobs")
    os.kill(first, signal.SIGSTOP)
    try:
        await until_it_sweeps(replica.address)
    finally:
        os.kill(first, signal.SIGCONT)

    async def stands_by() -> bool:
        return not await swept_by(cluster.address("lifecycle"))

    await until(stands_by)
    for number in range(2 * PARTITIONS):
        await client.publish(f"jobs/{number}", b"due", delay_ms=1_000)
    await replica.kill()

    for number in range(2 * PARTITIONS):
        assert len(await client.pull(f"jobs/{number}", wait_ms=WITHIN_MS)) == 1, number


async def test_a_replica_that_stops_gives_its_partitions_up_at_once(
    start_cluster: StartCluster,
) -> None:
    """L2: another may have them before the lease ends, which no pause of the machine outlasts."""
    cluster = await start_cluster(environment={"lifecycle": LONG_LEASE})
    leases = [
        LeaseSweepRequest(partition=each, sweeper_id="other", address="other:1", lease_ms=LEASE_MS)
        for each in range(PARTITIONS)
    ]
    await until_it_sweeps(cluster.address("lifecycle"))
    async with client_of(cluster) as client:
        held = [await client.storage.storage.LeaseSweep(each) for each in leases]

        assert await cluster.terminate("lifecycle") == 0

        given_up = [await client.storage.storage.LeaseSweep(each) for each in leases]
    assert not any(each.granted for each in held)
    assert all(each.granted for each in given_up)
