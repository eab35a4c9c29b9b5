"""The sizes by which frames to storage are cut: what an operation takes is never underestimated."""

from unittest.mock import Mock

import pytest

from broker_svc.consume.acks import Acks
from broker_svc.links.frame_columns import OperationColumns, PlainOperation, as_operation
from broker_svc.publish.run_arrays import RunArrays
from tidemark.api.broker.v1.broker_pb2 import Acks as AckedTags
from tidemark.api.storage.v1.exchange_pb2 import ExchangeRequest, PartitionOperations
from tidemark.bodies import body_of
from tidemark.limits import CLIENT_ID_BYTES_MAX, LITE_NAME_BYTES_MAX, PRODUCER_ID_BYTES_MAX
from tidemark.receipts import Receipt
from tidemark.topics import Topic

LARGEST = 2**64 - 1


class Link:
    """Keeps what is asked of the last partition."""

    partition = 2**16 - 1
    serving = True

    def __init__(self) -> None:
        self.asked: list[PlainOperation] = []

    def ask_plain(self, operation: PlainOperation) -> None:
        self.asked.append(operation)


def appended(runs: int, producer_id: str, lmq_name: str) -> PlainOperation:
    link = Link()
    links, topics, path, cache = {link.partition: link}, Mock(), Mock(), Mock(opening=())
    topics.known.return_value = Topic("orders", version=2**40)
    cache.find.return_value = Mock(partitions=(link.partition,))
    cache.find.return_value.lease.failed = False
    arrays = RunArrays(path, links, topics, Mock())  # type: ignore[arg-type]
    body = body_of([b""])
    numbers = (1, 1, LARGEST, link.partition)
    arrays.submit([(lmq_name, body, numbers)] * runs, cache, producer_id, Mock(), 0, 0)
    (operation,) = link.asked
    return operation


def acked(receipts: int, client_id: str) -> PlainOperation:
    link = Link()
    held = Mock(receipt=Receipt(1, 1, 1).encode(), key=(link.partition, 1))
    held.queue.pending_settlements = 0
    deliveries = Mock()
    deliveries.get.return_value = held
    acks = Acks({link.partition: link}, Mock())  # type: ignore[dict-item]
    tags = AckedTags(delivery_tags=range(receipts))
    acks.submit(tags, client_id, deliveries, lambda _: None)
    (operation,) = link.asked
    return operation


@pytest.mark.parametrize("count", [1, 2, 256])
@pytest.mark.parametrize("letter", ["p", "\N{EURO SIGN}"])
def test_an_operation_takes_no_more_than_its_size_in_either_form(count: int, letter: str) -> None:
    """S3, L1: a frame that is larger than gRPC takes would break the stream of all partitions, and
    storage stops reading the stream of a broker that leaves more unanswered than it may."""
    letter_bytes = len(letter.encode())
    for operation in (
        appended(count, letter * (PRODUCER_ID_BYTES_MAX // letter_bytes), "orders/1"),
        appended(count, "p", "orders/" + letter * (LITE_NAME_BYTES_MAX // letter_bytes)),
        acked(count, letter * (CLIENT_ID_BYTES_MAX // letter_bytes)),
    ):
        operation.request_id = LARGEST
        long_form = PartitionOperations(operations=[as_operation(operation)])
        columns, frame = OperationColumns(), ExchangeRequest()
        columns.add(Link.partition, LARGEST, [operation])
        columns.write_to(frame)

        assert long_form.ByteSize() <= operation.size
        assert frame.ByteSize() <= operation.size
