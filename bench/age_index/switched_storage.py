"""A storage service with an index of ages that signals switch off and on.

`python -m bench.age_index.switched_storage` is the real service. One process for all variants:
processes of the same program differ by more than the index costs.
"""

import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Final

from bench.age_index.variants import without_index
from storage_svc.app import storage
from tidemark.clock import Clock
from tidemark.rpc.server import RpcServer
from tidemark.service.process import main
from tidemark.settings import StorageSettings

INDEX_OFF: Final = signal.SIGRTMIN
INDEX_ON: Final = signal.SIGRTMIN + 1


@asynccontextmanager
async def switched_storage(settings: StorageSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    with ExitStack() as off:

        def switch_off(_number: int, _frame: object) -> None:
            off.close()
            off.enter_context(without_index())

        signal.signal(INDEX_OFF, switch_off)
        signal.signal(INDEX_ON, lambda _number, _frame: off.close())
        async with storage(settings, clock) as server:
            yield server


if __name__ == "__main__":
    main("tidemark-storage", StorageSettings, switched_storage)
