"""Eviction markers are cleared by exactly three paths (E4, E6)."""

import pytest

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    NOT_SUBSCRIBED,
    REMOVE,
    REMOVE_ALL,
    RESYNC,
    RESYNC_REQUIRED,
    resync,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry
from tidemark.clock import ManualClock
from tidemark.errors import QuotaExceeded
from tidemark.rpc import from_status


async def test_subscribing_again_clears_the_marker_of_that_name_only(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E4."""
    ada, bob = await client("ada"), await client("bob")
    held = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}
    for name in held:
        await subscribe(bob, name)

    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of(await ada.receive()) == [b"1"]
    assert [notice.lmq_name for notice in await ada.report(held)] == [OTHER_QUEUE]


async def test_a_resync_forgets_what_it_does_not_report_and_keeps_what_it_does(
    broker: ExclusiveBroker,
) -> None:
    """E4, E7."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    held = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}
    taken = {name: await subscribe(bob, name) for name in held}
    await ada.until_told(2)

    assert await resync(ada, {QUEUE: held[QUEUE]}) == [(EVICTED, taken[QUEUE])]

    notices = await ada.until_told(3)
    assert (notices[-1].lmq_name, notices[-1].state) == (QUEUE, EVICTED)
    reader = broker.unary_client("ada")
    assert (await reader.pull(QUEUE)).subscription_state == EVICTED
    assert (await reader.pull(OTHER_QUEUE)).subscription_state == NOT_SUBSCRIBED


async def test_a_disconnect_clears_all_markers_of_the_client(broker: ExclusiveBroker) -> None:
    """E4."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    for name in (QUEUE, OTHER_QUEUE):
        await subscribe(ada, name)
        await subscribe(bob, name)
    await subscribe(ada, "shared/a")
    await broker.publish(run_of("shared/a", b"held"))
    await ada.receive()
    await subscribe(bob, "shared/a")

    await ada.leave()

    # What it held goes back after its markers went; another look would be another incarnation.
    assert payloads_of(await bob.receive()) == [b"held"]
    again = await broker.session_client("ada")
    notices = await again.report({QUEUE: 1, OTHER_QUEUE: 1})
    assert [notice.state for notice in notices] == [RESYNC_REQUIRED] * 2


async def test_a_timeout_clears_all_markers_of_the_client(start: Start, clock: ManualClock) -> None:
    """E4, E6: by the look at silent clients that there is anyway."""
    broker = await start(clock, client_timeout_ms=5_000)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == EVICTED

    for _ in range(7):
        await clock.advance_ms(1_000)
        await bob.report({})

    assert (await ada.pull(QUEUE)).subscription_state == NOT_SUBSCRIBED
    assert (await bob.pull(QUEUE)).subscription_state == ACTIVE


@pytest.mark.parametrize("path", ["heartbeat", "pull", "remove", "publish", "another group"])
async def test_nothing_else_clears_a_marker(broker: ExclusiveBroker, path: str) -> None:
    """E4: exactly three paths."""
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    held = {QUEUE: await subscribe(ada, QUEUE)}
    await subscribe(bob, QUEUE)

    match path:
        case "heartbeat":
            await ada.report(held)
            await ada.report({})
        case "pull":
            await ada.pull(QUEUE)
        case "remove":
            await ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))
        case "publish":
            await broker.publish(run_of(QUEUE, b"1"), client_id="ada")
        case _:
            await subscribe(broker.unary_client("ada", "another"), QUEUE)
            await broker.unary_client("ada", "another").sync(REMOVE_ALL)

    assert (await ada.pull(QUEUE)).subscription_state == EVICTED


async def test_a_client_at_the_bound_of_its_markers_gets_no_further_queues_to_lose(
    broker: ExclusiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4, E6: resyncs in ever other groups cost no more and no more, and no marker goes for it."""
    monkeypatch.setattr("broker_svc.exclusive.markers.MARKERS_PER_CLIENT_MAX", 2)
    first, second, third = (broker.unary_client("ada", f"group-{number}") for number in range(3))
    for each in (first, second):
        await resync(each, {QUEUE: 1})

    (reported,) = await third.sync(RESYNC, SubscriptionEntry(lmq_name=QUEUE, epoch=1))
    with pytest.raises(QuotaExceeded) as refused:
        await subscribe(third, OTHER_QUEUE)

    assert from_status(reported.error).reason == "QUOTA_EXCEEDED"
    assert refused.value.metadata["quota"] == "markers"
    states = [(await each.pull(QUEUE)).subscription_state for each in (first, second, third)]
    assert states == [EVICTED, EVICTED, RESYNC_REQUIRED]
    await subscribe(second, QUEUE)  # what is marked may be taken back, and makes room
    await subscribe(third, OTHER_QUEUE)
