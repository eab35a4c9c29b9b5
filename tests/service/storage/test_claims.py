"""Claims of a partition by its brokers, and the report of what they hold after one."""

from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import INCARNATION, RunningStorage
from tests.support.unowned_partition import undriven
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING
from tidemark.api.storage.v1.exchange_pb2 import RemoveQueue
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_EXPIRED_RESERVATIONS,
    ReportHeldReservationsRequest,
)
from tidemark.clock import ManualClock
from tidemark.receipts import Receipt


@pytest.mark.rocksdb(reason="its epochs begin at 1")
async def test_every_claim_raises_the_epoch_also_over_restarts(storage: RunningStorage) -> None:
    first = await storage.claim()
    second = await storage.claim(broker_id="broker-b")
    await storage.restart()
    kept = await storage.info()
    third = await storage.claim(broker_id="broker-b")

    epochs = [each.broker_epoch for each in (first, second, third)]
    assert epochs == [1, 2, 3]
    assert (kept.broker_id, kept.broker_epoch) == ("broker-b", 2)
    assert [each.report_required for each in (first, second, third)] == [False, False, True]
    assert first.health.state == PARTITION_STATE_SERVING


@pytest.mark.rocksdb(reason="its epochs begin at 1")
async def test_a_claim_by_an_older_assignment_is_fenced_and_changes_nothing(
    storage: RunningStorage,
) -> None:
    await storage.claim(broker_id="broker-b", broker_address="b:1", assignment_version=5)

    with pytest.raises(errors.Fenced) as refused:
        await storage.claim(assignment_version=4)

    assert refused.value.metadata["owner"] == "b:1"
    assert (await storage.info()).broker_epoch == 1
    assert (await storage.claim(assignment_version=5)).broker_epoch == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cluster_id": "cluster-b"}, "CLUSTER_MISMATCH"),
        ({"broker_id": ""}, "INVALID_ARGUMENT"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
    ],
)
async def test_a_claim_of_something_else_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(errors.TidemarkError) as refused:
        await storage.claim(**fields)

    assert refused.value.reason == reason


# --- the report after a claim ---------------------------------------------------------------------


async def test_what_the_same_incarnation_does_not_report_is_released_without_an_attempt(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """V8: their answers were lost with the link; the rest keeps running."""
    await exchange.ask_all(append("jobs/a", b"kept"), append("jobs/b", b"lost"))
    kept, lost = await exchange.ask_all(reserve("jobs/a"), reserve("jobs/b"))

    claimed = await storage.claim()
    reported = await storage.report_held(claimed.broker_epoch, [kept.slices[0].receipt])

    assert claimed.report_required
    assert (reported.released, list(reported.gone_reservation_ids)) == (1, [])
    async with storage.bound(0, claimed.broker_epoch) as again:
        (back,) = (await again.ask(reserve("jobs/b"))).slices
        assert (back.attempt_count, back.delivery_count) == (0, 2)
        assert not (await again.ask(reserve("jobs/a"))).slices
        assert (await again.ask(settle(kept.slices[0].receipt))).messages == 1
    assert len(lost.slices) == 1


async def test_a_report_may_come_in_pages(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.ask_all(*(append(f"jobs/{n}", b"x") for n in range(4)))
    held = await exchange.ask_all(*(reserve(f"jobs/{n}") for n in range(4)))
    receipts = [each.slices[0].receipt for each in held]
    epoch = (await storage.claim()).broker_epoch

    pages = [
        ReportHeldReservationsRequest(broker_epoch=epoch, receipts=receipts[:1]),
        ReportHeldReservationsRequest(receipts=receipts[1:3]),
    ]
    answer = await storage.storage.ReportHeldReservations(iter(pages))

    assert answer.released == 1


async def test_reservations_of_another_incarnation_are_not_released_by_a_report(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """V8: a restart of the broker counts no attempt and takes nothing away."""
    await exchange.ask(append("jobs", b"x"))
    (got,) = (await exchange.ask(reserve("jobs"))).slices

    claimed = await storage.claim(incarnation=INCARNATION + 1)
    reported = await storage.report_held(claimed.broker_epoch)

    assert (claimed.report_required, reported.released) == (False, 0)
    async with storage.bound(0, claimed.broker_epoch) as again:
        assert (await again.ask(settle(got.receipt))).messages == 1


async def test_a_report_is_refused_from_the_fenced_and_for_partitions_elsewhere(
    storage: RunningStorage,
) -> None:
    first = await storage.claim()
    await storage.claim()

    with pytest.raises(errors.Fenced):
        await storage.report_held(first.broker_epoch)
    with pytest.raises(errors.PartitionNotFound):
        await storage.report_held(1, partition=9)
    with pytest.raises(errors.InvalidArgument):
        await storage.storage.ReportHeldReservations(iter([]))


async def test_a_page_of_a_report_is_bounded(storage: RunningStorage) -> None:
    """S3."""
    epoch = (await storage.claim()).broker_epoch
    receipts = [Receipt(0, 1, number).encode() for number in range(10_001)]
    assert (await storage.report_held(epoch, receipts[1:])).released == 0

    with pytest.raises(errors.InvalidArgument):
        await storage.report_held(epoch, receipts)
    with pytest.raises(errors.InvalidArgument):
        await storage.report_held(epoch, [b"not a receipt"])


async def test_the_answer_to_a_report_names_what_can_no_longer_be_settled(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6: what expired while the link was down; a settlement whose answer was lost is repeated."""
    names = [f"jobs/{name}" for name in ("expired", "settled", "running", "removed")]
    await exchange.ask_all(*(append(name, b"x") for name in names))
    held = [await reserved(exchange, name, visibility_ms=60_000) for name in names[1:]]
    held.insert(0, await reserved(exchange, names[0], visibility_ms=500))
    await exchange.ask_all(
        settle(held[1].receipt), operation(remove_queue=RemoveQueue(lmq_name=names[3]))
    )
    await exchange.stream.close()
    await undriven(storage)
    await clock.advance_ms(500)
    await storage.delegate(*await storage.due(SCAN_KIND_EXPIRED_RESERVATIONS))

    epoch = (await storage.claim()).broker_epoch
    reported = await storage.report_held(epoch, [each.receipt for each in held])

    gone = [held[0].reservation_id, held[3].reservation_id]
    assert sorted(reported.gone_reservation_ids) == sorted(gone)
    async with storage.bound(0, epoch) as again:
        assert (await again.ask(settle(held[1].receipt))).messages == 0
        assert (await again.ask(settle(held[2].receipt))).messages == 1
