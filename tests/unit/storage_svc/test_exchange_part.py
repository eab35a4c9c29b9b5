"""The part of a partition in an exchange: what it takes from a broker that may be out of date."""

from unittest.mock import Mock

import pytest

from storage_svc.api.exchange_part import Asked, ExchangeLoad, ExchangePart
from storage_svc.partition.exchange_events import ExchangeEvents
from storage_svc.partition.health import Health
from tidemark.api.storage.v1.exchange_pb2 import Operation, PartitionOperations, PartitionResponse
from tidemark.errors import Unavailable
from tidemark.rpc.statuses import from_status

EPOCH = 7
ROOM = 1_000_000


@pytest.fixture
def partition() -> Mock:
    """Open for the first time."""
    partition = Mock(number=0, health=Health(), last_commit=1, next_deadline_ms=None)
    partition.health.openings = 1
    partition.connect = ExchangeEvents
    return partition


@pytest.fixture
def part(partition: Mock) -> ExchangePart:
    return ExchangePart(partition, EPOCH, ExchangeLoad(), lambda _: None, lambda _: None)


def written(part: ExchangePart) -> PartitionResponse:
    """What it has for the next frame."""
    response = PartitionResponse()
    part.write_to(response, ROOM, ROOM)
    return response


def asked_of(part: ExchangePart) -> Asked:
    operation = Operation(request_id=5)
    operation.purge.lmq_name = "orders/a"
    return part.decode(PartitionOperations(operations=[operation]))


def test_what_was_sent_before_an_opening_was_known_is_not_carried_out(
    partition: Mock, part: ExchangePart
) -> None:
    """S2: it would overtake what is repeated after the commit that failed."""
    assert written(part).health.openings == 1
    part.submit(asked_of(part))
    assert partition.submit_frame.call_count == 1

    partition.health.openings = 2
    part.submit(asked_of(part))

    assert partition.submit_frame.call_count == 1
    (result,) = written(part).results
    assert result.request_id == 5
    assert isinstance(from_status(result.error), Unavailable)


def test_a_broker_that_knows_only_the_last_opening_is_served(
    partition: Mock, part: ExchangePart
) -> None:
    """S2: the partition opened again before it told its health, so that the broker sees no change
    and has no reason to bind again."""
    partition.health.openings = 2

    assert written(part).health.openings == 2
    part.submit(asked_of(part))

    assert partition.submit_frame.call_count == 1
