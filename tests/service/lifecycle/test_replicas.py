"""Several lifecycle replicas: which of them sweeps, and whose reports count (L11)."""

import asyncio
import socket
from contextlib import suppress

from tests.service.lifecycle.conftest import StartSwept
from tests.support.local_broker import TOPIC, reason_of, run_of, until
from tests.support.storage_client import NO_LIFECYCLE
from tests.support.swept_broker import Replica, SweptBroker
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING
from tidemark.api.lifecycle.v1.lifecycle_pb2 import AnnouncePartitionRequest
from tidemark.api.storage.v1.storage_pb2 import (
    DescribeStorageRequest,
    LeaseSweepRequest,
    ReportSweepRequest,
)


async def all_serve(swept: SweptBroker) -> bool:
    described = await swept.storage.DescribeStorage(DescribeStorageRequest())
    return all(each.state == PARTITION_STATE_SERVING for each in described.held)


async def leased(swept: SweptBroker, sweeper_id: str, lease_ms: int) -> bool:
    lease = LeaseSweepRequest(sweeper_id=sweeper_id, address="127.0.0.1:1", lease_ms=lease_ms)
    return (await swept.storage.LeaseSweep(lease)).granted


async def test_a_restarted_storage_serves_although_its_sweeper_got_no_announcement(
    start: StartSwept,
) -> None:
    """L4, L11: the announcement may reach a replica that stands by."""
    swept = await start(partitions=3, storage={"lifecycle_address": NO_LIFECYCLE})
    await swept.passing(lambda: all_serve(swept))

    await swept.stop_storage()
    await swept.start_storage()

    await swept.passing(lambda: all_serve(swept))


async def test_a_late_report_of_a_former_holder_of_the_lease_is_ignored(
    swept: SweptBroker,
) -> None:
    """L11: whether it reports a failure or a success."""
    await swept.lifecycle.stop()
    await leased(swept, "former", 1_000)
    await leased(swept, "former", 0)
    await leased(swept, "present", 60_000)

    late = ReportSweepRequest(sweeper_id="former", detail="a read that hung")
    ignored = await swept.storage.ReportSweep(late)
    (published,) = await swept.publish(run_of(TOPIC, b"x"))
    failed = await swept.storage.ReportSweep(ReportSweepRequest(sweeper_id="present"))
    late.succeeded = True
    ignored_again = await swept.storage.ReportSweep(late)

    assert (ignored.counted, len(ignored.health.faults)) == (False, 0)
    assert reason_of(published) == ""
    assert failed.counted
    assert [fault.reason for fault in ignored_again.health.faults] == ["SWEEP_FAILED"]


async def test_a_replica_becomes_ready_although_its_first_sweep_hung_at_another_address(
    start: StartSwept,
) -> None:
    """L11: storage moved in the meantime, and the sweep of its old address never ends."""
    swept = await start(partitions=2, storage={"lifecycle_address": NO_LIFECYCLE})
    await swept.stop_storage()
    replica = swept.replica()
    starting = asyncio.create_task(replica.start())
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        hung = f"127.0.0.1:{never_answers.getsockname()[1]}"
        await until(lambda: announced(replica, hung))
        await swept.start_storage()

        async def found_the_other() -> bool:
            return [each.partition for each in await replica.statuses()] == [0, 1]

        await swept.passing(found_the_other)
        assert await announced(replica, swept.storage_address)

        await swept.passing(lambda: is_done(starting))
    await starting
    await replica.stop()


async def announced(replica: Replica, storage_address: str) -> bool:
    """Announce partition 0; false while the replica does not listen yet."""
    announcement = AnnouncePartitionRequest(partition=0, storage_address=storage_address)
    with suppress(AttributeError):
        await replica.api.AnnouncePartition(announcement, wait_for_ready=True)
        return True
    return False


async def is_done(task: asyncio.Task[None]) -> bool:
    return task.done()
