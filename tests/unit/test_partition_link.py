"""The link to a partition: what its frames mean for those who wait for messages."""

from collections.abc import Iterable

from broker_svc.partition_link import PartitionLink
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1.exchange_pb2 import ExchangeResponse
from tidemark.api.storage.v1.partition_pb2 import PartitionHealth
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import ManualClock
from tidemark.rpc import open_channel
from tidemark.settings import BrokerSettings


class Offers:
    """Counts how often everybody who waits is offered to storage again."""

    def __init__(self) -> None:
        self.link_ups = 0

    def link_up(self, partition: int) -> None:
        self.link_ups += 1

    def link_down(self, partition: int) -> None: ...
    def queue_ready(self, partition: int, lmq_name: str, group: str) -> None: ...
    def next_deadline(self, partition: int, in_ms: int | None) -> None: ...
    def held_reservations(self, partition: int) -> Iterable[int]:
        return ()


def health(openings: int, state: topic_pb2.PartitionState.ValueType) -> ExchangeResponse:
    return ExchangeResponse(health=PartitionHealth(state=state, openings=openings))


async def test_a_reopening_that_was_over_before_it_was_told_is_noticed() -> None:
    """S2: storage has forgotten who waits, so whoever waits is offered again."""
    serving = topic_pb2.PARTITION_STATE_SERVING
    async with open_channel("127.0.0.1:1") as channel:
        link = PartitionLink(0, BrokerSettings(), 1, StorageServiceStub(channel), ManualClock())
        offers = Offers()
        link.listen(offers)

        counts = []
        for frame in (
            health(1, serving),
            ExchangeResponse(),
            health(1, serving),
            health(2, serving),
            health(2, topic_pb2.PARTITION_STATE_FAULTY),
            health(2, serving),
        ):
            link._take(frame)
            counts.append(offers.link_ups)

    assert counts == [1, 1, 1, 2, 2, 3]
