"""A resync confirms ownership and never takes it (E7)."""

import pytest

from tests.rpc.broker.local_broker import payloads_of, run_of
from tests.rpc.exclusive.clients import ACTIVE, EVICTED, resync, subscribe
from tests.rpc.exclusive.conftest import QUEUE, ExclusiveBroker, NewClient


async def test_a_resync_by_the_owner_confirms(broker: ExclusiveBroker, client: NewClient) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("off_by", [-1, 1])
async def test_only_the_very_epoch_confirms(client: NewClient, off_by: int) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    ((state, _),) = await resync(ada, {QUEUE: epoch + off_by})

    assert state == EVICTED


async def test_a_resync_never_takes_what_nobody_owns(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E7."""
    ada = await client("ada")
    await broker.publish(run_of(QUEUE, b"1"))

    ((state, _),) = await resync(ada, {QUEUE: 0})

    assert state == EVICTED
    assert await ada.arrived(QUEUE) == []


async def test_a_reconnect_is_a_new_incarnation_that_goes_on_by_resync(
    broker: ExclusiveBroker,
) -> None:
    """E7: nothing is delivered before; afterwards the epoch is the same, and none was evicted."""
    first = await broker.session_client("ada")
    epoch = await subscribe(first, QUEUE)
    second = await broker.session_client("ada")
    assert second.session.welcome.session_id != first.session.welcome.session_id
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await first.receive()) == [b"1"]
    assert await second.arrived(QUEUE) == []

    assert await resync(second, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"2"))
    (delivery,) = await second.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"2"], epoch)
    assert await first.arrived(QUEUE) == []
    assert first.session.unsubscribed == []
    await first.leave()  # the end of the old incarnation is not that of the new
    await broker.publish(run_of(QUEUE, b"3"))
    assert sorted(payloads_of(await second.receive(2))) == [b"1", b"3"]
