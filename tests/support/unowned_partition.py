"""A partition whose broker is gone: then storage itself acts for the owner."""

import asyncio
from typing import Any

from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.storage.v1.action_pb2 import Action, ClearOutbox


async def publish(storage: RunningStorage, *operations: Any) -> None:
    """Through an exchange that is gone afterwards: then storage itself acts for the owner."""
    async with storage.exchange() as exchange:
        for outcome in await exchange.ask_all(*operations):
            assert not isinstance(outcome, Exception), outcome
    await undriven(storage)


async def undriven(storage: RunningStorage) -> None:
    """Wait until storage has noticed that the exchange is gone."""
    while True:
        try:
            await storage.delegate(Action(clear_outbox=ClearOutbox(sequence=1 << 60)))
        except errors.NotOwner:
            await asyncio.sleep(0)  # noqa: TID251 - only lets the server run
        else:
            return
