"""Commits of the partitions of one node: what they share, and what each of them costs (C7)."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from storage_svc.engines.engine import Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.operations.claim import ClaimPartition
from storage_svc.operations.publish import Append, Appended
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.counters import Claim
from storage_svc.partition.frames import Frame
from storage_svc.partition.partition import Partition
from storage_svc.turns import CommonTurns
from tests.support.exchange_client import body
from tests.support.faulty_engine import Fault, FaultyEngines
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import CommitOutcomeUnknown, PartitionFaulty, TidemarkError
from tidemark.topics import Topic, TopicSettings

PARTITIONS = 8
CLAIM = ClaimPartition(Claim("broker", "broker:1", 1, 0))

CALLS_OF_A_COMMIT_MAX = 80
"""Calls of functions of storage, those of the append included."""


class Requests:
    """Gets the results of several partitions."""

    def __init__(self, expected: int) -> None:
        self.results: list[Appended | TidemarkError] = []
        self.all_answered = asyncio.Event()
        self._expected = expected

    def submit(self, partition: Partition, appends: Sequence[Append], epoch: int | None) -> None:
        partition.submit_frame(Request(self, appends, epoch))

    def take(self, results: Sequence[Appended | TidemarkError]) -> None:
        self.results += results
        if len(self.results) == self._expected:
            self.all_answered.set()


class Request(Frame):
    """A frame for one of them."""

    def __init__(self, requests: Requests, appends: Sequence[Append], epoch: int | None) -> None:
        super().__init__(appends, (), epoch)
        self._requests = requests

    def answer(self, results: Sequence[Appended | TidemarkError]) -> None:
        self._requests.take(results)

    def fail(self, error: TidemarkError) -> None:
        self._requests.take([error])


@pytest.fixture
def disk(tmp_path: Path) -> FaultyEngines:
    return FaultyEngines(RocksEngines(tmp_path))


@pytest.fixture
async def node(disk: FaultyEngines) -> AsyncIterator[list[Partition]]:
    """The partitions of one node, which all know the topic `t`."""
    engines, clock = disk, ManualClock()
    shared: dict[str, Any] = {"turns": CommonTurns(), "figures": CommitFigures(clock)}
    identities = [Identity("turns", number, PARTITIONS) for number in range(PARTITIONS)]
    partitions = [Partition(engines, each, clock, **shared) for each in identities]
    for partition in partitions:
        await partition.open()
        await partition.call(PutTopic(Topic("t", TopicSettings()), create=True))
    yield partitions
    for partition in partitions:
        await partition.close()


async def test_a_commit_of_more_partitions_takes_no_more_calls_of_the_event_loop(
    node: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: they are applied in one turn and end in one, without tasks and futures of their own."""
    loop = asyncio.get_running_loop()
    call_soon, calls = loop.call_soon, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return call_soon(*args, **options)

    async def publish_to(partitions: Sequence[Partition]) -> int:
        nonlocal calls
        calls, requests = 0, Requests(len(partitions))
        for each in partitions:
            requests.submit(each, [Append("t", 1, body(b"x"))], None)
        await asyncio.wait_for(requests.all_answered.wait(), 60)
        assert all(isinstance(each, Appended) for each in requests.results)
        return calls

    monkeypatch.setattr(loop, "call_soon", counted)
    of_one = await publish_to(node[:1])
    of_all = await publish_to(node)

    assert of_all == of_one


async def test_a_commit_that_waits_for_others_is_answered_after_it_continues(
    node: list[Partition],
) -> None:
    """L1: more operations than one turn applies give way, and the commit ends in its own time."""
    many, one = Requests(200), Requests(1)

    many.submit(node[0], [Append("t", 1, body(b"x"))] * 200, None)
    one.submit(node[1], [Append("t", 1, body(b"x"))], None)
    await asyncio.wait_for(one.all_answered.wait(), 60)
    await asyncio.wait_for(many.all_answered.wait(), 60)

    offsets = [each.first_offset for each in many.results if isinstance(each, Appended)]
    assert offsets == list(range(200))


async def until_taken(disk: FaultyEngines) -> None:
    """Return once a commit has got the fault."""
    while disk.next_commit is not None:
        await SystemClock().sleep_ms(0)


@pytest.mark.parametrize("fault", Fault)
async def test_a_commit_of_a_turn_that_fails_is_answered_alone_and_reloaded(
    node: list[Partition], disk: FaultyEngines, fault: Fault
) -> None:
    """S2: its outcome is unknown, frames behind it are not applied, and the others of the turn are
    on disk."""
    disk.only, disk.next_commit = 0, fault
    failed, behind, others = Requests(1), Requests(1), Requests(PARTITIONS - 1)

    failed.submit(node[0], [Append("t", 1, body(b"x"))], None)
    for each in node[1:]:
        others.submit(each, [Append("t", 1, body(b"x"))], None)
    await until_taken(disk)  # the turn is applied, and its sync under way
    behind.submit(node[0], [Append("t", 1, body(b"y"))], None)
    for requests in (failed, behind, others):
        await asyncio.wait_for(requests.all_answered.wait(), 60)

    assert [type(each) for each in failed.results] == [CommitOutcomeUnknown]
    assert [type(each) for each in behind.results] == [PartitionFaulty]
    assert all(isinstance(each, Appended) for each in others.results)
    while not node[0].is_open:
        await SystemClock().sleep_ms(0)
    again = await node[0].call(Append("t", 1, body(b"z")))
    assert again.first_offset == (fault is Fault.AFTER_WRITING)
    assert [each.health.openings for each in node] == [2] + [1] * (PARTITIONS - 1)


async def test_a_commit_of_a_further_partition_makes_few_calls(node: list[Partition]) -> None:
    """C7: what a commit costs beside its operations is mostly the calls of its steps."""
    epochs = [await partition.call(CLAIM) for partition in node]
    made = Counter[str]()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            made[frame.f_code.co_filename.partition("storage_svc")[1]] += 1

    async def calls_of(partitions: int) -> int:
        made.clear()
        requests = Requests(partitions)
        sys.setprofile(count)
        try:
            for partition, claimed in zip(node[:partitions], epochs, strict=False):
                requests.submit(partition, [Append("t", 1, body(b"x"))], claimed.broker_epoch)
            await asyncio.wait_for(requests.all_answered.wait(), 60)
        finally:
            sys.setprofile(None)
        assert all(isinstance(each, Appended) for each in requests.results)
        return made["storage_svc"]

    await calls_of(PARTITIONS)  # queues are created
    further = await calls_of(PARTITIONS) - await calls_of(1)

    assert further / (PARTITIONS - 1) < CALLS_OF_A_COMMIT_MAX
