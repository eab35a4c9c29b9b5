"""The outbox relay: carries outbox entries to their destinations, outside the sweep (L6).

One task per destination partition, so that a partition that hangs delays neither the sweep nor
the entries for any other partition (L1). The destination appends an entry, then the source clears
it. After a crash in between, the entry is sent again and the destination recognizes it as a
duplicate. A destination that refuses is postponed at the source, with a warning and a metric: its
entries wait there, in order, and the entries for other destinations go on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from lifecycle_svc.holders import Holders
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_REFUSED,
    Action,
    ClearOutbox,
    OutboxEntry,
    PostponeOutbox,
)
from tidemark.api.storage.v1.storage_pb2 import (
    SCAN_KIND_OUTBOX,
    ScanPartitionRequest,
    ScanPartitionResponse,
)
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import counter, leave_trace

RETRY_MS_MIN = 500
RETRY_MS_MAX = 60_000

Scan = Callable[[ScanPartitionRequest], Awaitable[ScanPartitionResponse]]

_log = logging.getLogger(__name__)
_carried = counter(
    "tidemark.lifecycle.outbox_carried", description="Messages that reached their destination"
)
_refused = counter(
    "tidemark.lifecycle.outbox_refused", "Refusals by a destination, by reason", zeros=()
)


class OutboxRelay:
    """Relays the outbox of one partition. `wake` starts tasks, which end when nothing waits."""

    def __init__(self, partition: int, scan: Scan, holders: Holders, clock: Clock) -> None:
        self.last_error = ""
        """Why the last page was not carried; "" once one was."""
        self._partition = partition
        self._scan = scan
        self._holders = holders
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._woken: set[int] = set()

    def wake(self, destination_partitions: Iterable[int]) -> None:
        """Entries wait for these partitions."""
        for number in destination_partitions:
            self._woken.add(number)
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._relay_to(number))

    def stop(self) -> list[asyncio.Task[None]]:
        """Stop all tasks; returns them. A later wake-up starts others."""
        stopped = list(self._tasks.values())
        for task in stopped:
            task.cancel()
        self._tasks.clear()
        self._woken.clear()
        return stopped

    async def _relay_to(self, destination: int) -> None:
        leave_trace()  # of the sweep that woke it
        failures = 0
        while destination in self._woken:
            self._woken.discard(destination)
            try:
                while await self._carry_page(destination):
                    failures = 0
                    self.last_error = ""
            except Exception as error:  # nothing may end the task while entries wait
                failures += 1
                self._failed(destination, error, failures)
                self._woken.add(destination)
                pause_ms = min(RETRY_MS_MIN << min(failures - 1, 10), RETRY_MS_MAX)
                await self._clock.sleep_ms(pause_ms)
        self._tasks.pop(destination, None)

    async def _carry_page(self, destination: int) -> bool:
        """Append one page at its destinations and clear arrived entries; false if none waits."""
        request = ScanPartitionRequest(
            partition=self._partition, kind=SCAN_KIND_OUTBOX, destination_partition=destination
        )
        transfers = [fact.action for fact in (await self._scan(request)).facts]
        if not transfers:
            return False
        results = await self._holders.delegate(destination, transfers)
        arrived: list[OutboxEntry] = []
        refused: dict[str, TidemarkError] = {}
        for action, result in zip(transfers, results, strict=True):
            entry = action.append_from_outbox.entry
            name = entry.destination_lmq_name
            if result.outcome != ACTION_OUTCOME_REFUSED:
                arrived.append(entry)
            elif name not in refused:  # later ones are refused only because this one is missing
                refused[name] = from_status(result.error)
        await self._conclude(_conclusions(arrived, refused))
        _carried.add(sum(entry.count for entry in arrived))
        for name, reason in refused.items():
            self._warn(reason, destination=name)
        return True

    async def _conclude(self, conclusions: Sequence[Action]) -> None:
        """Raises if the source refuses any: the same page would come again at once."""
        for result in await self._holders.delegate(self._partition, conclusions):
            if result.outcome == ACTION_OUTCOME_REFUSED:
                raise from_status(result.error)

    def _failed(self, destination: int, error: Exception, failures: int) -> None:
        self.last_error = str(error) or type(error).__name__
        if isinstance(error, TidemarkError):
            self._warn(error, destination_partition=destination, failures=failures)
        else:
            _log.error("the relay failed", extra={"partition": self._partition}, exc_info=error)

    def _warn(self, error: TidemarkError, **where: object) -> None:
        _refused.add(1, {"reason": error.reason})
        _log.warning(
            "messages wait for their destination",
            extra={
                "partition": self._partition,
                "reason": error.reason,
                "why": error.detail,
                **where,
            },
        )


def _conclusions(arrived: Sequence[OutboxEntry], refused: Iterable[str]) -> list[Action]:
    """Actions at the source after a page: clear arrived entries, postpone refusing destinations."""
    cleared = [
        Action(
            clear_outbox=ClearOutbox(
                sequence=entry.sequence, destination_lmq_name=entry.destination_lmq_name
            )
        )
        for entry in arrived
    ]
    return cleared + [
        Action(postpone_outbox=PostponeOutbox(destination_lmq_name=name)) for name in refused
    ]
