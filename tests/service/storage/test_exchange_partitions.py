"""Several partitions on one exchange: what they share, and what stays with one of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    operation,
    outcome_of,
    reserve,
    reserved,
)
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors
from tidemark.api.storage.v1.exchange_pb2 import ExpireDue
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_EXPIRED_RESERVATIONS
from tidemark.limits import UNANSWERED_OPERATIONS_MAX

PARTITIONS = 8

pytestmark = pytest.mark.slow


@pytest.fixture
async def node(start_storage: StartStorage, faulty_disks: list[FaultyEngines]) -> RunningStorage:
    """A storage node with several partitions."""
    return await start_storage(partitions=PARTITIONS)


@asynccontextmanager
async def parts_of(node: RunningStorage) -> AsyncIterator[list[ExchangeClient]]:
    """All partitions, claimed and bound on one stream, with the topic `jobs`."""
    claims = [
        (partition, (await node.claim(partition)).broker_epoch) for partition in range(PARTITIONS)
    ]
    async with node.stream() as stream:
        parts = await stream.bind_all(*claims)
        for part in parts:
            await part.healths.get()
        topic = await node.create_topic("jobs")
        for part in parts[1:]:
            await apply_topic(part, topic)
        yield parts


async def test_the_binds_and_results_of_all_partitions_share_frames(node: RunningStorage) -> None:
    """Nothing is written, so that no disk decides when a partition answers."""
    async with parts_of(node) as parts:
        stream = parts[0].stream
        before = stream.frames

        expire = operation(expire_due=ExpireDue())
        answers = await stream.ask_all({part: [expire, expire] for part in parts})

        assert [len(each) for each in answers] == [2] * PARTITIONS
        assert stream.frames - before <= 2


async def test_a_partition_that_is_fenced_ends_its_part_alone(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """L1, S8: what other partitions have under way is answered as if nothing had happened."""
    (disk,) = faulty_disks
    async with parts_of(node) as parts:
        disk.only = 1
        disk.gate.clear()
        (under_way,) = await parts[1].send(append("jobs", b"x"))
        await disk.waiting.wait()

        await node.claim(0, broker_id="broker-b")
        reason = await parts[0].ended
        beside = await parts[2].ask(append("jobs", b"x"))
        disk.gate.set()

        assert isinstance(reason, errors.Fenced)
        assert outcome_of(await under_way).first_offset == 0
        assert beside.first_offset == 0
        assert not any(part.ended.done() for part in parts[1:])


async def test_a_partition_whose_commit_fails_spoils_no_other_of_its_frame(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """L1, S2."""
    (disk,) = faulty_disks
    async with parts_of(node) as parts:
        disk.only = 3
        disk.next_commit = Fault.BEFORE_WRITING

        answers = await parts[0].stream.ask_all({part: [append("jobs", b"x")] for part in parts})
        failed = answers.pop(3)[0]

        assert isinstance(failed, errors.CommitOutcomeUnknown)
        assert [answer.first_offset for (answer,) in answers] == [0] * (PARTITIONS - 1)
        while (await parts[3].healths.get()).openings < 2:
            pass  # the fault, before the partition has been reopened
        assert all(part.healths.empty() for part in parts if part is not parts[3])


async def test_a_partition_with_all_that_a_broker_may_leave_unanswered_delays_no_other(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """L1, and every operation gets exactly one answer."""
    (disk,) = faulty_disks
    per_frame = 500
    async with parts_of(node) as parts:
        slow, other = parts[0], parts[1]
        disk.only = 0
        disk.gate.clear()
        expire = operation(expire_due=ExpireDue())
        waiting = [*await slow.send(append("jobs", b"x"))]
        await disk.waiting.wait()
        while len(waiting) < UNANSWERED_OPERATIONS_MAX:
            count = min(per_frame, UNANSWERED_OPERATIONS_MAX - len(waiting))
            waiting += await slow.send(*[expire] * count)

        beside = [await other.ask(append("jobs", b"x")) for _ in range(20)]
        answered_early = sum(each.done() for each in waiting)
        disk.gate.set()
        answers = await asyncio.gather(*waiting)

        assert [each.first_offset for each in beside] == list(range(20))
        assert answered_early == 0
        assert len({each.request_id for each in answers}) == UNANSWERED_OPERATIONS_MAX


async def test_results_that_fill_several_frames_arrive_beside_those_of_another_partition(
    node: RunningStorage,
) -> None:
    """S3."""
    async with parts_of(node) as parts:
        large, small = parts[0], parts[1]
        for number in range(6):
            await large.ask(append(f"jobs/{number}", bytes(1_000_000), bytes(1_000_000)))
            await large.ask(append(f"jobs/{number}", bytes(1_000_000)))

        asked = {
            large: [reserve(f"jobs/{number}") for number in range(6)],
            small: [append("jobs", b"x")],
        }
        answers, (beside,) = await large.stream.ask_all(asked)

        assert beside.first_offset == 0
        assert sum(each.count for answer in answers for each in answer.slices) == 18


async def test_a_partition_is_bound_again_on_the_same_stream(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """S2: results of the earlier bind do not come under the later one."""
    (disk,) = faulty_disks
    async with parts_of(node) as parts:
        disk.only = 0
        disk.gate.clear()
        (lost,) = await parts[0].send(append("jobs", b"1"))
        await disk.waiting.wait()
        claiming = asyncio.create_task(node.claim(0))
        disk.gate.set()
        epoch = (await claiming).broker_epoch

        again = await parts[0].stream.bind(0, epoch)

        assert (await again.ask(append("jobs", b"2"))).first_offset == 1
        assert isinstance(await parts[0].ended, errors.Fenced) or lost.done()
        assert (await parts[1].ask(append("jobs", b"x"))).first_offset == 0


async def test_a_partition_that_is_unbound_has_no_connected_broker(node: RunningStorage) -> None:
    """V1: from then on sweeps expire what is due; the other partitions stay connected."""
    async with parts_of(node) as parts:
        await parts[0].ask(append("jobs", b"x"))
        await reserved(parts[0], "jobs")

        await parts[0].unbind()
        await parts[1].ask(append("jobs", b"x"))  # answered after the unbind was taken

        unbound, bound = [
            (await node.scan(SCAN_KIND_EXPIRED_RESERVATIONS, partition)).broker_address
            for partition in (0, 1)
        ]
        assert (unbound, bound) == ("", "127.0.0.1:1")
