"""What the owner of a queue holds, only the owner settles: a receipt alone is not enough (E8)."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import resync, subscribe
from tests.support.local_broker import in_time, payloads_of, reason_of, run_of
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Extend, Nack, Release
from tidemark.client.transport.codec import Action
from tidemark.errors import TidemarkError

SettleByOther: TypeAlias = Callable[[ExclusiveBroker, bytes, Action], Awaitable[str]]

ACTIONS: dict[str, Action] = {
    "ack": Ack(),
    "nack": Nack(),
    "dead letter": DeadLetter(reason="not mine"),
    "extend": Extend(visibility_ms=60_000),
    "release": Release(),
}


async def settle_by_session(broker: ExclusiveBroker, receipt: bytes, action: Action) -> str:
    """As a session of another client does it; "" for a success."""
    session = await broker.session("eve")
    try:
        await in_time(session.settle(receipt, action))
    except TidemarkError as error:
        return error.reason
    return ""


async def settle_by_call(broker: ExclusiveBroker, receipt: bytes, action: Action) -> str:
    """The same as a unary client."""
    return reason_of(await broker.settle(receipt, action, client_id="eve"))


@pytest.mark.parametrize("settle", [settle_by_session, settle_by_call], ids=["session", "call"])
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
async def test_another_client_that_has_the_receipt_settles_nothing(
    broker: ExclusiveBroker, action: Action, settle: SettleByOther
) -> None:
    """E8: it is fenced, and the owner, who does not notice, settles as usual."""
    ada = await broker.session_client("ada")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    assert await settle(broker, held.receipt, action) == "FENCED"

    assert await ada.settle(held, Ack()) == ""
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await ada.receive()) == [b"2"]


async def test_an_owner_without_a_session_is_protected_alike(broker: ExclusiveBroker) -> None:
    """E8."""
    ada = broker.unary_client("ada")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    assert await settle_by_call(broker, held.receipt, Ack()) == "FENCED"

    assert await ada.settle(held, Ack()) == ""


async def test_the_owner_settles_by_receipt_over_any_of_its_connections(
    broker: ExclusiveBroker,
) -> None:
    """E8, V6: a receipt outlives the session that brought it."""
    ada = await broker.session_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1", b"2"))
    (held,) = await ada.receive(2)
    again = await broker.session_client("ada")
    await resync(again, {QUEUE: epoch})

    await in_time(again.session.settle(held.receipt, Ack(), [(0, 1)]))

    assert reason_of(await broker.settle(held.receipt, Ack(), [(1, 2)], client_id="ada")) == ""


async def test_on_a_shared_topic_the_receipt_is_enough(broker: ExclusiveBroker) -> None:
    """V6: workers may hand receipts to each other."""
    await broker.publish(run_of("shared/a", b"1"))
    (held,) = await broker.pull("shared/a", client_id="ada")

    assert reason_of(await broker.settle(held.receipt, Ack(), client_id="eve")) == ""


async def test_what_an_owner_held_goes_back_when_it_disconnects(broker: ExclusiveBroker) -> None:
    """V6: the broker acts for itself, in the name of no client."""
    ada = await broker.session_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    await ada.receive()

    await ada.leave()

    again = await broker.session_client("ada")
    await resync(again, {QUEUE: epoch})
    assert payloads_of(await again.receive()) == [b"1"]
