"""Owners: brokers of a partition (claims, epochs, what they hear) and clients of a queue."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.rpc.conftest import StartStorage
from tests.rpc.storage_client import (
    INCARNATION,
    ExchangeClient,
    RunningStorage,
    append,
    apply_topic,
    operation,
    payloads,
    reserve,
    settle,
)
from tidemark import errors
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING, SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.api.storage.v1.action_pb2 import Action, ClearOutbox
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    ApplyTopic,
    ConfirmOwnership,
    DropOwnership,
    ExchangeRequest,
    ExpireDue,
    Materialize,
    Operation,
    PlaceGroup,
    Purge,
    RemoveGroup,
    RemoveQueue,
    TakeOwnership,
    Unmaterialize,
    Unschedule,
)
from tidemark.api.storage.v1.storage_pb2 import ReportHeldReservationsRequest
from tidemark.clock import ManualClock
from tidemark.receipts import Receipt

# --- claims ---------------------------------------------------------------------------------------


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


# --- binding --------------------------------------------------------------------------------------


async def test_the_first_frame_must_bind(storage: RunningStorage) -> None:
    call = storage.storage.Exchange()
    await call.write(ExchangeRequest(operations=[append("jobs", b"x")]))

    with pytest.raises(errors.InvalidArgument, match="bind"):
        await call.read()


async def test_a_stream_that_ends_before_it_binds_is_refused(storage: RunningStorage) -> None:
    call = storage.storage.Exchange()
    await call.done_writing()

    with pytest.raises(errors.InvalidArgument, match="bind"):
        await call.read()


@pytest.mark.parametrize(
    ("partition", "broker_epoch", "reason"),
    [(0, 0, "FENCED"), (0, 1, "FENCED"), (0, 3, "FENCED"), (1, 2, "PARTITION_NOT_FOUND")],
)
async def test_a_bind_by_no_right_ends_the_stream(
    storage: RunningStorage, partition: int, broker_epoch: int, reason: str
) -> None:
    await storage.claim()
    await storage.claim()

    async with storage.bound(partition, broker_epoch) as exchange:
        assert (await exchange.ended).reason == reason


EVERY_OPERATION = [
    operation(materialize=Materialize(lmq_name="jobs")),
    operation(unmaterialize=Unmaterialize(lmq_name="jobs")),
    append("jobs", b"x"),
    reserve("jobs"),
    settle(Receipt(0, 1, 1, 0).encode()),
    settle(Receipt(0, 1, 1, 0).encode(), SETTLE_ACTION_EXTEND),
    operation(expire_due=ExpireDue()),
    operation(take_ownership=TakeOwnership(lmq_name="jobs", group="g", client_id="c")),
    operation(confirm_ownership=ConfirmOwnership(lmq_name="jobs", group="g")),
    operation(drop_ownership=DropOwnership(lmq_name="jobs", group="g")),
    operation(place_group=PlaceGroup(lmq_name="jobs", group="g")),
    operation(remove_group=RemoveGroup(lmq_name="jobs", group="g")),
    operation(remove_queue=RemoveQueue(lmq_name="jobs")),
    operation(purge=Purge(lmq_name="jobs")),
    operation(unschedule=Unschedule(lmq_name="jobs", schedule_id=1)),
    operation(action=Action(clear_outbox=ClearOutbox(sequence=1))),
    operation(apply_topic=ApplyTopic()),
]


@pytest.mark.parametrize(
    "asked", EVERY_OPERATION, ids=lambda each: f"{each.WhichOneof('kind')}-{each.ByteSize()}"
)
async def test_every_operation_is_fenced_after_a_newer_claim(
    storage: RunningStorage, exchange: ExchangeClient, asked: Operation
) -> None:
    await exchange.ask(append("jobs", b"x"))
    await storage.claim(broker_id="broker-b", broker_address="b:1")

    # The stream ends by itself; gRPC hides its status from a write that meets the end.
    with pytest.raises((errors.Fenced, errors.Unavailable)) as refused:
        await exchange.ask(asked)

    assert refused.value.metadata.get("owner", "b:1") == "b:1"
    assert (await storage.queue("jobs")).queue.next_offset == 1


async def test_frames_that_meet_a_newer_claim_are_stored_and_answered_or_fenced(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """Never stored after the claim is answered, never answered with success and not stored."""
    sent = [(await exchange.send(append("jobs", b"%d" % n)))[0] for n in range(50)]
    async with storage.exchange(broker_id="broker-b") as newer:
        boundary = (await newer.ask(append("jobs", b"newer"))).first_offset

        results = await asyncio.gather(*sent, return_exceptions=True)

        offsets = [
            each.append.first_offset
            for each in results
            if not isinstance(each, BaseException) and each.HasField("append")
        ]
        assert offsets == list(range(len(offsets)))
        assert len(offsets) <= boundary
        assert (await storage.queue("jobs")).queue.next_offset == boundary + 1


async def test_receipts_stay_good_when_another_broker_claims_the_partition(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """The epoch fences the sender, not the reservation."""
    await exchange.ask(append("jobs", b"x"))
    (got,) = (await exchange.ask(reserve("jobs"))).slices

    await storage.restart()

    async with storage.exchange(broker_id="broker-b") as other:
        assert (await other.ask(settle(got.receipt))).messages == 1


async def test_an_exchange_ends_when_its_broker_is_fenced_and_no_longer_drives(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await exchange.healths.get()

    await storage.claim(broker_id="broker-b")
    # Nothing waits here: the claim is answered after its commit, and with it the old stream ends.
    results = await storage.delegate(Action(clear_outbox=ClearOutbox(sequence=1)))

    assert len(results) == 1
    assert isinstance(await exchange.ended, errors.Fenced)


async def test_nobody_binds_without_a_claim(storage: RunningStorage) -> None:
    with pytest.raises(errors.Fenced):
        async with storage.bound(0, 0) as exchange:
            await exchange.ask(append("jobs", b"x"))


# --- the report after a claim ---------------------------------------------------------------------


async def test_what_the_same_incarnation_does_not_report_is_released_without_an_attempt(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """V8: their answers were lost with the link; the rest keeps running."""
    await exchange.ask_all(append("jobs/a", b"kept"), append("jobs/b", b"lost"))
    kept, lost = await exchange.ask_all(reserve("jobs/a"), reserve("jobs/b"))

    claimed = await storage.claim()
    released = await storage.report_held(claimed.broker_epoch, [kept.slices[0].reservation_id])

    assert claimed.report_required
    assert released == 1
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
    ids = [each.slices[0].reservation_id for each in held]
    epoch = (await storage.claim()).broker_epoch

    pages = [
        ReportHeldReservationsRequest(broker_epoch=epoch, reservation_ids=ids[:1]),
        ReportHeldReservationsRequest(reservation_ids=ids[1:3]),
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
    released = await storage.report_held(claimed.broker_epoch)

    assert (claimed.report_required, released) == (False, 0)
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
    assert await storage.report_held(epoch, range(10_000)) == 0

    with pytest.raises(errors.InvalidArgument):
        await storage.report_held(epoch, range(10_001))


# --- events ---------------------------------------------------------------------------------------


async def test_the_first_frame_tells_the_health_and_the_next_deadline(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    health = await exchange.healths.get()
    deadline = await exchange.deadlines.get()

    assert (health.state, list(health.faults)) == (PARTITION_STATE_SERVING, [])
    assert deadline is None


async def test_a_queue_is_announced_once_after_a_reserve_came_back_short(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask_all(append("jobs/full", b"1", b"2", b"3"), append("jobs/short", b"1"))
    await exchange.ask_all(reserve("jobs/full", 2), reserve("jobs/short", 2))

    await exchange.ask_all(append("jobs/full", b"4"), append("jobs/short", b"2"))
    await exchange.ask(append("jobs/short", b"3"))
    # One more that is short, so that anything announced in between would be seen before it.
    await exchange.ask_all(append("jobs/last", b"1"), reserve("jobs/last", 2))
    await exchange.ask(append("jobs/last", b"2"))

    assert await exchange.ready.get() == ("jobs/short", "default")
    assert await exchange.ready.get() == ("jobs/last", "default")


async def test_waiting_consumers_hear_of_an_expiry_after_it_is_committed(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V2."""
    await exchange.ask(append("jobs", b"x"))
    await exchange.ask(reserve("jobs", 2, visibility_ms=50))
    await clock.advance_ms(50)

    await exchange.ask(operation(expire_due=ExpireDue()))

    assert await exchange.ready.get() == ("jobs", "default")
    (got,) = (await exchange.ask(reserve("jobs"))).slices
    assert got.attempt_count == 1


async def test_an_earlier_deadline_is_told_at_once_and_a_later_one_when_the_earlier_has_come(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V1: to 10 ms, and never before something is due."""
    assert await exchange.deadlines.get() is None
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"))

    await exchange.ask(reserve("jobs/a", visibility_ms=5000))
    far = await exchange.deadlines.get()
    (near_slice,) = (await exchange.ask(reserve("jobs/b", visibility_ms=1000))).slices
    near = await exchange.deadlines.get()
    await exchange.ask(settle(near_slice.receipt))

    assert far is not None
    assert near is not None
    assert 5000 <= far <= 5010
    assert 1000 <= near <= 1010
    assert exchange.deadlines.empty()
    await clock.advance_ms(near)
    assert (await exchange.ask(operation(expire_due=ExpireDue()))).messages == 0
    assert await exchange.deadlines.get() == far - near
    await clock.advance_ms(far - near)
    assert (await exchange.ask(operation(expire_due=ExpireDue()))).messages == 1
    assert await exchange.deadlines.get() is None


async def test_reservations_keep_running_over_a_restart_and_those_that_ran_out_expire(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V1, V4."""
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"))
    short, long = await exchange.ask_all(
        reserve("jobs/a", visibility_ms=1000), reserve("jobs/b", visibility_ms=60_000)
    )
    await storage.stop()
    await clock.advance_ms(30_000)

    await storage.restart()

    async with storage.exchange() as after:
        assert await after.deadlines.get() == 0
        expired = await after.ask(operation(expire_due=ExpireDue()))
        assert list(expired.reservation_ids) == [short.slices[0].reservation_id]
        assert (await after.ask(settle(long.slices[0].receipt))).messages == 1


# --- exclusive queues -----------------------------------------------------------------------------


@pytest.fixture
async def exclusive(
    start_storage: StartStorage,
) -> AsyncIterator[tuple[RunningStorage, ExchangeClient]]:
    """A storage service with the exclusive topic `own`, and its exchange."""
    storage = await start_storage()
    await storage.create_topic("own", subscription=SUBSCRIPTION_KIND_EXCLUSIVE)
    async with storage.exchange() as exchange:
        yield storage, exchange


def take(client_id: str, lmq_name: str = "own/a", **fields: Any) -> Operation:
    taken = TakeOwnership(lmq_name=lmq_name, group="default", client_id=client_id, **fields)
    return operation(take_ownership=taken)


def confirm(client_id: str = "", epoch: int = 0) -> Operation:
    confirmed = ConfirmOwnership(
        lmq_name="own/a", group="default", client_id=client_id, epoch=epoch
    )
    return operation(confirm_ownership=confirmed)


def drop(client_id: str, epoch: int) -> Operation:
    dropped = DropOwnership(lmq_name="own/a", group="default", client_id=client_id, epoch=epoch)
    return operation(drop_ownership=dropped)


Exclusive = tuple[RunningStorage, ExchangeClient]


async def test_a_takeover_raises_the_epoch_and_revokes_what_the_old_owner_holds(
    exclusive: Exclusive,
) -> None:
    """E8, E9, V8: in one commit, without counting an attempt; stale settles are fenced."""
    _, exchange = exclusive
    old = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=old.epoch))).slices

    new = await exchange.ask(take("client-b"))
    stale = await exchange.ask_all(
        settle(held.receipt, owner_epoch=old.epoch),
        settle(held.receipt),
        settle(held.receipt, owner_epoch=new.epoch),
        settle(held.receipt, SETTLE_ACTION_NACK, owner_epoch=old.epoch),
        settle(held.receipt, SETTLE_ACTION_EXTEND, owner_epoch=old.epoch),
        reserve("own/a", owner_epoch=old.epoch),
        reserve("own/a"),
        operation(
            place_group=PlaceGroup(
                lmq_name="own/a",
                group="default",
                start=StartPosition(latest=True),
                owner_epoch=old.epoch,
            )
        ),
    )
    (got,) = (await exchange.ask(reserve("own/a", owner_epoch=new.epoch))).slices

    assert (new.matched, new.client_id, new.epoch > old.epoch) == (True, "client-b", True)
    assert list(new.revoked_reservation_ids) == [held.reservation_id]
    assert [each.reason for each in stale] == ["FENCED"] * len(stale)
    assert (held.owner_epoch, got.owner_epoch) == (old.epoch, new.epoch)
    assert (got.attempt_count, got.delivery_count) == (0, 2)
    assert (await exchange.ask(settle(got.receipt, owner_epoch=new.epoch))).messages == 1


async def test_nobody_is_served_from_an_exclusive_queue_without_owning_it(
    exclusive: Exclusive,
) -> None:
    """E1."""
    _, exchange = exclusive
    await exchange.ask(append("own/a", b"x"))

    with pytest.raises(errors.Fenced):
        await exchange.ask(reserve("own/a"))


async def test_taking_what_one_owns_changes_nothing(exclusive: Exclusive) -> None:
    """E7: and never evicts the owner itself."""
    _, exchange = exclusive
    first = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=first.epoch))).slices

    again = await exchange.ask(take("client-a"))

    assert (again.matched, again.epoch, list(again.revoked_reservation_ids)) == (
        False,
        first.epoch,
        [],
    )
    assert (await exchange.ask(settle(held.receipt, owner_epoch=first.epoch))).messages == 1


async def test_only_equality_with_what_is_stored_confirms(exclusive: Exclusive) -> None:
    """E7, E8: ownership is durable."""
    storage, exchange = exclusive
    taken = await exchange.ask(take("client-a"))
    await storage.restart()

    async with storage.exchange() as after:
        asked = [
            confirm("client-a", taken.epoch),
            confirm("client-a", taken.epoch + 1),
            confirm("client-b", taken.epoch),
            confirm(),
        ]
        answers = await after.ask_all(*asked)

    assert [each.matched for each in answers] == [True, False, False, False]
    assert {(each.client_id, each.epoch) for each in answers} == {("client-a", taken.epoch)}


async def test_ownership_is_given_up_only_by_who_has_it(exclusive: Exclusive) -> None:
    _, exchange = exclusive
    taken = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=taken.epoch))).slices

    not_mine = await exchange.ask(drop("client-b", taken.epoch))
    dropped = await exchange.ask(drop("client-a", taken.epoch))
    late, reserved = await exchange.ask_all(
        settle(held.receipt, owner_epoch=taken.epoch), reserve("own/a", owner_epoch=taken.epoch)
    )

    assert (not_mine.matched, not_mine.client_id) == (False, "client-a")
    assert (dropped.matched, dropped.client_id) == (True, "")
    assert list(dropped.revoked_reservation_ids) == [held.reservation_id]
    assert (late.reason, reserved.reason) == ("FENCED", "FENCED")


async def test_epochs_grow_over_deletion_and_restart(exclusive: Exclusive) -> None:
    """E10: whoever held the queue before it was deleted is fenced in the new one."""
    storage, exchange = exclusive
    before = await exchange.ask(take("client-a"))
    await exchange.ask(operation(remove_queue=RemoveQueue(lmq_name="own/a")))
    await storage.restart()

    async with storage.exchange() as after:
        again = await after.ask(take("client-b"))
        await after.ask(append("own/a", b"x"))
        (stale,) = await after.ask_all(reserve("own/a", owner_epoch=before.epoch))

    assert again.epoch > before.epoch
    assert isinstance(stale, errors.Fenced)


async def test_a_new_owner_may_begin_elsewhere_in_the_same_commit(exclusive: Exclusive) -> None:
    """R2: what no group waits for any more is dropped."""
    storage, exchange = exclusive
    await exchange.ask(append("own/a", b"old", b"new"))

    taken = await exchange.ask(take("client-a", start=StartPosition(last=1)))
    (got,) = (await exchange.ask(reserve("own/a", owner_epoch=taken.epoch))).slices

    assert payloads(got.body) == [b"new"]
    group = (await storage.queue("own/a")).groups[0]
    assert (group.owner_client_id, group.owner_epoch) == ("client-a", taken.epoch)


async def test_two_takeovers_in_one_frame_end_with_one_owner(exclusive: Exclusive) -> None:
    """E10."""
    _, exchange = exclusive

    first, second = await exchange.ask_all(take("client-a"), take("client-b"))

    assert second.epoch > first.epoch
    assert (await exchange.ask(confirm("client-b", second.epoch))).matched
    assert not (await exchange.ask(confirm("client-a", first.epoch))).matched


async def test_a_newer_version_of_a_topic_is_applied_and_an_older_one_ignored(
    start_storage: StartStorage,
) -> None:
    """The fan-out may repeat itself and arrive in any order."""
    storage = await start_storage(partitions=2)
    first = await storage.create_topic("jobs")
    second = await storage.update_topic("jobs", max_attempts=5)

    async with storage.exchange(partition=1) as exchange:
        versions = [
            await apply_topic(exchange, second),
            await apply_topic(exchange, first),
            await apply_topic(exchange, second, deleted=True),
        ]
        await exchange.ask(append("jobs", b"x", topic_version=second.version))
        second.version += 1
        deleted = await apply_topic(exchange, second, deleted=True)
        (refused,) = await exchange.ask_all(append("jobs", b"x"))

    assert versions == [second.version - 1] * 3
    assert deleted == second.version
    assert isinstance(refused, errors.TopicNotFound)
