"""Binding an exchange to a partition, and what fences it when a newer broker claims."""

import asyncio

import pytest

from tests.support.exchange_client import ExchangeClient, append, operation, reserve, settle
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.storage.v1.action_pb2 import Action, ClearOutbox
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_EXTEND,
    ApplyTopic,
    ConfirmOwnership,
    DropOwnership,
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
from tidemark.receipts import Receipt


async def test_operations_for_a_partition_that_is_not_bound_are_answered_by_its_end(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: also under another epoch than the one it is bound under; what is bound goes on."""
    other_epoch = exchange.broker_epoch + 1
    async with storage.stream() as stream:
        for part in (
            ExchangeClient(stream, 1, 1),
            ExchangeClient(exchange.stream, 0, other_epoch),
        ):
            part.stream.watch(part)
            with pytest.raises(errors.InvalidArgument, match="not bound"):
                await part.ask(append("jobs", b"x"))

    assert (await exchange.ask(append("jobs", b"x"))).first_offset == 0


async def test_a_stream_that_binds_nothing_ends_without_an_error(storage: RunningStorage) -> None:
    call = storage.storage.Exchange()
    await call.done_writing()

    assert [frame async for frame in call] == []


@pytest.mark.parametrize(
    ("partition", "broker_epoch", "reason"),
    [(0, 0, "FENCED"), (0, 1, "FENCED"), (0, 3, "FENCED"), (1, 2, "PARTITION_NOT_FOUND")],
)
async def test_a_bind_by_no_right_is_refused(
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


async def test_no_broker_binds_without_a_claim(storage: RunningStorage) -> None:
    with pytest.raises(errors.Fenced):
        async with storage.bound(0, 0) as exchange:
            await exchange.ask(append("jobs", b"x"))
