"""The outbox relay: carries outbox entries to their destinations (L6).

The destination appends an entry, then the source clears it. After a crash in between, the next
sweep sends the entry again and the destination recognizes it as a duplicate. While a destination
refuses, its entries wait at the source, in order, with a warning and a metric. Other destinations
are not affected.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lifecycle_svc.holders import Holders
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
    "tidemark.lifecycle.outbox_refused", "Refusals by a destination, by reason", zeros=()
)


@dataclass(slots=True)
class _Refusal:
    """A destination that refused, and when to try it again."""

    refusals: int
    retry_at_ms: int


@dataclass(frozen=True, slots=True)
class Relayed:
    """The outcome of one call of `relay`, in entries."""

    cleared: int
    waiting: int


class OutboxRelay:
    """Relays the outbox of one partition and backs off from destinations that refuse."""

    def __init__(self, partition: int, holders: Holders, clock: Clock) -> None:
        self._partition = partition
        self._holders = holders
        self._clock = clock
        self._refusals: dict[str, _Refusal] = {}

    def blocked(self) -> list[str]:
        """Destinations whose retry is not due yet."""
        now_ms = self._clock.monotonic_ms()
        return [name for name, each in self._refusals.items() if each.retry_at_ms > now_ms]

    def next_retry_ms(self) -> int | None:
        """When the first refused destination is retried, by the monotonic clock."""
        return min((each.retry_at_ms for each in self._refusals.values()), default=None)

    async def relay(self, transfers: Sequence[Action]) -> Relayed:
        """Append entries at their destinations and clear those that arrived."""
        arrived: list[Action] = []
        for partition, bound in _by_partition(transfers).items():
            arrived += await self._append(partition, bound)
        if arrived:
            sequences = [each.append_from_outbox.entry.sequence for each in arrived]
            await self._holders.delegate(
                self._partition,
                [Action(clear_outbox=ClearOutbox(sequence=each)) for each in sequences],
            )
        for action in arrived:
            _carried.add(action.append_from_outbox.entry.count)
        return Relayed(len(arrived), len(transfers) - len(arrived))

    async def _append(self, partition: int, bound: Sequence[Action]) -> list[Action]:
        """Append entries in one partition; returns those that are there, duplicates included."""
        try:
            results = await self._holders.delegate(partition, bound)
        except TidemarkError as error:
            self._refuse(dict.fromkeys(map(_destination, bound)), error)
            return []
        refused: dict[str, TidemarkError] = {}
        arrived = []
        for action, result in zip(bound, results, strict=True):
            name = _destination(action)
            if result.outcome != ACTION_OUTCOME_REFUSED:
                arrived.append(action)
            elif name not in refused:  # later ones are refused only because this one is missing
                refused[name] = _error_of(result)
        for action in arrived:  # before new refusals: a destination may take some and refuse others
            self._refusals.pop(_destination(action), None)
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
    """Entries by destination partition, in order."""
    bound: dict[int, list[Action]] = {}
    for action in transfers:
        entry = action.append_from_outbox.entry
        bound.setdefault(entry.destination_partition, []).append(action)
    return bound


def _destination(action: Action) -> str:
    return action.append_from_outbox.entry.destination_lmq_name


def _error_of(result: ActionResult) -> TidemarkError:
    return from_status(result.error)
