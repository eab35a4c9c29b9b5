"""Dead letters of a swept broker: messages that consumers have rejected, in a dead-letter topic."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from tests.support.local_broker import TOPIC, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import DeadLetter
from tidemark.errors import QueueNotFound

DEAD: Final = "orders-dead"
ADA: Final = f"{TOPIC}/ada"
BOB: Final = f"{TOPIC}/bob"


async def broker_with_dead_letters(start: Callable[..., Awaitable[SweptBroker]]) -> SweptBroker:
    """Two messages of ada and one of bob are dead."""
    started = await start(partitions=2)
    await started.create_topic(DEAD)
    await started.create_topic(TOPIC, dead_letter_topic=DEAD)
    await die(started, ADA, b"a1", b"a2")
    await die(started, BOB, b"b1", why="other")
    await until_dead(started, 3)
    return started


async def die(swept: SweptBroker, lmq_name: str, *payloads: bytes, why: str = "why") -> None:
    await swept.publish(run_of(lmq_name, *payloads))
    delivery = await swept.pulled(lmq_name)
    await swept.settle(delivery.receipt, DeadLetter(reason=why))


async def until_dead(swept: SweptBroker, count: int) -> None:
    async def ask() -> bool:
        with suppress(QueueNotFound):  # none has arrived yet
            return (await swept.queue(DEAD)).messages == count
        return False

    await swept.passing(ask)
