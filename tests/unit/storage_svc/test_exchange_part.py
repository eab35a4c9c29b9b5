"""The part of a partition in an exchange: what it takes from a broker that may be out of date, and
in which order its results are sent.
"""

from unittest.mock import Mock

import pytest

from storage_svc.api.exchange_part import Asked, ExchangeLoad, ExchangePart
from storage_svc.api.result_columns import COLUMNS_BYTES_MAX, ResultColumns
from storage_svc.operations.acks import Acked
from storage_svc.operations.publish import AppendedRuns
from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import HandedOut, HandOut
from storage_svc.partition.exchange_events import ExchangeEvents
from storage_svc.partition.health import Health
from tidemark.api.storage.v1.exchange_pb2 import Operation, PartitionOperations, PartitionResponse
from tidemark.api.storage.v1.exchange_pb2 import ResultColumns as ColumnsProto
from tidemark.errors import TidemarkError, Unavailable
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
def load() -> ExchangeLoad:
    return ExchangeLoad(ResultColumns(lambda: None))


@pytest.fixture
def part(partition: Mock, load: ExchangeLoad) -> ExchangePart:
    return ExchangePart(partition, EPOCH, load, lambda _: None)


@pytest.fixture
def idle(part: ExchangePart) -> ExchangePart:
    """It has answered the bind, and has nothing to send."""
    written(part)
    assert not part.waits_on()
    return part


def written(part: ExchangePart) -> PartitionResponse:
    """What it has for the next frame."""
    response = PartitionResponse()
    part.write_to(response, ROOM, ROOM)
    return response


def asked_of(part: ExchangePart) -> Asked:
    operation = Operation(request_id=5)
    operation.purge.lmq_name = "orders/a"
    return part.decode(PartitionOperations(operations=[operation]))


def stored(offset: int) -> AppendedRuns:
    return AppendedRuns((1, offset))


def in_columns(load: ExchangeLoad) -> list[int]:
    """The request ids of results in the columns, which are taken."""
    columns, load.columns = load.columns, ResultColumns(lambda: None)
    frame = ColumnsProto()
    columns.write_to(frame)
    return list(frame.results[::3])


def hand_out(body: bytes) -> HandOut:
    return (1, 1, 1, b"r", 1, 1, body, 1, 1, 0)


REFUSED = Unavailable("not now")


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


def test_plain_results_go_into_columns_at_once(idle: ExchangePart, load: ExchangeLoad) -> None:
    idle.take_results([1, 2], [stored(0), Acked((1,))])
    idle.take_results([3], [stored(1)])

    assert in_columns(load) == [1, 2, 3]
    assert not idle.has_news
    assert not load.result_bytes


def test_what_follows_a_result_in_the_long_form_waits_behind_it(
    idle: ExchangePart, load: ExchangeLoad
) -> None:
    """S2: until it is sent; then results go into columns again."""
    idle.take_results([1, 2, 3], [stored(0), REFUSED, stored(1)])
    idle.take_results([4], [stored(2)])

    assert in_columns(load) == [1]
    assert [each.request_id for each in written(idle).results] == [2, 3, 4]
    assert not idle.waits_on()
    assert not load.result_bytes
    idle.take_results([5], [stored(3)])
    assert in_columns(load) == [5]


@pytest.mark.parametrize(
    "result",
    [
        AppendedRuns((1, 0), repeats=((0, 0),)),
        AppendedRuns((0, 0), refused=((0, REFUSED),)),
        Acked((0,), ((0, REFUSED),)),
        REFUSED,
    ],
)
def test_a_refusal_and_a_repeat_have_the_long_form(
    idle: ExchangePart, load: ExchangeLoad, result: AppendedRuns | Acked | TidemarkError
) -> None:
    idle.take_results([1], [result])

    assert in_columns(load) == []
    assert [each.request_id for each in written(idle).results] == [1]


def test_results_wait_behind_events(idle: ExchangePart, load: ExchangeLoad) -> None:
    """V6: an event that is sent later must not belong to an earlier commit."""
    idle._events.ready["t/a", "g"] = None
    idle._events.changed()
    idle.take_results([1], [stored(0)])
    idle._events.handed_out([HandedOut([hand_out(b"x")])])

    assert in_columns(load) == []
    response = written(idle)
    assert [each.request_id for each in response.results] == [1, 0]
    assert len(response.ready) == 1


def test_hand_outs_that_are_not_plain_follow_those_that_are(
    idle: ExchangePart, load: ExchangeLoad
) -> None:
    """V6: in the same frame, behind the columns."""
    idle.take_results([1], [stored(0)])
    plain, last = HandedOut([hand_out(b"x")]), Reserved((), standing_id=9)
    idle._events.handed_out([plain, last, plain])

    columns, frame = load.columns, ColumnsProto()
    columns.write_to(frame)
    assert list(frame.partitions) == [0, EPOCH, 1, 1, 1]
    results = [each.WhichOneof("outcome") for each in written(idle).results]
    assert results == ["reserve", "hand_outs"]


def test_health_is_not_in_a_frame_with_results_in_columns(idle: ExchangePart) -> None:
    """S2: a broker that reads of a reopening drops its callers."""
    idle._events.health_changed = True
    idle._events.changed()
    first, second = PartitionResponse(), PartitionResponse()

    idle.write_to(first, ROOM, ROOM, in_columns=True)
    assert idle.waits_on()
    idle.write_to(second, ROOM, ROOM)

    assert not first.HasField("health")
    assert second.HasField("health")
    assert not idle.waits_on()


def test_health_waits_only_for_results_that_were_there_before_it(
    idle: ExchangePart, partition: Mock
) -> None:
    """S2, L4: a broker that reads slowly gets some results with each frame. It would go on sending
    what is refused until it has read of the reopening."""
    idle.take_results([1], [REFUSED])
    partition.health.openings = 2
    idle._events.health_changed = True
    idle._events.changed()

    frames = []
    for later in (2, 3, 4):
        frames.append(written(idle))
        idle.take_results([later], [REFUSED])

    assert [[each.request_id for each in frame.results] for frame in frames] == [[1], [], [2, 3]]
    assert [frame.HasField("health") for frame in frames] == [False, True, False]
    assert frames[1].health.openings == 2


def test_health_that_waits_follows_what_came_before_a_reopening(
    idle: ExchangePart, partition: Mock
) -> None:
    """S2: the partition is opened again while an earlier change of its health is not sent."""
    idle.take_results([1], [REFUSED])
    idle._events.health_changed = True
    idle._events.changed()
    first = written(idle)
    idle.take_results([2], [stored(0)])
    partition.health.openings = 2

    second, third = written(idle), written(idle)

    assert [[each.request_id for each in frame.results] for frame in (first, second)] == [[1], [2]]
    assert not second.HasField("health")
    assert third.health.openings == 2


def test_columns_that_are_full_leave_the_rest_to_the_long_form(
    idle: ExchangePart, load: ExchangeLoad
) -> None:
    """S3: a frame has a limit, also if the broker reads slowly."""
    half = HandedOut([hand_out(bytes(COLUMNS_BYTES_MAX // 2 - 1000))])
    for _ in range(3):
        idle._events.handed_out([half])
    idle.take_results([1], [stored(0)])

    assert COLUMNS_BYTES_MAX - 2000 < load.columns.bytes_approx <= COLUMNS_BYTES_MAX
    assert load.result_bytes > COLUMNS_BYTES_MAX // 2 - 1000
    response = PartitionResponse()
    idle.write_to(response, COLUMNS_BYTES_MAX, COLUMNS_BYTES_MAX)
    assert [each.request_id for each in response.results] == [0, 1]
    assert not load.result_bytes


def test_results_of_a_part_that_is_closed_are_dropped(
    idle: ExchangePart, partition: Mock, load: ExchangeLoad
) -> None:
    """S8: also those that come later, and none of them count as unsent."""
    idle.take_results([1, 2], [stored(0), REFUSED])
    idle.submit(asked_of(idle))
    (asked,) = partition.submit_frame.call_args.args
    idle.close()
    asked.answer([stored(1)])

    assert in_columns(load) == [1]
    assert not load.result_bytes
    assert not idle.unanswered


def test_a_request_that_was_cut_is_answered_in_its_order(
    idle: ExchangePart, load: ExchangeLoad
) -> None:
    """S2: a failure answers what has no result yet, and malformed operations come last."""
    asked = Asked(idle, [], [1, 2, 3], 4, 3, 10)
    asked.refuse(4, REFUSED)
    idle.submit(asked)

    asked.answer([stored(0)])
    assert idle.unanswered == 4
    asked.fail(REFUSED)
    asked.fail(REFUSED)

    assert asked.is_answered
    assert in_columns(load) == [1]
    assert [each.request_id for each in written(idle).results] == [2, 3, 4]
    assert (idle.unanswered, idle.unanswered_bytes) == (0, 0)
