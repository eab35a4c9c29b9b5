"""Redrive: moves dead letters of a queue back to their source, partition by partition.

Each partition works in pages, so that other operations run in between. It decides nothing about
the messages: storage applies the filter.
"""

from broker_svc.api.queue_partitions import QueuePartitions
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, QueueNotFound


class Redrive:
    """One call."""

    def __init__(
        self, request: topic_pb2.RedriveDeadLettersRequest, partitions: QueuePartitions
    ) -> None:
        self._partitions = partitions
        self._limit = request.limit
        self._operation = exchange_pb2.Redrive(
            lmq_name=request.lmq_name,
            reason=request.reason,
            source_lmq_name=request.source_lmq_name,
            after_ms=_unix_ms(request, "after_time"),
            before_ms=_unix_ms(request, "before_time"),
            dry_run=request.dry_run,
        )
        self._total = topic_pb2.RedriveDeadLettersResponse()

    async def run(self) -> topic_pb2.RedriveDeadLettersResponse:
        """Redrive in each partition until the limit, if there is one, is reached."""
        for partition in await self._partitions.of(self._operation.lmq_name):
            if self._limit_reached:
                break
            await self._run_in(partition)
        return self._total

    @property
    def _limit_reached(self) -> bool:
        return bool(self._limit) and self._total.messages >= self._limit

    async def _run_in(self, partition: int) -> None:
        self._operation.page_token = b""
        while True:
            operation = exchange_pb2.Operation(redrive=self._operation)
            operation.redrive.limit = self._limit - self._total.messages if self._limit else 0
            try:
                removed = (await self._partitions.call(partition, operation)).removed
            except QueueNotFound:  # this partition has no dead letters yet
                return
            self._total.messages += removed.messages
            self._total.orphans += removed.skipped
            self._operation.page_token = removed.next_page_token
            if not removed.next_page_token or self._limit_reached:
                return


def _unix_ms(request: topic_pb2.RedriveDeadLettersRequest, field: str) -> int:
    """A time of the request; 0 if it is not set."""
    try:
        return max(0, int(getattr(request, field).ToMilliseconds()))
    except ValueError:
        raise InvalidArgument("not a time", field=field) from None
