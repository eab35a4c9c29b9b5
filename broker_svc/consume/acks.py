"""Acks: many deliveries of a client are acknowledged at once, on their way to storage.

The short form of the most frequent settlement: one operation for each partition, and one result for
all. Storage names each refused ack with its reason, and the client no longer holds deliveries that
have ended. Acks here have no span; only the long form is traced.
"""

from collections.abc import Callable, Mapping
from functools import partial

from google.rpc.status_pb2 import Status

from broker_svc.consume.deliveries import Deliveries, HeldDelivery, drop_refused
from broker_svc.links.partition_link import PartitionLink
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status, to_status
from tidemark.telemetry import Tally

Done = Callable[[broker_pb2.AcksResult], None]
"""Called exactly once for each."""


class _Waiting:
    """Acks of one client until all partitions have answered."""

    __slots__ = ("deliveries", "done", "operations", "result")

    def __init__(self, request_id: int, deliveries: Deliveries, done: Done) -> None:
        self.result = broker_pb2.AcksResult(request_id=request_id)
        self.deliveries = deliveries
        self.operations = 1  # until all are sent
        self.done = done

    def refuse(self, tag: int, error: Status) -> None:
        self.result.refused.add(delivery_tag=tag, error=error)

    def answered(self) -> None:
        self.operations -= 1
        if not self.operations:
            self.done(self.result)


class Acks:
    """All acks of a broker."""

    def __init__(self, links: Mapping[int, PartitionLink], settled: Tally) -> None:
        self._links = links
        self._settled = settled

    def submit(
        self, acks: broker_pb2.Acks, client_id: str, deliveries: Deliveries, done: Done
    ) -> None:
        """Acknowledge for a client; `done` gets the result, after the commits."""
        waiting = _Waiting(acks.request_id, deliveries, done)
        by_partition: dict[int, list[HeldDelivery]] = {}
        for tag in acks.delivery_tags:
            try:
                held = deliveries.get(tag)
            except TidemarkError as error:
                waiting.refuse(tag, to_status(error))
                continue
            held.queue.pending_settlements += 1
            of_partition = by_partition.get(held.key[0])
            if of_partition is None:
                by_partition[held.key[0]] = [held]
            else:
                of_partition.append(held)
        for partition, of_partition in by_partition.items():
            for start in range(0, len(of_partition), limits.ACKS_PER_OPERATION_MAX):
                some = of_partition[start : start + limits.ACKS_PER_OPERATION_MAX]
                operation = exchange_pb2.Operation()
                operation.acks.client_id = client_id
                operation.acks.receipts.extend([each.receipt for each in some])
                waiting.operations += 1
                self._links[partition].ask(operation, partial(self._answered, waiting, some))
        waiting.answered()

    def _answered(
        self,
        waiting: _Waiting,
        acked: list[HeldDelivery],
        result: exchange_pb2.OperationResult | TidemarkError,
    ) -> None:
        for held in acked:
            held.queue.pending_settlements -= 1
        if isinstance(result, TidemarkError) or result.HasField("error"):
            error = to_status(result) if isinstance(result, TidemarkError) else result.error
            for held in acked:
                waiting.refuse(held.tag, error)
            waiting.answered()
            return
        refusals = result.acks.refused
        refused = {each.index: each.error for each in refusals} if refusals else {}
        settled, drop = self._settled.add, waiting.deliveries.drop
        for index, (held, messages) in enumerate(zip(acked, result.acks.messages, strict=True)):
            if index in refused:
                waiting.refuse(held.tag, refused[index])
                drop_refused(waiting.deliveries, held, from_status(refused[index]))
                continue
            settled(messages, held.queue.lmq_name, "ack")
            held.open_messages = 0
            drop(held.key)
        waiting.answered()
