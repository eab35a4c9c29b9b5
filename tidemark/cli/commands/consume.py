"""`tidemark consume`: prints messages of a queue, and takes them if asked to.

With --ack, messages are printed and flushed before they are acknowledged; those that were not
acknowledged are released when the command ends. Without it the command only looks: it reserves
nothing, makes no group and takes no queue (K5).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit, QueueName, duration_ms

if TYPE_CHECKING:
    from tidemark.api.broker.v1.broker_pb2 import PullResponse
    from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, Release
    from tidemark.client.admin.admin import Admin
    from tidemark.client.admin.values import StoredMessage
    from tidemark.client.transport.unary import UnaryClient

_PER_PULL: Final = 1000
_FOLLOW_WAIT_MS: Final = 20_000
_LOOK_AGAIN_MS: Final = 200


@command()
async def consume(
    call: Call,
    queue: QueueName,
    group: Annotated[str, typer.Option(metavar="NAME", help="Consumer group.")] = "default",
    ack: Annotated[
        bool, typer.Option("--ack", help="Take messages: acknowledge them after printing.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep consuming as messages arrive; requires --ack."),
    ] = False,
    limit: Limit = 0,
    wait: Annotated[
        int,
        typer.Option(
            parser=duration_ms, metavar="DURATION", help="How long to wait for the first message."
        ),
    ] = 0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over an exclusive queue from its owner.")
    ] = False,
    client_id: Annotated[
        str | None, typer.Option(metavar="ID", show_default="generated", help="Client id.")
    ] = None,
) -> None:
    """Print messages of a queue, one per line; with --json, with all their fields.

    Without --follow it ends when the queue is empty. Without --ack it only looks: it shows
    messages that the group has not settled, by offset, and changes nothing. With --json, it prints
    null for fields that only a delivery has.
    """
    import secrets

    from tidemark.api.broker.v1.message_pb2 import Ack
    from tidemark.client.transport.unary import UnaryClient
    from tidemark.limits import PULL_WAIT_MS_MAX

    for option, chosen in (("--follow", follow), ("--take-over", take_over)):
        if chosen and not ack:
            raise typer.BadParameter(f"{option} requires --ack: without it nothing is taken")
    if wait > PULL_WAIT_MS_MAX:
        raise typer.BadParameter(f"--wait must be at most {units.duration(PULL_WAIT_MS_MAX)}")
    if not ack:
        await _look(call, queue, group, limit, wait)
        return
    client = UnaryClient(
        call.open(call.address),
        client_id or f"tidemark-consume-{secrets.token_hex(4)}",
        timeout_ms=call.timeout_ms,
    )
    wait_ms = max(wait, _FOLLOW_WAIT_MS) if follow else wait
    if take_over:
        await client.subscribe(queue, group)
    held: list[Delivery] = []
    try:
        shown = 0
        while not limit or shown < limit:
            most = min(_PER_PULL, limit - shown) if limit else _PER_PULL
            pulled = await client.pull(queue, group, max_messages=most, wait_ms=wait_ms)
            _check_served(queue, pulled)
            held += pulled.deliveries
            for delivery in pulled.deliveries:
                for message in _received(delivery):
                    _print(call, message)
                    shown += 1
            if held:
                sys.stdout.flush()
                await _settle(client, held, Ack())
                held.clear()
            if follow:
                continue
            if not pulled.deliveries:
                break
            wait_ms = 0
    finally:
        await _leave(client, queue, group, held, subscribed=take_over)


@dataclass(frozen=True, slots=True)
class Received:
    """One message, as `--json` shows it."""

    lmq_name: str
    offset: int
    payload: bytes
    headers: Mapping[str, str]
    fairness_key: str
    attempt_count: int | None
    delivery_count: int | None
    publish_time_ms: int
    epoch: int | None
    partition: int


async def _look(call: Call, queue: str, group: str, limit: int, wait_ms: int) -> None:
    """Print messages that the group has not settled, once there are any or the wait is over."""
    from tidemark.clock import SystemClock

    clock = SystemClock()
    admin = call.admin
    deadline_ms = clock.monotonic_ms() + wait_ms
    while not await _print_stored(call, admin, queue, group, limit):
        left_ms = deadline_ms - clock.monotonic_ms()
        if left_ms <= 0:
            return
        await clock.sleep_ms(min(_LOOK_AGAIN_MS, left_ms))


async def _print_stored(call: Call, admin: "Admin", queue: str, group: str, limit: int) -> int:
    """Print the messages that are there; returns how many."""
    from tidemark.errors import GroupNotFound, QueueNotFound

    shown = 0
    try:
        async for message in admin.peek_all(queue, group=group):
            _print(call, _seen(queue, message))
            shown += 1
            if shown == limit:
                break
    except QueueNotFound:
        return 0  # a queue begins with its first message
    except GroupNotFound:
        if group == "":
            raise
        return await _print_stored(call, admin, queue, "", limit)  # it has settled nothing yet
    return shown


def _seen(queue: str, message: "StoredMessage") -> Received:
    return Received(
        lmq_name=queue,
        offset=message.offset,
        payload=message.payload,
        headers=message.headers,
        fairness_key=message.fairness_key,
        attempt_count=None,
        delivery_count=None,
        publish_time_ms=message.publish_time_ms,
        epoch=None,
        partition=message.partition,
    )


def _received(delivery: "Delivery") -> Iterator[Received]:
    for offset, message in enumerate(delivery.batch.messages, delivery.first_offset):
        yield Received(
            lmq_name=delivery.lmq_name,
            offset=offset,
            payload=message.payload,
            headers=dict(message.headers),
            fairness_key=delivery.fairness_key,
            attempt_count=delivery.attempt_count,
            delivery_count=delivery.delivery_count,
            publish_time_ms=delivery.publish_time_ms,
            epoch=delivery.epoch,
            partition=delivery.partition,
        )


def _check_served(queue: str, pulled: "PullResponse") -> None:
    """Raise NotSubscribed if an empty answer means that another client owns the queue."""
    from tidemark.api.broker.v1 import subscription_pb2
    from tidemark.errors import NotSubscribed
    from tidemark.rpc.enums import word_of

    served = (
        subscription_pb2.SUBSCRIPTION_STATE_UNSPECIFIED,  # a shared topic
        subscription_pb2.SUBSCRIPTION_STATE_ACTIVE,
        subscription_pb2.SUBSCRIPTION_STATE_TRANSFERRING,  # to this client
    )
    state = pulled.subscription_state
    if not pulled.deliveries and state not in served:
        word = word_of(subscription_pb2.SubscriptionState, state, "SUBSCRIPTION_STATE_")
        raise NotSubscribed(f"queue {queue} is exclusive, and this client is {word}")


async def _settle(
    client: "UnaryClient", deliveries: Sequence["Delivery"], action: "Ack | Release"
) -> None:
    from tidemark.client.transport.codec import settlement_of

    await client.settle(
        [
            settlement_of(each.receipt, action, request_id=number)
            for number, each in enumerate(deliveries, 1)
        ]
    )


def _print(call: Call, message: Received) -> None:
    if call.out.as_json:
        call.out.json_line(message)
    elif call.out.on_terminal:
        from tidemark.cli.display.texts import payload_line

        call.out.print(payload_line(message.payload))
    else:  # a pipe gets the payload unchanged
        sys.stdout.buffer.write(message.payload + b"\n")


async def _leave(
    client: "UnaryClient", queue: str, group: str, held: list["Delivery"], *, subscribed: bool
) -> None:
    """Release the deliveries, also after Ctrl-C; if that fails, the reservations expire."""
    from contextlib import suppress

    from tidemark.api.broker.v1.message_pb2 import Release
    from tidemark.errors import TidemarkError

    with suppress(TidemarkError):
        if held:
            await _settle(client, held, Release())
    with suppress(TidemarkError):
        if subscribed:
            await client.unsubscribe(queue, group)
