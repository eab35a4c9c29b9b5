"""Acks: many deliveries of a client are acknowledged at once, on their way to storage.

The short form of the most frequent settlement: one operation for each partition, and one result for
all. Storage names each refused ack with its reason, and the client no longer holds deliveries that
have ended. Acks here are not traced; single settlements are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from google.rpc.status_pb2 import Status

from broker_svc.consume.deliveries import Deliveries, HeldDelivery, drop_refused
from broker_svc.links.frame_columns import (
    OPERATION_BYTES,
    OperationColumns,
    PlainOperation,
    WrongResult,
    check_named,
)
from broker_svc.links.partition_link import PartitionLink
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status, to_status
from tidemark.telemetry import Tally

_ENTRY_BYTES: Final = 32
"""A generous size of what an ack has beside its receipt."""

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


class _Acked(PlainOperation):
    """Acks of one client in one partition."""

    __slots__ = ("_client_id", "_held", "_settled", "_waiting")

    def __init__(
        self,
        waiting: _Waiting,
        held: Sequence[HeldDelivery],
        client_id: str,
        settled: Tally,
        operation_bytes: int,
    ) -> None:
        """`operation_bytes` is what it takes beside its receipts."""
        self.steps = 1
        self._client_id = client_id
        self._waiting = waiting
        self._held = held
        self._settled = settled
        self.size = operation_bytes
        for each in held:
            self.size += len(each.receipt) + _ENTRY_BYTES

    def add_to(self, columns: OperationColumns, partition: int, broker_epoch: int) -> None:
        for each in self._held:
            columns.receipts.append(each.receipt)
        columns.operations += (
            partition,
            broker_epoch,
            self.request_id,
            columns.sources[self._client_id],
            0,
            0,
            len(self._held),
        )

    def long_form(self) -> exchange_pb2.Operation:
        operation = exchange_pb2.Operation()
        operation.acks.client_id = self._client_id
        operation.acks.receipts.extend([each.receipt for each in self._held])
        return operation

    def acked(self, messages: Sequence[int]) -> None:
        if len(messages) != len(self._held):
            raise WrongResult("not as many acks as receipts")
        settled, waiting = self._settled, self._waiting
        deliveries = waiting.deliveries
        for held, count in zip(self._held, messages, strict=True):
            queue = held.queue
            queue.pending_settlements -= 1
            settled.add(count, queue.lmq_name, "ack")
            held.open_messages = 0
            deliveries.drop(held.key)
        waiting.answered()

    def __call__(self, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        waiting, acked = self._waiting, self._held
        if isinstance(result, TidemarkError) or result.HasField("error"):
            error = to_status(result) if isinstance(result, TidemarkError) else result.error
            for held in acked:
                held.queue.pending_settlements -= 1
                waiting.refuse(held.tag, error)
            waiting.answered()
            return
        if not result.acks.refused:
            self.acked(result.acks.messages)
            return
        if len(result.acks.messages) != len(acked):
            raise WrongResult("not as many acks as receipts")
        check_named([each.index for each in result.acks.refused], len(acked))
        refused = {each.index: each.error for each in result.acks.refused}
        settled, drop = self._settled.add, waiting.deliveries.drop
        for index, (held, messages) in enumerate(zip(acked, result.acks.messages, strict=True)):
            held.queue.pending_settlements -= 1
            if index in refused:
                waiting.refuse(held.tag, refused[index])
                drop_refused(waiting.deliveries, held, from_status(refused[index]))
                continue
            settled(messages, held.queue.lmq_name, "ack")
            held.open_messages = 0
            drop(held.key)
        waiting.answered()


def _cut(held: Sequence[HeldDelivery]) -> Sequence[Sequence[HeldDelivery]]:
    """Deliveries of one partition, cut for operations."""
    most = limits.ACKS_PER_OPERATION_MAX
    if len(held) <= most:
        return (held,)
    return [held[start : start + most] for start in range(0, len(held), most)]


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
        for tag in acks.delivery_tags[:]:
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
        operation_bytes = OPERATION_BYTES + len(client_id.encode())
        for partition, of_partition in by_partition.items():
            link = self._links[partition]
            for some in _cut(of_partition):
                waiting.operations += 1
                link.ask_plain(_Acked(waiting, some, client_id, self._settled, operation_bytes))
        waiting.answered()
