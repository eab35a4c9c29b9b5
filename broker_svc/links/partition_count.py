"""The number of partitions of the cluster, which a broker without a setting asks storage for."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tidemark.api.storage.v1.storage_pb2 import DescribeStorageRequest
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.rpc.channel_pool import ChannelPool

ANSWER_MS_MAX: Final = 5_000
ASK_AGAIN_MS_MIN: Final = 50
ASK_AGAIN_MS_MAX: Final = 1_000

_log = logging.getLogger(__name__)


async def ask_partitions(addresses: Sequence[str], cluster_id: str, clock: Clock) -> int:
    """The number that the first storage node of this cluster answers; waits until one does."""
    async with ChannelPool() as channels:
        asking = {
            asyncio.create_task(_ask(address, cluster_id, channels, clock)) for address in addresses
        }
        try:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def _ask(address: str, cluster_id: str, channels: ChannelPool, clock: Clock) -> int:
    logged, wait_ms = "", ASK_AGAIN_MS_MIN
    while True:
        try:
            storage = StorageServiceStub(await channels.to(address))
            described = await clock.wait_for(
                storage.DescribeStorage(DescribeStorageRequest()), ANSWER_MS_MAX
            )
            if described.cluster_id != cluster_id:
                why = f"it belongs to cluster {described.cluster_id!r}, not to {cluster_id!r}"
            elif described.partitions:
                return described.partitions
            else:
                why = "it does not know the number of partitions yet"
        except TidemarkError as error:
            why = error.detail
        except TimeoutError:
            why = f"it did not answer in {ANSWER_MS_MAX} ms"
        if why != logged:
            _log.warning(
                "the number of partitions is not known: a storage node cannot be asked",
                extra={"address": address, "why": why},
            )
            logged = why
        await clock.sleep_ms(wait_ms)
        wait_ms = min(2 * wait_ms, ASK_AGAIN_MS_MAX)
