"""The link to a storage node: what the partitions share in its frames, and what they do not."""

from collections.abc import AsyncIterator

import pytest

from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from broker_svc.links.unanswered_operations import FRAMES_IN_FLIGHT_MAX
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    Append,
    ExchangeRequest,
    ExchangeResponse,
    Operation,
    OperationResult,
    PartitionResponse,
    Purge,
    RemovedResult,
)
from tidemark.api.storage.v1.partition_pb2 import PartitionHealth
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import ManualClock
from tidemark.errors import Fenced, Unavailable
from tidemark.limits import FRAME_BYTES_MAX, UNANSWERED_OPERATIONS_MAX
from tidemark.rpc import open_channel
from tidemark.rpc.statuses import to_status
from tidemark.settings import BrokerSettings

PARTITIONS = 64
EPOCH = 7


class Node:
    """A node whose frames a test takes and answers."""

    def __init__(self, storage: StorageServiceStub) -> None:
        self.node = StorageNode("storage", storage)
        self.link = self.node.link
        self.ended: dict[int, str] = {}
        """Why the parts of partitions ended."""
        self.links = [self._bound(number) for number in range(PARTITIONS)]

    def _bound(self, number: int) -> PartitionLink:
        settings, clock = BrokerSettings(partitions=4), ManualClock()
        nodes = StorageNodes([self.node], settings, clock)
        link = PartitionLink(number, settings, 1, nodes, clock, lambda: None)
        link.part_ended = lambda reason: self.ended.update({number: reason.reason})  # type: ignore[method-assign]
        self.link.bind(link, EPOCH)
        return link

    def connect(self) -> list[int]:
        """Storage answers the binds; gives the partitions of the frame that carried them."""
        frame = self.frame()
        health = PartitionHealth(state=topic_pb2.PARTITION_STATE_SERVING, openings=1)
        for bind in frame.binds:
            self.answer(bind.partition, health=health)
        return [bind.partition for bind in frame.binds]

    def send(self, partition: int, *operations: Operation) -> None:
        for each in operations or (small(),):
            self.links[partition].send(each).add_done_callback(lambda answer: answer.exception())

    def frame(self) -> ExchangeRequest:
        frame = self.link._next_frame()
        assert frame is not None, "there is something to send"
        return frame

    def answer(self, partition: int, epoch: int = EPOCH, **fields: object) -> None:
        response = PartitionResponse(partition=partition, broker_epoch=epoch, **fields)  # type: ignore[arg-type]
        self.link._take_frame(ExchangeResponse(parts=[response]))

    def has_frame(self) -> bool:
        return bool(self.link._leaving)


def small() -> Operation:
    return Operation(purge=Purge(lmq_name="orders"))


def purged(request_id: int) -> OperationResult:
    """The answer to a small one."""
    return OperationResult(request_id=request_id, removed=RemovedResult())


def large(size: int) -> Operation:
    return Operation(append=Append(lmq_name="orders", body=bytes(size)))


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_channel("127.0.0.1:1") as channel:
        yield Node(StorageServiceStub(channel))


async def test_all_partitions_are_bound_in_one_frame(node: Node) -> None:
    assert node.connect() == list(range(PARTITIONS))
    assert all(link.connected.is_set() for link in node.links)


async def test_what_gathers_for_all_partitions_leaves_in_one_frame(node: Node) -> None:
    node.connect()
    for partition in range(PARTITIONS):
        node.send(partition, small(), small())

    frame = node.frame()

    assert [(part.partition, part.broker_epoch) for part in frame.parts] == [
        (partition, EPOCH) for partition in range(PARTITIONS)
    ]
    assert {len(part.operations) for part in frame.parts} == {2}
    assert not node.has_frame()


async def test_a_partition_that_does_not_answer_delays_no_other(node: Node) -> None:
    """L1: its operations wait in the broker once storage owes too many answers."""
    node.connect()
    sent = 0
    for _ in range(2 * FRAMES_IN_FLIGHT_MAX):
        node.send(0, *[small() for _ in range(2000)])
        node.send(1)
        parts = {part.partition: part.operations for part in node.frame().parts}
        sent += len(parts.get(0, ()))
        (of_other,) = parts[1]
        node.answer(1, results=[purged(of_other.request_id)])

    assert sent == UNANSWERED_OPERATIONS_MAX
    assert not node.has_frame()
    assert node.links[0].waiting == 4 * FRAMES_IN_FLIGHT_MAX * 1000


async def test_every_partition_gets_its_share_of_a_frame(node: Node) -> None:
    """L1, S3: no frame is too large for gRPC, and one with much to send does not fill it alone."""
    node.connect()
    for partition in (0, 1, 2):
        node.send(partition, *[large(4 * 1024 * 1024) for _ in range(6)])
    node.send(3)

    frames = []
    while node.has_frame():
        frames.append(node.frame())

    assert {part.partition for part in frames[0].parts} == {0, 1, 2, 3}
    assert max(frame.ByteSize() for frame in frames) <= FRAME_BYTES_MAX
    counts = [sum(len(part.operations) for part in frame.parts) for frame in frames]
    assert sum(counts) == 3 * 6 + 1


async def test_later_operations_of_a_partition_fit_the_frame_as_well(node: Node) -> None:
    """S3: others may have taken more than their share, each with one large operation."""
    node.connect()
    mib = 1024 * 1024
    for partition in (0, 1, 2):
        node.send(partition, large(4 * mib))
    node.send(3, large(24 * mib // 10))
    node.send(4, small(), large(24 * mib // 10))
    node.send(5, large(4 * mib))

    frames = []
    while node.has_frame():
        frames.append(node.frame())

    assert max(frame.ByteSize() for frame in frames) <= FRAME_BYTES_MAX
    assert sum(len(part.operations) for frame in frames for part in frame.parts) == 7


async def test_a_part_that_ends_leaves_the_others_bound(node: Node) -> None:
    """S8, L1."""
    node.connect()
    fenced = to_status(Fenced("another broker has it"))

    node.answer(0, end=fenced)
    for partition in (0, 1):
        node.send(partition)

    assert node.ended == {0: "FENCED"}
    assert [part.partition for part in node.frame().parts] == [1]


async def test_a_bind_that_is_refused_connects_nothing(node: Node) -> None:
    node.frame()

    node.answer(0, end=to_status(Fenced("another broker has it")))

    assert node.ended == {0: "FENCED"}
    assert not node.links[0].connected.is_set()


async def test_answers_under_an_earlier_epoch_are_ignored(node: Node) -> None:
    """S2: they belong to operations whose callers were answered when the link broke."""
    node.connect()
    node.send(0)
    node.frame()

    node.answer(0, EPOCH - 1, results=[purged(1)])

    assert node.links[0].waiting == 1


async def test_an_answer_to_what_was_not_sent_is_ignored(node: Node) -> None:
    """S2: the operation is sent, and gets the answer that follows."""
    node.connect()
    node.send(0)

    node.answer(0, results=[purged(1)])
    before = node.links[0].waiting
    (part,) = node.frame().parts
    node.answer(0, results=[purged(1)])

    assert before == 1
    assert [each.request_id for each in part.operations] == [1]
    assert node.links[0].waiting == 0


async def test_a_response_that_a_link_cannot_take_ends_only_its_part(node: Node) -> None:
    """L1: storage is asked to drop it."""
    node.connect()
    reopened = PartitionHealth(state=topic_pb2.PARTITION_STATE_SERVING, openings=2)

    node.answer(5, health=reopened)

    frame = node.frame()
    assert node.ended == {5: Unavailable.reason}
    assert [(each.partition, each.broker_epoch) for each in frame.unbinds] == [(5, EPOCH)]


async def test_a_stream_that_breaks_ends_all_parts(node: Node) -> None:
    node.connect()
    for partition in range(PARTITIONS):
        node.send(partition)

    node.link._broken(Unavailable("gone"))

    assert set(node.ended) == set(range(PARTITIONS))
    assert not node.has_frame()
