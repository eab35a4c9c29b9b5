"""Owners of exclusive queues: taken, confirmed and given up, each by its epoch (E7 to E10)."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    settle,
)
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_DEAD_LETTER,
    SETTLE_ACTION_DISCONNECT,
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    SETTLE_ACTION_RELEASE,
    ConfirmOwnership,
    DropOwnership,
    Operation,
    PlaceGroup,
    RemoveQueue,
    SettleAction,
    TakeOwnership,
)

Exclusive = tuple[RunningStorage, ExchangeClient]


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
        settle(held.receipt, owner_epoch=old.epoch, client_id="client-a"),
        settle(held.receipt, client_id="client-a"),
        settle(held.receipt, owner_epoch=new.epoch, client_id="client-b"),
        settle(held.receipt, SETTLE_ACTION_NACK, owner_epoch=old.epoch, client_id="client-a"),
        settle(held.receipt, SETTLE_ACTION_EXTEND, owner_epoch=old.epoch, client_id="client-a"),
        settle(held.receipt, SETTLE_ACTION_DISCONNECT, owner_epoch=old.epoch),
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
    settled = settle(got.receipt, owner_epoch=new.epoch, client_id="client-b")
    assert (await exchange.ask(settled)).messages == 1


ACTIONS = {
    "ack": SETTLE_ACTION_ACK,
    "nack": SETTLE_ACTION_NACK,
    "dead-letter": SETTLE_ACTION_DEAD_LETTER,
    "extend": SETTLE_ACTION_EXTEND,
    "release": SETTLE_ACTION_RELEASE,
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
async def test_a_settlement_by_a_client_that_is_not_the_owner_is_fenced(
    exclusive: Exclusive, action: SettleAction.ValueType
) -> None:
    """E8: also with the receipt and the epoch of the owner, and it changes nothing."""
    _, exchange = exclusive
    owner = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=owner.epoch))).slices

    (refused,) = await exchange.ask_all(
        settle(held.receipt, action, owner_epoch=owner.epoch, client_id="client-b")
    )

    assert isinstance(refused, errors.Fenced)
    assert refused.metadata["epoch"] == str(owner.epoch)
    settled = settle(held.receipt, action, owner_epoch=owner.epoch, client_id="client-a")
    assert (await exchange.ask(settled)).messages == 1


@pytest.mark.parametrize("action", [SETTLE_ACTION_RELEASE, SETTLE_ACTION_DISCONNECT])
async def test_the_broker_itself_gives_back_what_an_owner_holds(
    exclusive: Exclusive, action: SettleAction.ValueType
) -> None:
    """V6: the owner is gone, or never got it."""
    _, exchange = exclusive
    owner = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=owner.epoch))).slices

    gave_back = await exchange.ask(settle(held.receipt, action, owner_epoch=owner.epoch))

    assert gave_back.messages == 1


@pytest.mark.parametrize("action", [SETTLE_ACTION_ACK, SETTLE_ACTION_EXTEND])
async def test_a_settlement_in_the_name_of_no_client_is_fenced(
    exclusive: Exclusive, action: SettleAction.ValueType
) -> None:
    """E8."""
    _, exchange = exclusive
    owner = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=owner.epoch))).slices

    (refused,) = await exchange.ask_all(settle(held.receipt, action, owner_epoch=owner.epoch))

    assert isinstance(refused, errors.Fenced)


async def test_an_exclusive_queue_serves_no_client_that_does_not_own_it(
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

    again = await exchange.ask(take("client-a", epoch=first.epoch))

    assert (again.matched, again.epoch, list(again.revoked_reservation_ids)) == (
        False,
        first.epoch,
        [],
    )
    settled = settle(held.receipt, owner_epoch=first.epoch, client_id="client-a")
    assert (await exchange.ask(settled)).messages == 1


async def test_taking_what_another_process_of_the_client_owns_fences_that_process(
    exclusive: Exclusive,
) -> None:
    """E7, E8: it does not present the epoch, so it is another incarnation."""
    _, exchange = exclusive
    first = await exchange.ask(take("client-a"))
    await exchange.ask(append("own/a", b"x"))
    (held,) = (await exchange.ask(reserve("own/a", owner_epoch=first.epoch))).slices

    second = await exchange.ask(take("client-a"))

    assert (second.matched, second.client_id) == (True, "client-a")
    assert second.epoch > first.epoch
    assert list(second.revoked_reservation_ids) == [held.reservation_id]
    with pytest.raises(errors.Fenced):
        await exchange.ask(settle(held.receipt, owner_epoch=first.epoch, client_id="client-a"))


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
        settle(held.receipt, owner_epoch=taken.epoch, client_id="client-a"),
        reserve("own/a", owner_epoch=taken.epoch),
    )

    assert (not_mine.matched, not_mine.client_id) == (False, "client-a")
    assert (dropped.matched, dropped.client_id) == (True, "")
    assert list(dropped.revoked_reservation_ids) == [held.reservation_id]
    assert (late.reason, reserved.reason) == ("FENCED", "FENCED")


async def test_epochs_grow_over_deletion_and_restart(exclusive: Exclusive) -> None:
    """E10: the owner from before the deletion is fenced in the new queue."""
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


async def test_who_asks_and_is_refused_does_not_keep_the_news_from_the_owner(
    exclusive: Exclusive,
) -> None:
    """E9: a client that was fenced asks in the commit that has something, and gets nothing."""
    _, exchange = exclusive
    owner = await exchange.ask(take("bob"))
    assert not (await exchange.ask(reserve("own/a", owner_epoch=owner.epoch))).slices

    _, refused = await exchange.ask_all(
        append("own/a", b"1"), reserve("own/a", owner_epoch=owner.epoch + 1)
    )

    assert isinstance(refused, errors.Fenced)
    assert await exchange.ready.get() == ("own/a", "default")
