"""Standing reserves as the broker keeps them: when they are recalled, and what they hold."""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from broker_svc.consume.consumer import (
    MANY_FEEDS,
    MANY_FEEDS_RESERVE_BYTES,
    RESERVE_BYTES_MIN,
    Consumer,
    Feed,
    Room,
    Slices,
)
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.consume.reserve import long_form
from broker_svc.consume.standing import (
    LARGE_PER_CONNECTION_MAX,
    SMALL_STANDING_BYTES,
    STANDING_BYTES,
)
from broker_svc.idle.activity_leases import Lease
from broker_svc.idle.tracking import TrackedQueue
from broker_svc.links.frame_columns import HandOutRow, as_operation
from broker_svc.links.partition_link import PartitionLink
from tests.unit.broker_svc.test_partition_link import Offers, health, link
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    Operation,
    OperationResult,
    PartitionResponse,
    RecallResult,
    ReservedSlice,
    ReserveResult,
)

__all__ = ["link"]

CREDIT = 1000
MANY_BYTES = 1 << 30


class Passed(Offers):
    """Passes on what standing reserves hand out."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self._dispatcher = dispatcher

    def handed_out(self, partition: int, reserved: ReserveResult) -> None:
        self._dispatcher.handed_out(partition, reserved)

    def handed_out_many(self, hand_outs: Iterable[HandOutRow]) -> None:
        self._dispatcher.handed_out_many(hand_outs)


class Waiting(NamedTuple):
    """A consumer of two queues; what it has asked is answered by the test."""

    link: PartitionLink
    dispatcher: Dispatcher
    consumer: Consumer
    delivered: list[Slices]

    def subscribe(self, lmq_name: str, subscriptions: int = 2) -> None:
        leases: Any = Mock()
        queue = TrackedQueue(0, lmq_name, 1000, 0)
        queue.groups["default"] = subscriptions
        lease = Lease(leases, (queue,), "default")
        self.dispatcher.subscribe(self.consumer, lease)

    def asked(self) -> list[Operation]:
        """The operations since the last time, which are under way now."""
        moved, _ = self.link.unanswered.move(MANY_BYTES, MANY_BYTES)
        return [as_operation(each) for each in moved]

    async def answer(self, *results: OperationResult) -> None:
        self.link.take(PartitionResponse(results=results))
        await asyncio.sleep(0)  # noqa: TID251 - results are seen in the next turn

    async def stand(self, lmq_name: str) -> Operation:
        self.subscribe(lmq_name)
        (asked,) = self.asked()
        left = asked.reserve.standing_messages
        await self.answer(_reserved(asked.request_id, standing_messages=left))
        return asked


def _reserved(request_id: int = 0, **fields: Any) -> OperationResult:
    return OperationResult(request_id=request_id, reserve=ReserveResult(**fields))


@pytest.fixture
async def waiting(link: PartitionLink) -> Waiting:
    delivered: list[Slices] = []

    def deliver(consumer: Consumer, feed: Feed, slices: Slices) -> None:
        delivered.append(slices)
        consumer.room.taken_bytes += sum(len(each.body) for each in slices)

    dispatcher = Dispatcher({0: link}, lambda *_: None)
    link.listen(Passed(dispatcher))
    link.take(health(1, topic_pb2.PARTITION_STATE_SERVING))
    room = Room(RESERVE_BYTES_MIN)
    consumer = Consumer(1, "default", 0, deliver, lambda _: None, room)
    consumer.credit = CREDIT
    return Waiting(link, dispatcher, consumer, delivered)


async def test_room_that_pending_reserves_take_recalls_nothing(waiting: Waiting) -> None:
    """A reserve takes room for far more than it brings: only unread deliveries are a reason."""
    stood = await waiting.stand("orders/a")
    waiting.subscribe("orders/b")
    (pending,) = waiting.asked()
    no_room = waiting.consumer.room.left_bytes <= 0

    few = _reserved(
        standing_id=stood.reserve.standing_id,
        standing_messages=stood.reserve.standing_messages - 1,
        slices=[ReservedSlice(count=1, body=bytes(100))],
    )
    await waiting.answer(few)

    assert no_room
    assert pending.HasField("reserve")
    assert len(waiting.delivered) == 1
    assert waiting.asked() == []


async def test_a_client_that_does_not_read_has_its_consumer_recalled(waiting: Waiting) -> None:
    """The credit comes back with the last result, and is all there is."""
    stood = await waiting.stand("orders/a")
    standing_id = stood.reserve.standing_id
    left = stood.reserve.standing_messages - 1

    large = [ReservedSlice(count=1, body=bytes(RESERVE_BYTES_MIN))]
    await waiting.answer(_reserved(standing_id=standing_id, standing_messages=left, slices=large))
    (recalled,) = waiting.asked()
    held = waiting.consumer.standing_credit
    await waiting.answer(_reserved(standing_id=standing_id))

    assert recalled.recall.standing_id == standing_id
    assert (held, waiting.consumer.standing_credit) == (left, 0)
    assert waiting.consumer.credit == CREDIT - 1
    assert len(waiting.dispatcher.standing) == 0


async def test_the_subscriptions_of_a_connection_all_stand_the_later_ones_with_few_bytes(
    waiting: Waiting,
) -> None:
    """What may arrive at once for a connection that is not read stays bounded."""
    room = waiting.consumer.room
    room.bytes_max = MANY_BYTES
    waiting.consumer.credit = 100 * LARGE_PER_CONNECTION_MAX
    for number in range(LARGE_PER_CONNECTION_MAX + 1):
        waiting.subscribe(f"orders/{number}")

    asked = [each.reserve.standing_bytes for each in waiting.asked()]

    assert set(asked[:LARGE_PER_CONNECTION_MAX]) == {STANDING_BYTES}
    assert asked[LARGE_PER_CONNECTION_MAX:] == [SMALL_STANDING_BYTES]


async def test_the_first_reserves_of_many_queues_take_little_room(waiting: Waiting) -> None:
    """A message that is larger is asked for again, with the bytes of any other feed."""
    waiting.consumer.room.bytes_max = MANY_FEEDS * RESERVE_BYTES_MIN
    waiting.consumer.credit = 100 * LARGE_PER_CONNECTION_MAX
    for number in range(MANY_FEEDS):
        waiting.subscribe(f"orders/{number}")
        await waiting.answer(*(_reserved(each.request_id) for each in waiting.asked()))

    waiting.subscribe("orders/last")
    (last,) = waiting.asked()
    await waiting.answer(_reserved(last.request_id, more=True))
    (again,) = waiting.asked()

    assert last.reserve.max_bytes == MANY_FEEDS_RESERVE_BYTES
    assert again.reserve.max_bytes == RESERVE_BYTES_MIN


async def test_the_last_subscription_of_a_group_ends_what_stands_without_a_recall(
    waiting: Waiting,
) -> None:
    """Storage ends it when the group is left; what it still hands out is released."""
    waiting.subscribe("orders/a", 1)
    (asked,) = waiting.asked()
    left = asked.reserve.standing_messages
    await waiting.answer(_reserved(asked.request_id, standing_messages=left))

    waiting.dispatcher.unsubscribe(waiting.consumer, "orders/a")
    nothing = waiting.asked()
    late = _reserved(
        standing_id=asked.reserve.standing_id,
        standing_messages=left - 1,
        slices=[ReservedSlice(count=1, receipt=b"late")],
    )
    await waiting.answer(late)
    (released,) = waiting.asked()

    assert nothing == []
    assert released.settle.receipt == b"late"
    assert (waiting.consumer.credit, waiting.delivered) == (CREDIT, [])


async def test_a_message_too_large_for_what_stands_is_reserved_with_little_room(
    waiting: Waiting,
) -> None:
    """Many queues may get such a message at once: each must not take 1 MiB of room."""
    waiting.consumer.room.bytes_max = MANY_BYTES
    stood = await waiting.stand("orders/a")

    await waiting.answer(_reserved(standing_id=stood.reserve.standing_id, more=True))
    (again,) = waiting.asked()

    assert again.reserve.max_bytes == RESERVE_BYTES_MIN


async def test_a_recall_of_one_that_stands_no_longer_gives_its_credit_back(
    waiting: Waiting,
) -> None:
    """As after its group was left while its reserve was under way: no other result follows."""
    await waiting.stand("orders/a")

    waiting.dispatcher.unsubscribe(waiting.consumer, "orders/a")
    (recalled,) = waiting.asked()
    result = OperationResult(request_id=recalled.request_id, recall=RecallResult(stood=False))
    await waiting.answer(result)

    assert (waiting.consumer.credit, waiting.consumer.standing_credit) == (CREDIT, 0)
    assert len(waiting.dispatcher.standing) == 0


class OtherLink:
    """The link of another partition, with what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Operation] = []

    def send(self, operation: Operation) -> asyncio.Future[OperationResult]:
        self.asked.append(operation)
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("in_columns", [True, False])
async def test_no_partition_hands_out_to_what_stands_in_another(
    waiting: Waiting, *, in_columns: bool
) -> None:
    """L1, V6: the delivery would be settled in the wrong one. It goes back to its own."""
    stood = await waiting.stand("orders/a")
    standing_id, left = stood.reserve.standing_id, stood.reserve.standing_messages - 1
    held = waiting.consumer.standing_credit
    other = OtherLink()
    waiting.dispatcher._links = {0: waiting.link, 1: other}  # type: ignore[dict-item]

    row = (standing_id, left, 7, b"foreign", 0, 1, b"body", 1000, 0, 0)
    if in_columns:
        waiting.dispatcher.handed_out_many([(1, *row)])
    else:
        waiting.dispatcher.handed_out(1, long_form(*row))

    (released,) = other.asked
    assert released.settle.receipt == b"foreign"
    assert waiting.delivered == []
    assert waiting.consumer.standing_credit == held


async def test_credit_of_a_recall_that_found_nothing_goes_to_a_queue_that_waits_for_it(
    waiting: Waiting,
) -> None:
    """Its group was left while its reserve was under way: no last result brings the credit back."""
    waiting.consumer.credit = 2
    waiting.consumer.room.bytes_max = MANY_BYTES
    waiting.subscribe("orders/left", 1)
    (left,) = waiting.asked()
    waiting.subscribe("orders/a")
    waiting.subscribe("orders/b")
    waiting.dispatcher.unsubscribe(waiting.consumer, "orders/left")
    await waiting.answer(_reserved(left.request_id, standing_messages=1))
    recalled, first = waiting.asked()
    await waiting.answer(_reserved(first.request_id, slices=[ReservedSlice(count=1)]))

    result = OperationResult(request_id=recalled.request_id, recall=RecallResult(stood=False))
    await waiting.answer(result)
    (second,) = waiting.asked()

    assert {first.reserve.lmq_name, second.reserve.lmq_name} == {"orders/a", "orders/b"}
    assert waiting.consumer.credit == 0
