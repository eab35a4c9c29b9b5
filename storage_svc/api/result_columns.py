"""Results in columns: what all partitions have for a frame, as far as it is plain.

Results without a refusal or a repeat, and hand-outs in columns. Everything else has the long form
(ADR 43).
"""

from collections.abc import Iterable

from storage_svc.operations.acks import Acked
from storage_svc.operations.operation import ExchangeResult
from storage_svc.operations.publish import AppendedRuns
from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import HandedOut, write_hand_outs
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError


class ResultColumns:
    """Results of one frame for the broker, as far as they fit in columns."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, int, int, int]] = []
        self._results: list[tuple[int, int, int]] = []
        self._queue_ids: list[int] = []
        self._first_offsets: list[int] = []
        self._messages: list[int] = []
        self._hand_outs: list[Reserved] = []

    def __len__(self) -> int:
        """How many partitions have results here."""
        return len(self._parts)

    def add(
        self,
        partition: int,
        broker_epoch: int,
        commit: int,
        results: Iterable[tuple[int, ExchangeResult | TidemarkError, int]],
    ) -> None:
        """The results of a partition, all of them plain."""
        before, handed_out = len(self._results), len(self._hand_outs)
        for request_id, result, _ in results:
            if isinstance(result, AppendedRuns):
                runs = result.runs
                self._results.append((request_id, len(runs), 0))
                for run in runs:
                    queue_id, first_offset, _, _ = run  # type: ignore[misc]  # none is refused
                    self._queue_ids.append(queue_id)
                    self._first_offsets.append(first_offset)
            elif isinstance(result, Acked):
                self._results.append((request_id, 0, len(result.messages)))
                self._messages += result.messages
            else:
                assert isinstance(result, HandedOut), "only these are plain"
                self._hand_outs += result.results
        self._parts.append(
            (
                partition,
                broker_epoch,
                commit,
                len(self._results) - before,
                len(self._hand_outs) - handed_out,
            )
        )

    def write_to(self, columns: exchange_pb2.ResultColumns) -> None:
        partitions, epochs, commits, result_counts, hand_out_counts = zip(*self._parts, strict=True)
        columns.partitions.extend(partitions)
        columns.broker_epochs.extend(epochs)
        columns.commits.extend(commits)
        columns.result_counts.extend(result_counts)
        columns.hand_out_counts.extend(hand_out_counts)
        if self._results:
            request_ids, run_counts, receipt_counts = zip(*self._results, strict=True)
            columns.request_ids.extend(request_ids)
            columns.run_counts.extend(run_counts)
            columns.receipt_counts.extend(receipt_counts)
        columns.queue_ids.extend(self._queue_ids)
        columns.first_offsets.extend(self._first_offsets)
        columns.messages.extend(self._messages)
        if self._hand_outs:
            write_hand_outs(columns.hand_outs, self._hand_outs)
