"""The link to a partition: what its frames hold, and what they mean for those who wait."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

import pytest

from broker_svc.links.frame_columns import HandOutRow
from broker_svc.links.link_state import Assigned
from broker_svc.links.partition_link import CLAIM_MS_MAX, PartitionLink
from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from broker_svc.links.unanswered_operations import (
    FRAMES_IN_FLIGHT_MAX,
    WORTHWHILE_BYTES,
    WORTHWHILE_OPERATIONS,
)
from tests.support.local_broker import in_time
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    Append,
    Operation,
    OperationResult,
    PartitionResponse,
    Purge,
    RemovedResult,
    ReserveResult,
)
from tidemark.api.storage.v1.partition_pb2 import PartitionHealth
from tidemark.api.storage.v1.storage_pb2 import ClaimPartitionRequest, ClaimPartitionResponse
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import ManualClock
from tidemark.errors import Fenced, NotOwner, QueueNotFound, Unavailable
from tidemark.rpc import from_status, open_channel
from tidemark.rpc.statuses import to_status
from tidemark.settings import BrokerSettings

MANY_BYTES = 1 << 30


class Offers:
    """Counts how often all waiting consumers are offered to storage again, and the notices."""

    def __init__(self) -> None:
        self.link_ups = 0
        self.told: list[object] = []
        """Results and expired reservations, in the order in which they were reported."""

    def link_up(self, partition: int) -> None:
        self.link_ups += 1

    def link_down(self, partition: int) -> None: ...
    def partition_left(self, partition: int) -> None: ...
    def commits_lost(self, partition: int) -> None: ...
    def before_frame_sent(self, leaving: Collection[int]) -> None: ...
    def queue_ready(self, partition: int, lmq_name: str, group: str) -> None: ...
    def handed_out(self, partition: int, reserved: ReserveResult) -> None: ...
    def handed_out_many(self, hand_outs: Iterable[HandOutRow]) -> None: ...
    def frame_taken(self) -> None: ...
    def next_deadline(self, partition: int, in_ms: int | None) -> None: ...
    def expired(self, partition: int, reservation_ids: Iterable[int]) -> None:
        self.told += reservation_ids

    def held_receipts(self, partition: int) -> Iterable[bytes]:
        return ()


def health(openings: int, state: topic_pb2.PartitionState.ValueType) -> PartitionResponse:
    return PartitionResponse(health=PartitionHealth(state=state, openings=openings))


@pytest.fixture
async def link() -> AsyncIterator[PartitionLink]:
    async with open_channel("127.0.0.1:1") as channel:
        node = StorageNode("storage", StorageServiceStub(channel))
        settings, clock = BrokerSettings(partitions=4), ManualClock()
        nodes = StorageNodes([node], settings, clock)
        link = PartitionLink(0, settings, 1, nodes, clock, lambda: None)
        node.link.bind(link, broker_epoch=1)
        node.link._next_frame()  # with the bind
        yield link


async def test_a_reopening_that_was_over_before_it_was_told_is_noticed(link: PartitionLink) -> None:
    """S2: the outcome of the last commit is unknown, so the link restarts with a report."""
    serving = topic_pb2.PARTITION_STATE_SERVING
    offers = Offers()
    link.listen(offers)

    counts = []
    for frame in (
        health(1, serving),
        PartitionResponse(),
        health(1, serving),
        health(1, topic_pb2.PARTITION_STATE_FAULTY),
        health(1, serving),
    ):
        link.take(frame)
        counts.append(offers.link_ups)
    with pytest.raises(Unavailable):
        link.take(health(2, serving))
    link._drop_callers()
    link.take(health(2, serving))

    assert counts == [1, 1, 1, 1, 2]
    assert offers.link_ups == 3


async def test_what_a_frame_hands_out_is_told_before_what_it_says_has_expired(
    link: PartitionLink,
) -> None:
    """V2, I4: a delivery that expired before the broker knew it would never be released."""
    offers = Offers()
    link.listen(offers)
    link.take(health(1, topic_pb2.PARTITION_STATE_SERVING))
    answer = link.send(Operation(purge=Purge(lmq_name="t")))
    answer.add_done_callback(lambda _: offers.told.append("result"))
    link.unanswered.move(MANY_BYTES, MANY_BYTES)

    result = OperationResult(request_id=1, removed=RemovedResult())
    link.take(PartitionResponse(results=[result], expired_reservation_ids=[7]))
    while len(offers.told) < 2:
        await ManualClock().sleep_ms(0)

    assert offers.told == ["result", 7]


class SilentStorage:
    """A storage node that stops answering: at a claim, or at the report that follows it."""

    def __init__(self, *, answers_claims: bool) -> None:
        self.claims: asyncio.Queue[ClaimPartitionRequest] = asyncio.Queue()
        self._answers_claims = answers_claims

    async def ClaimPartition(self, request: ClaimPartitionRequest) -> ClaimPartitionResponse:
        self.claims.put_nowait(request)
        if not self._answers_claims:
            await asyncio.Event().wait()
        return ClaimPartitionResponse(broker_epoch=1, report_required=True)

    async def ReportHeldReservations(self, report: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answers_claims", "unanswered"),
    [(False, "a claim"), (True, "a report of held reservations")],
)
async def test_a_claim_that_is_never_answered_is_made_again(
    *, answers_claims: bool, unanswered: str
) -> None:
    """S2: connections to a node that hangs may live, so that nothing else ends the call."""
    storage: Any = SilentStorage(answers_claims=answers_claims)
    settings, clock = BrokerSettings(partitions=1), ManualClock()
    nodes = StorageNodes([StorageNode("storage", storage)], settings, clock)
    link = PartitionLink(0, settings, 1, nodes, clock, lambda: None)
    link.follow(Assigned(1, settings.broker_id))
    running = asyncio.create_task(link.run())
    await storage.claims.get()

    await in_time(clock.until_sleepers(1))
    await clock.advance_ms(CLAIM_MS_MAX - 1)
    before, detail = storage.claims.qsize(), link.detail
    await clock.advance_ms(1_000)
    await storage.claims.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert not before
    assert "did not answer" not in detail
    assert link.detail == f"UNAVAILABLE: storage did not answer {unanswered} in {CLAIM_MS_MAX} ms"
    assert link.is_unreachable


# --- which frames leave ---------------------------------------------------------------------------


SMALL = Operation(purge=Purge(lmq_name="orders"))


class Wire:
    """Stands where the writer of a link does: takes frames that may leave, and answers them."""

    def __init__(self, link: PartitionLink) -> None:
        self._link = link
        self._frames: list[list[int]] = []
        link.take(health(1, topic_pb2.PARTITION_STATE_SERVING))

    def send(self, *operations: Operation) -> list[int]:
        """How many operations each frame holds that leaves now."""
        for each in operations:
            answer = self._link.send(Operation.FromString(each.SerializeToString()))
            answer.add_done_callback(asyncio.Future.exception)
        return self._leaving()

    def answer(self, frame: int) -> list[int]:
        """Storage answers one frame; what leaves then."""
        refused = to_status(QueueNotFound("orders"))
        results = [OperationResult(request_id=each, error=refused) for each in self._frames[frame]]
        self._link.take(PartitionResponse(results=results))
        return self._leaving()

    def _leaving(self) -> list[int]:
        before = len(self._frames)
        assert self._link.node is not None
        while frame := self._link.node.link._next_frame():
            (part,) = frame.parts
            self._frames.append([each.request_id for each in part.operations])
        return [len(frame) for frame in self._frames[before:]]


async def test_a_small_frame_waits_for_the_one_before_it(link: PartitionLink) -> None:
    wire = Wire(link)

    assert wire.send(SMALL) == [1]
    assert wire.send(SMALL, SMALL) == []
    assert wire.send(SMALL) == []
    assert wire.answer(0) == [3]
    assert wire.answer(1) == []
    assert wire.send(SMALL) == [1]


async def test_a_frame_of_many_operations_does_not_wait(link: PartitionLink) -> None:
    wire = Wire(link)
    wire.send(SMALL)

    assert wire.send(*[SMALL] * (WORTHWHILE_OPERATIONS - 1)) == []
    assert wire.send(SMALL) == [WORTHWHILE_OPERATIONS]


async def test_a_frame_of_many_bytes_does_not_wait_and_their_number_is_bounded(
    link: PartitionLink,
) -> None:
    wire = Wire(link)
    large = Operation(append=Append(lmq_name="orders", body=bytes(WORTHWHILE_BYTES)))

    leaving = [wire.send(large) for _ in range(FRAMES_IN_FLIGHT_MAX + 2)]

    assert leaving == [[1]] * FRAMES_IN_FLIGHT_MAX + [[], []]
    assert wire.answer(3) == [2]


async def test_a_broken_link_forgets_its_frames(link: PartitionLink) -> None:
    """S2: every waiting caller is answered, and the next connection starts empty."""
    wire = Wire(link)
    wire.send(SMALL, SMALL)
    wire.send(SMALL)
    assert link.waiting == 3

    link._drop_callers()
    link.take(health(2, topic_pb2.PARTITION_STATE_SERVING))

    assert link.waiting == 0
    assert wire.send(SMALL) == [1]


async def test_an_operation_of_a_fenced_broker_gets_the_end_of_the_link_as_its_answer(
    link: PartitionLink,
) -> None:
    """S8, S11: FENCED would end the publish of a client, which the new holder can store."""
    link.follow(Assigned(1, BrokerSettings().broker_id))
    link.take(health(1, topic_pb2.PARTITION_STATE_SERVING))
    link.follow(Assigned(2, "other", "other:1"))
    fenced, refused = (link.send(Operation(purge=Purge(lmq_name="t"))) for _ in range(2))
    link.unanswered.move(MANY_BYTES, MANY_BYTES)
    of_broker = to_status(Fenced("held under epoch 2", epoch="2", owner="other:1"))
    of_client = to_status(Fenced("owned under epoch 2", epoch="2"))

    results = [
        OperationResult(request_id=1, error=of_broker),
        OperationResult(request_id=2, error=of_client),
    ]
    link.take(PartitionResponse(results=results))
    pending = not fenced.done()
    link._lost(Fenced("held under epoch 2"), claimed=True)
    link._drop_callers()

    assert pending
    assert from_status((await refused).error).reason == "FENCED"
    with pytest.raises(NotOwner) as moved:
        await fenced
    assert moved.value.metadata["owner"] == "other:1"
