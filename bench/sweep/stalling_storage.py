"""A storage service in which the reads of one partition fail or stall on demand.

`python -m bench.sweep.stalling_storage` is the real service over real engines. The reads of sweeps
in one partition have the fault that is named in a file; a variable names the file.
"""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import Final

from storage_svc.app import storage
from tests.support.faulty_reads import FaultyReads
from tidemark.clock import Clock
from tidemark.errors import DataCorrupt
from tidemark.rpc.server import RpcServer
from tidemark.service.process import main
from tidemark.settings import StorageSettings

FAULT_FILE: Final = "BENCH_FAULT_FILE"
PARTITION: Final = 0
"""The faulty partition."""

STALL_S: Final = 10
_POLL_S = 0.02


class Fault(Enum):
    """The fault of the reads of the partition."""

    NONE = ""
    FAIL = "fail"
    STALL = "stall"


class FileFaults(FaultyReads):
    """Readers that look up the fault in the file at every read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    async def check(self, partition: int) -> None:
        if partition != PARTITION:
            return
        if self._fault() is Fault.FAIL:
            raise DataCorrupt("injected fault: the disk cannot be read")
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
