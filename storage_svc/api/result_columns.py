"""Results in columns: what all partitions have for a frame, as far as it is plain.

Results without a refusal or a repeat, and hand-outs in columns. They are added as soon as they are
durable, and leave with the next frame. Everything else has the long form (ADR 43).
"""

from collections.abc import Callable, Sequence
from typing import Final

from storage_svc.operations.acks import Acked
from storage_svc.operations.operation import ExchangeResult
from storage_svc.operations.publish import AppendedRuns
from storage_svc.operations.standing import (
    HandedOut,
    HandOut,
    body_of_hand_out,
    write_hand_outs,
)
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError

COLUMNS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Columns of about this size take no more: half of a frame is left to the long form."""

RESULT_BYTES: Final = 512
RUN_BYTES: Final = 32
HAND_OUT_BYTES: Final = 128
"""Generous sizes of a result, and of a run and a hand-out in it, without bodies."""


class ResultColumns:
    """Results of the next frame for the broker, as far as they fit in columns."""

    __slots__ = (
        "_filled",
        "_hand_outs",
        "_messages",
        "_partitions",
        "_results",
        "_runs",
        "bytes_approx",
    )

    def __init__(self, filled: Callable[[], None]) -> None:
        """`filled` is called when the first results come."""
        self.bytes_approx = 0
        self._filled = filled
        self._partitions: list[int] = []
        self._results: list[int] = []
        self._runs: list[int] = []
        self._messages: list[int] = []
        self._hand_outs: list[HandOut] = []

    def __bool__(self) -> bool:
        """Whether any partition has results here."""
        return bool(self._partitions)

    @property
    def bound(self) -> frozenset[tuple[int, int]]:
        """Partitions that have results here, each with the epoch of its bind."""
        return frozenset(zip(self._partitions[::5], self._partitions[1::5], strict=True))

    def add(
        self,
        partition: int,
        broker_epoch: int,
        commit: int,
        request_ids: Sequence[int],
        results: Sequence[ExchangeResult | TidemarkError],
    ) -> int:
        """Add results of a partition, up to the first that is not plain; returns how many, which
        is 0 if there is no room."""
        if self.bytes_approx >= COLUMNS_BYTES_MAX:
            return 0
        entries, added = self._partitions, 0
        if not entries:
            self._filled()
        for result in results:
            request_id = request_ids[added]
            if isinstance(result, AppendedRuns) and not (result.repeats or result.refused):
                places = result.places
                runs = len(places) // 2
                self._results += (request_id, runs, 0)
                self._runs += places
                self.bytes_approx += RESULT_BYTES + RUN_BYTES * runs
            elif isinstance(result, Acked) and not result.refused:
                messages = result.messages
                self._results += (request_id, 0, len(messages))
                self._messages += messages
                self.bytes_approx += RESULT_BYTES
            else:
                break
            added += 1
        if added:
            entries += (partition, broker_epoch, commit, added, 0)
        return added

    def add_hand_outs(
        self, partition: int, broker_epoch: int, commit: int, handed_out: HandedOut
    ) -> bool:
        """Add hand-outs of a partition, behind its results. False, and nothing was added, if there
        is no room."""
        hand_outs = handed_out.hand_outs
        size = hand_outs_bytes(hand_outs)
        if self.bytes_approx + size > COLUMNS_BYTES_MAX:
            return False
        self.bytes_approx += size
        self._hand_outs += hand_outs
        entries = self._partitions
        if entries[-5:-2] == [partition, broker_epoch, commit]:  # as mostly: those of one commit
            entries[-1] += len(hand_outs)
        else:
            if not entries:
                self._filled()
            entries += (partition, broker_epoch, commit, 0, len(hand_outs))
        return True

    def write_to(self, columns: exchange_pb2.ResultColumns) -> None:
        columns.partitions.extend(self._partitions)
        if self._results:
            columns.results.extend(self._results)
        if self._runs:
            columns.runs.extend(self._runs)
        if self._messages:
            columns.messages.extend(self._messages)
        if self._hand_outs:
            write_hand_outs(columns.hand_outs, self._hand_outs)


def hand_outs_bytes(hand_outs: Sequence[HandOut]) -> int:
    """A quick estimate of the size of hand-outs in columns."""
    return sum(map(len, map(body_of_hand_out, hand_outs))) + HAND_OUT_BYTES * len(hand_outs)
