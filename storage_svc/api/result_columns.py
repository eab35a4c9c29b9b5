"""Results in columns: what all partitions have for a frame, as far as it is plain.

Results without a refusal or a repeat, and hand-outs in columns. Everything else has the long form
(ADR 43).
"""

from collections.abc import Iterable

from storage_svc.operations.acks import Acked
from storage_svc.operations.operation import ExchangeResult
from storage_svc.operations.publish import AppendedRuns
from storage_svc.operations.standing import HandedOut, HandOut, write_hand_outs
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError


class ResultColumns:
    """Results of one frame for the broker, as far as they fit in columns."""

    __slots__ = ("_hand_outs", "_messages", "_partitions", "_results", "_runs")

    def __init__(self) -> None:
        self._partitions: list[int] = []
        self._results: list[int] = []
        self._runs: list[int] = []
        self._messages: list[int] = []
        self._hand_outs: list[HandOut] = []

    def __bool__(self) -> bool:
        """Whether any partition has results here."""
        return bool(self._partitions)

    def add(
        self,
        partition: int,
        broker_epoch: int,
        commit: int,
        results: Iterable[tuple[int, ExchangeResult | TidemarkError, int]],
    ) -> None:
        """The results of a partition, all of them plain."""
        count, handed_out = 0, len(self._hand_outs)
        for request_id, result, _ in results:
            if isinstance(result, AppendedRuns):
                self._results += (request_id, len(result.places) // 2, 0)
                self._runs += result.places
                count += 1
            elif isinstance(result, Acked):
                self._results += (request_id, 0, len(result.messages))
                self._messages += result.messages
                count += 1
            else:
                assert isinstance(result, HandedOut), "only these are plain"
                self._hand_outs += result.hand_outs
        handed_out = len(self._hand_outs) - handed_out
        self._partitions += (partition, broker_epoch, commit, count, handed_out)

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
