"""Wrong results of operations: every caller gets one answer, and nothing is made up."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from broker_svc.consume.acks import Acks
from broker_svc.consume.deliveries import Deliveries, DeliveryDirectory, HeldDelivery
from broker_svc.consume.renewals import Renewals
from broker_svc.idle.tracking import TrackedQueue
from broker_svc.links.unanswered_operations import OUTCOMES
from broker_svc.publish.run_arrays import RunArrays
from tests.unit.broker_svc.test_storage_node_link import EPOCH, Node, node, purged, small
from tidemark.api.broker.v1 import broker_pb2, message_pb2
from tidemark.api.storage.v1.exchange_pb2 import (
    AckReservationsResult,
    AppendResult,
    AppendRunsResult,
    ExchangeResponse,
    Operation,
    OperationResult,
    PartitionResponse,
    RefusedReservation,
    RefusedRun,
    RenewReservationsResult,
    RepeatedRun,
    ReserveResult,
    ResultColumns,
    SettleReservationResult,
)
from tidemark.bodies import body_of
from tidemark.clock import ManualClock
from tidemark.errors import TidemarkError, Unavailable
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import Tally
from tidemark.topics import Topic

__all__ = ["node"]

LONG, RUNS, ACKS, RENEWAL = 1, 2, 3, 4
"""Request ids of what is under way."""


class Asked:
    """A long operation, one with two runs, one with two acks and one that renews both deliveries,
    and their answers."""

    def __init__(self, node: Node) -> None:
        self.link = node.links[0]
        self.link.serving = True
        self.answers: dict[int, list[object]] = {each: [] for each in (LONG, RUNS, ACKS, RENEWAL)}
        self.published_messages = Tally()
        self.queue = TrackedQueue(0, "orders/a", 1000, 0)
        directory = DeliveryDirectory()
        self.deliveries = Deliveries(directory)
        links = {0: self.link}

        self.link.ask(small(), self._answered)
        topics, cache = Mock(), Mock(opening=())
        topics.known.return_value = Topic("orders", version=3)
        cache.find.return_value = Mock(partitions=(0,), publisher_id=1)
        cache.find.return_value.lease.failed = False
        path = Mock(published=self.published_messages)
        runs = [("orders/a", body_of([b"x"]), (number, 1, 0, 0)) for number in (1, 2)]
        RunArrays(path, links, topics, Mock()).submit(runs, cache, "till", self, 10, 0)
        held = [HeldDelivery(each, b"r", self.queue, 1, 1, 0) for each in (1, 2)]
        acks = broker_pb2.Acks(delivery_tags=[self.deliveries.add(each) for each in held])
        Acks(links, Tally("action")).submit(acks, "till", self.deliveries, self._acked)
        renewal = broker_pb2.Renewal(delivery_tags=acks.delivery_tags)
        renewals = Renewals(links, directory, ManualClock())
        renewals.submit(renewal, "till", self.deliveries, self._renewed)

    def _answered(self, result: OperationResult | TidemarkError) -> None:
        self.answers[LONG].append(result.reason if isinstance(result, TidemarkError) else "done")

    def _acked(self, result: broker_pb2.AcksResult) -> None:
        refused = [from_status(each.error).reason for each in result.refused]
        self.answers[ACKS] += refused or ["done"] * 2

    def _renewed(self, result: broker_pb2.RenewalResult) -> None:
        refused = [from_status(each.error).reason for each in result.refused]
        self.answers[RENEWAL] += refused or ["done"] * 2

    def published(self, result: message_pb2.PublishResult, size: int) -> None:
        self.answers[RUNS].append(from_status(result.error).reason)

    def stored(self, runs: Sequence[object], *_: object) -> None:
        self.answers[RUNS] += ["done"] * len(runs)


def in_columns(request_id: int, runs: int, acks: int) -> ExchangeResponse:
    columns = ResultColumns(
        partitions=[0, EPOCH, 4, 1, 0],
        results=[request_id, runs, acks],
        runs=[7, 8] * runs,
        messages=[1] * acks,
    )
    return ExchangeResponse(columns=columns)


def in_long_form(result: OperationResult) -> ExchangeResponse:
    part = PartitionResponse(partition=0, broker_epoch=EPOCH, commit=4, results=[result])
    return ExchangeResponse(parts=[part])


def of_runs(places: int, *refused: int, repeated: Sequence[int] = ()) -> ExchangeResponse:
    appends = AppendRunsResult(queue_ids=[7] * places, first_offsets=[8] * places)
    appends.refused.extend([RefusedRun(index=each) for each in refused])
    appends.repeated_runs.extend([RepeatedRun(index=each) for each in repeated])
    return in_long_form(OperationResult(request_id=RUNS, appends=appends))


def of_acks(messages: int, *refused: int) -> ExchangeResponse:
    acks = AckReservationsResult(messages=[1] * messages)
    acks.refused.extend([RefusedReservation(index=each) for each in refused])
    return in_long_form(OperationResult(request_id=ACKS, acks=acks))


def of_renewal(*refused: int) -> ExchangeResponse:
    renew = RenewReservationsResult()
    renew.refused.extend([RefusedReservation(index=each) for each in refused])
    return in_long_form(OperationResult(request_id=RENEWAL, renew=renew))


@pytest.mark.parametrize(
    "response",
    [
        *(in_columns(LONG, runs, acks) for runs, acks in [(1, 0), (0, 1), (0, 0)]),
        *(in_columns(RUNS, runs, acks) for runs, acks in [(1, 0), (3, 0), (0, 2), (0, 0)]),
        *(in_columns(ACKS, runs, acks) for runs, acks in [(0, 1), (0, 3), (2, 0), (0, 0)]),
        *(of_runs(places, *refused) for places in (0, 1, 3) for refused in ((), (0,))),
        *(of_acks(messages, *refused) for messages in (0, 1, 3) for refused in ((), (0,))),
        *(of_runs(2, *refused) for refused in ((2,), (0, 2), (1, 1), (2**32 - 1,))),
        *(of_acks(2, *refused) for refused in ((2,), (0, 2), (1, 1), (2**32 - 1,))),
        *(of_renewal(*refused) for refused in ((2,), (0, 2), (1, 1), (2**32 - 1,))),
        *(of_runs(2, *refused, repeated=(1,)) for refused in ((1,), (2,))),
        *(of_runs(2, repeated=repeated) for repeated in ((2,), (0, 0))),
        *(in_long_form(OperationResult(request_id=each)) for each in (LONG, RUNS, ACKS, RENEWAL)),
        in_long_form(OperationResult(request_id=LONG, reserve=ReserveResult())),
        in_long_form(OperationResult(request_id=RUNS, append=AppendResult())),
        in_long_form(OperationResult(request_id=ACKS, settle=SettleReservationResult())),
    ],
)
async def test_a_wrong_result_breaks_the_link_of_its_partition(
    node: Node, response: ExchangeResponse
) -> None:
    """S2, L1: what is under way gets UNAVAILABLE once, and the client still holds its messages."""
    node.connect()
    asked = Asked(node)
    node.frame()

    node.link._take_frame(response)
    ended = dict(node.ended)
    asked.link._drop_callers()

    assert ended == {0: Unavailable.reason}
    assert asked.answers == {
        LONG: ["UNAVAILABLE"],
        RUNS: ["UNAVAILABLE"] * 2,
        ACKS: ["UNAVAILABLE"] * 2,
        RENEWAL: ["UNAVAILABLE"] * 2,
    }
    assert asked.queue.pending_settlements == 0
    assert len(asked.deliveries) == 2
    assert not list(asked.published_messages.read())


async def test_results_of_other_partitions_are_taken_beside_a_wrong_one(node: Node) -> None:
    """L1."""
    node.connect()
    asked = Asked(node)
    answers: list[object] = []
    node.links[1].ask(small(), answers.append)
    while node.has_frame():
        node.frame()

    response = in_columns(RUNS, 1, 0)
    response.parts.add(partition=1, broker_epoch=EPOCH, results=[purged(1)])
    node.link._take_frame(response)

    assert node.ended == {0: Unavailable.reason}
    assert asked.answers[RUNS] == ["UNAVAILABLE"] * 2
    assert answers == [purged(1)]


def test_each_kind_of_operation_has_its_outcome() -> None:
    """A new one without would break the link with its first answer."""
    kinds = [each.name for each in Operation.DESCRIPTOR.oneofs_by_name["kind"].fields]
    outcomes = [each.name for each in OperationResult.DESCRIPTOR.oneofs_by_name["outcome"].fields]

    assert {OUTCOMES.get(kind, kind) for kind in kinds} <= set(outcomes)
