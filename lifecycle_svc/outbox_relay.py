"""The courier: carries outbox entries to their destinations (L6).

The destination appends an entry, then the source clears it; whoever dies in between, the next
sweep carries it again and the destination knows that it has it. While a destination refuses, what
is bound for it waits at its source, in order, with a warning and a metric; others go on.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lifecycle_svc.holders import Owners
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_REFUSED,
    Action,
    ActionResult,
    ClearOutbox,
)
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import counter

RETRY_MS_MIN = 500
RETRY_MS_MAX = 60_000

_log = logging.getLogger(__name__)
_carried = counter(
    "tidemark.lifecycle.outbox_carried", description="Messages that reached their destination"
)
_refused = counter(
    "tidemark.lifecycle.outbox_refused", "Times that a destination refused, by reason", zeros=()
)


@dataclass(slots=True)
class _Refusal:
    """A destination that takes nothing for now."""

    refusals: int
    retry_at_ms: int


@dataclass(frozen=True, slots=True)
class Carried:
    """What became of some entries."""

    cleared: int
    waiting: int


class Courier:
    """Carries the outbox of one partition, and remembers who refused."""

    def __init__(self, partition: int, owners: Owners, clock: Clock) -> None:
        self._partition = partition
        self._owners = owners
        self._clock = clock
        self._refusals: dict[str, _Refusal] = {}

    def blocked(self) -> list[str]:
        """Destinations that are not tried again yet."""
        now_ms = self._clock.monotonic_ms()
        return [name for name, each in self._refusals.items() if each.retry_at_ms > now_ms]

    def next_retry_ms(self) -> int | None:
        """When the first of them is tried again, by the monotonic clock."""
        return min((each.retry_at_ms for each in self._refusals.values()), default=None)

    async def carry(self, transfers: Sequence[Action]) -> Carried:
        """Bring entries to their destinations, and clear those that arrived."""
        arrived: list[Action] = []
        for partition, bound in _by_partition(transfers).items():
            arrived += await self._append(partition, bound)
        if arrived:
            sequences = [each.append_from_outbox.entry.sequence for each in arrived]
            await self._owners.act(
                self._partition,
                [Action(clear_outbox=ClearOutbox(sequence=each)) for each in sequences],
            )
        for action in arrived:
            entry = action.append_from_outbox.entry
            self._refusals.pop(entry.destination_lmq_name, None)
            _carried.add(entry.count)
        return Carried(len(arrived), len(transfers) - len(arrived))

    async def _append(self, partition: int, bound: Sequence[Action]) -> list[Action]:
        """The entries that their destinations have now, from before or since."""
        try:
            results = await self._owners.act(partition, bound)
        except TidemarkError as error:
            self._refuse(dict.fromkeys(map(_destination, bound)), error)
            return []
        refused: dict[str, TidemarkError] = {}
        arrived = []
        for action, result in zip(bound, results, strict=True):
            name = _destination(action)
            if result.outcome != ACTION_OUTCOME_REFUSED:
                arrived.append(action)
            elif name not in refused:  # what follows only says that this one is missing
                refused[name] = _error_of(result)
        for name, reason in refused.items():
            self._refuse([name], reason)
        return arrived

    def _refuse(self, names: Iterable[str], error: TidemarkError) -> None:
        for name in names:
            before = self._refusals.get(name)
            refusals = 1 if before is None else before.refusals + 1
            pause_ms = min(RETRY_MS_MIN << min(refusals - 1, 10), RETRY_MS_MAX)
            self._refusals[name] = _Refusal(refusals, self._clock.monotonic_ms() + pause_ms)
            _refused.add(1, {"reason": error.reason})
            _log.warning(
                "messages wait for their destination",
                extra={
                    "partition": self._partition,
                    "destination": name,
                    "reason": error.reason,
                    "why": error.detail,
                    "refusals": refusals,
                },
            )


def _by_partition(transfers: Sequence[Action]) -> dict[int, list[Action]]:
    """Entries by the partition they go to, in their order."""
    bound: dict[int, list[Action]] = {}
    for action in transfers:
        entry = action.append_from_outbox.entry
        bound.setdefault(entry.destination_partition, []).append(action)
    return bound


def _destination(action: Action) -> str:
    return action.append_from_outbox.entry.destination_lmq_name


def _error_of(result: ActionResult) -> TidemarkError:
    return from_status(result.error)
