"""A storage service in which the reads of one partition fail, or take long, when a file says so.

`python -m bench.stalling_storage` is the real service over real engines, but for what sweeps read
from one partition: that is held up while the file named by the variable contains a fault's word.
"""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import Final

from storage_svc.app import storage
from tests.rpc.lifecycle.faulty_reads import FaultyReads
from tidemark.clock import Clock
from tidemark.errors import DataCorrupt
from tidemark.rpc.server import RpcServer
from tidemark.service.process import main
from tidemark.settings import StorageSettings

FAULT_FILE: Final = "BENCH_FAULT_FILE"
PARTITION: Final = 0
"""The one that is broken."""

STALL_S: Final = 10
_POLL_S = 0.02


class Fault(Enum):
    """What is wrong with the reads of the partition."""

    NONE = ""
    FAIL = "fail"
    STALL = "stall"


class FileFaults(FaultyReads):
    """Readers that do what the file says, from one read to the next."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    async def check(self, partition: int) -> None:
        if partition != PARTITION:
            return
        if self._fault() is Fault.FAIL:
            raise DataCorrupt("the disk cannot be read, as it was told to")
        for _ in range(round(STALL_S / _POLL_S)):
            if self._fault() is not Fault.STALL:
                return
            await asyncio.sleep(_POLL_S)

    def _fault(self) -> Fault:
        return Fault(self._file.read_text()) if self._file.exists() else Fault.NONE


def stalling_storage(
    settings: StorageSettings, clock: Clock
) -> AbstractAsyncContextManager[RpcServer]:
    return storage(settings, clock, FileFaults(Path(os.environ[FAULT_FILE])).around)


if __name__ == "__main__":
    main("tidemark-storage", StorageSettings, stalling_storage)
