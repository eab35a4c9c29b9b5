"""The frames of an exchange: what the columns and the long form of its parts have to share."""

import asyncio
from unittest.mock import Mock

import pytest

from storage_svc.api.exchange import RESPONSE_BYTES_MAX, Exchange, no_report
from storage_svc.api.exchange_part import ExchangePart
from storage_svc.api.result_columns import COLUMNS_BYTES_MAX
from storage_svc.operations.publish import AppendedRuns
from storage_svc.operations.reserve import ANSWER_BYTES_MAX, Reserved, ReservedSlice
from storage_svc.operations.standing import HandedOut, HandOut
from storage_svc.partition.exchange_events import ExchangeEvents
from storage_svc.partition.health import Health
from tidemark.api.storage.v1.exchange_pb2 import Bind, ExchangeRequest, ExchangeResponse, Unbind
from tidemark.errors import Fenced, Unavailable
from tidemark.limits import (
    FAIRNESS_KEY_BYTES_MAX,
    FRAME_BYTES_MAX,
    GROUP_NAME_BYTES_MAX,
    LITE_NAME_BYTES_MAX,
    PULL_MESSAGES_MAX,
    TOPIC_NAME_BYTES_MAX,
    TRACEPARENT_BYTES_MAX,
)
from tidemark.rpc.statuses import from_status

EPOCH = 7
STORED = AppendedRuns((1, 1))
REFUSED = Unavailable("not now")
LARGE = 2**31 - 1


def partition(number: int) -> Mock:
    mock = Mock(number=number, health=Health(), last_commit=1, next_deadline_ms=None)
    mock.refused_before.return_value = None
    mock.connect = ExchangeEvents
    return mock


@pytest.fixture
def partitions() -> list[Mock]:
    return [partition(number) for number in range(3)]


@pytest.fixture
def exchange(partitions: list[Mock]) -> Exchange:
    """With all partitions bound, and nothing to send."""
    exchange = Exchange(Mock(get=partitions.__getitem__), asyncio.Event(), no_report)
    binds = [Bind(partition=each.number, broker_epoch=EPOCH) for each in partitions]
    exchange._decode(ExchangeRequest(binds=binds))
    assert len(next_frame(exchange).parts) == len(partitions)
    return exchange


@pytest.fixture
def parts(exchange: Exchange) -> list[ExchangePart]:
    return list(exchange._parts.values())


def next_frame(exchange: Exchange) -> ExchangeResponse:
    frame = exchange._next_frame()
    assert frame is not None
    return frame


def handed_out(size: int) -> HandedOut:
    hand_out: HandOut = (1, 1, 1, b"r", 1, 1, bytes(size), 1, 1, 0)
    return HandedOut([hand_out])


def test_plain_results_of_all_parts_leave_together(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """C7."""
    for part in parts:
        part.take_results([5], [STORED])

    frame = next_frame(exchange)

    assert list(frame.columns.partitions[::5]) == [0, 1, 2]
    assert not frame.parts
    assert exchange._next_frame() is None


def test_the_end_of_a_fenced_part_is_in_the_frame_of_its_results(
    exchange: Exchange, partitions: list[Mock], parts: list[ExchangePart]
) -> None:
    """S8: the commit that fences a broker may have stored what it sent before."""
    parts[1].take_results([5], [STORED])
    partitions[1].is_held_under.return_value = False
    partitions[1].has_left = False
    partitions[1].check_epoch.side_effect = Fenced("another broker holds it")
    parts[1]._events.changed()

    frame = next_frame(exchange)

    assert list(frame.columns.partitions) == [1, EPOCH, 1, 1, 0]
    (ended,) = frame.parts
    assert ended.partition == 1
    assert isinstance(from_status(ended.end), Fenced)
    parts[1].take_results([6], [STORED])
    assert exchange._next_frame() is None


def test_health_waits_for_a_frame_without_results(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S2: results of a commit before a reopening come before the health that reports it."""
    parts[0].take_results([5], [STORED])
    parts[0]._events.health_changed = True
    parts[0]._events.changed()
    parts[0].take_results([6], [REFUSED])

    first, second = next_frame(exchange), next_frame(exchange)

    assert list(first.columns.results[::3]) == [5]
    assert [result.request_id for result in first.parts[0].results] == [6]
    assert not first.parts[0].HasField("health")
    assert second.parts[0].HasField("health")
    assert not second.HasField("columns")


def test_health_waits_for_results_that_have_no_room_in_a_frame(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S2: they would come to a broker that has dropped its callers."""
    parts[0]._events.handed_out([handed_out(RESPONSE_BYTES_MAX)])
    parts[1].take_results([5, 6], [REFUSED, STORED])
    parts[1]._events.health_changed = True
    parts[1]._events.changed()

    large, results, health = (next_frame(exchange).parts for _ in range(3))

    assert not any(part.HasField("health") for part in large)
    assert [[each.request_id for each in part.results] for part in results] == [[5, 6]]
    assert not results[0].HasField("health")
    assert health[0].HasField("health")


def test_columns_leave_half_of_a_frame_to_the_long_form(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S3: and what does not fit keeps its order in frames of its own."""
    size = COLUMNS_BYTES_MAX // 2
    for part in parts:
        for _ in range(4):
            part._events.handed_out([handed_out(size)])

    sizes = []
    while (frame := exchange._next_frame()) is not None:
        sizes.append(frame.ByteSize())

    assert sum(sizes) > 12 * size
    assert max(sizes) < RESPONSE_BYTES_MAX
    assert not exchange._load.result_bytes


def test_a_result_that_is_larger_than_its_share_leaves_beside_columns(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S3: it must not wait for a frame without columns, which may never come."""
    parts[0]._events.handed_out([handed_out(RESPONSE_BYTES_MAX)])
    parts[1].take_results([5], [STORED])
    parts[2].take_results([6], [REFUSED])

    first, second = next_frame(exchange), next_frame(exchange)

    assert first.HasField("columns")
    assert [part.partition for part in first.parts if part.results] == [0]
    assert first.ByteSize() > RESPONSE_BYTES_MAX
    assert [part.partition for part in second.parts] == [2]


def test_the_largest_frame_is_within_what_a_broker_accepts(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S3: full columns, the largest result of all beside them, and many events."""
    for _ in range(8):
        parts[0]._events.handed_out([handed_out(COLUMNS_BYTES_MAX // 8 - 200)])
    body = bytes(ANSWER_BYTES_MAX // PULL_MESSAGES_MAX)
    names = {
        "fairness_key": "f" * FAIRNESS_KEY_BYTES_MAX,
        "traceparent": "t" * TRACEPARENT_BYTES_MAX,
    }
    slice_ = ReservedSlice(
        LARGE,
        bytes(48),
        LARGE,
        LARGE,
        1,
        body,
        1,
        1,
        LARGE,
        LARGE,
        LARGE,
        **names,
        last_attempt=True,
    )
    parts[1]._events.handed_out([Reserved((slice_,) * PULL_MESSAGES_MAX, standing_id=LARGE)])
    topic, group = "t" * TOPIC_NAME_BYTES_MAX, "g" * GROUP_NAME_BYTES_MAX
    for part in parts:
        for number in range(10_000):
            part._events.ready[f"{topic}/{number:0{LITE_NAME_BYTES_MAX}}", group] = None
        part._events.changed()

    sizes, ready = [], 0
    while (frame := exchange._next_frame()) is not None:
        sizes.append(frame.ByteSize())
        ready += sum(len(part.ready) for part in frame.parts)

    assert max(sizes) > ANSWER_BYTES_MAX + COLUMNS_BYTES_MAX
    assert max(sizes) < FRAME_BYTES_MAX
    assert ready == 30_000


def test_an_unread_answer_takes_no_more_frames(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S3: until the columns and the long form have room again."""
    for part in parts:
        for _ in range(3):
            part._events.handed_out([handed_out(COLUMNS_BYTES_MAX // 2)])
    exchange._make_room()
    assert not exchange._room.is_set()

    while exchange._next_frame() is not None:
        pass

    assert exchange._room.is_set()


def test_what_waits_in_a_part_that_is_unbound_counts_no_longer(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """S8: its results in columns leave, and the broker drops them."""
    parts[0].take_results([5, 6], [STORED, REFUSED])

    exchange._decode(ExchangeRequest(unbinds=[Unbind(partition=0, broker_epoch=EPOCH)]))

    frame = next_frame(exchange)
    assert list(frame.columns.results[::3]) == [5]
    assert not frame.parts
    assert not exchange._load.result_bytes


def test_a_bind_is_answered_with_health_beside_results_of_an_earlier_bind(
    exchange: Exchange, parts: list[ExchangePart]
) -> None:
    """V1: a broker takes nothing of a bind before its health, so the deadline would be lost."""
    parts[0].take_results([5], [STORED])
    unbind = Unbind(partition=0, broker_epoch=EPOCH)
    bind = Bind(partition=0, broker_epoch=EPOCH + 1)

    exchange._decode(ExchangeRequest(unbinds=[unbind], binds=[bind]))

    frame = next_frame(exchange)
    assert list(frame.columns.partitions) == [0, EPOCH, 1, 1, 0]
    (bound,) = frame.parts
    assert bound.broker_epoch == EPOCH + 1
    assert bound.HasField("next_deadline")
    assert bound.HasField("health")
