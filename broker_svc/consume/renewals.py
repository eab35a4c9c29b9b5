"""Renewals: more time for many reservations at once, on its way to storage.

One operation for each partition, however many reservations a client names. Storage names
each refused renewal with its reason, and the client no longer holds reservations that have ended.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from broker_svc.consume.deliveries import (
    Deliveries,
    DeliveryDirectory,
    HeldDelivery,
    drop_refused,
)
from broker_svc.links.frame_columns import check_named
from broker_svc.links.partition_link import PartitionLink
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import PartitionNotFound, TidemarkError
from tidemark.field_checks import check_visibility
from tidemark.receipts import Receipt
from tidemark.rpc.statuses import from_status, to_status

Done = Callable[[broker_pb2.RenewalResult], None]
"""Called exactly once for each renewal."""


class _Named(NamedTuple):
    """A reservation as the client named it."""

    tag: int
    receipt: bytes
    held: HeldDelivery | None
    holder: Deliveries | None
    given_messages: int
    owner_epoch: int


class _Waiting:
    """A renewal until all partitions have answered."""

    __slots__ = ("done", "partitions", "result")

    def __init__(self, result: broker_pb2.RenewalResult, partitions: int, done: Done) -> None:
        self.result = result
        self.partitions = partitions
        self.done = done

    def refuse(self, named: _Named, error: TidemarkError) -> None:
        receipt = b"" if named.tag else named.receipt
        self.result.refused.add(delivery_tag=named.tag, receipt=receipt, error=to_status(error))

    def answered(self) -> None:
        self.partitions -= 1
        if self.partitions <= 0:
            self.done(self.result)


class Renewals:
    """All renewals of a broker."""

    def __init__(
        self, links: Mapping[int, PartitionLink], directory: DeliveryDirectory, clock: Clock
    ) -> None:
        self._links = links
        self._directory = directory
        self._clock = clock

    def submit(
        self, renewal: broker_pb2.Renewal, client_id: str, deliveries: Deliveries, done: Done
    ) -> None:
        """Renew for a client; `done` gets the result, after the commits. Tags mean `deliveries`."""
        result = broker_pb2.RenewalResult(request_id=renewal.request_id)
        try:
            check_visibility(renewal.visibility_ms)
        except TidemarkError as error:
            _refuse_all(renewal, result, error)
            done(result)
            return
        by_partition: dict[int, list[_Named]] = {}
        for tag in renewal.delivery_tags:
            try:
                held = deliveries.get(tag)
            except TidemarkError as error:
                result.refused.add(delivery_tag=tag, error=to_status(error))
                continue
            named = _Named(
                tag, held.receipt, held, deliveries, held.given_messages, held.owner_epoch
            )
            by_partition.setdefault(held.queue.partition, []).append(named)
        for each in renewal.receipts:
            try:
                partition, named = self._by_receipt(each)
            except TidemarkError as error:
                result.refused.add(receipt=each.receipt, error=to_status(error))
                continue
            by_partition.setdefault(partition, []).append(named)
        waiting = _Waiting(result, len(by_partition), done)
        for partition, names in by_partition.items():
            operation = _operation(names, renewal.visibility_ms, client_id)
            answered = partial(self._answered, waiting, names, renewal.visibility_ms)
            self._links[partition].ask(operation, answered)
        if not by_partition:
            waiting.answered()

    def _by_receipt(self, each: broker_pb2.HeldReceipt) -> tuple[int, _Named]:
        receipt = Receipt.decode(each.receipt)
        if receipt.partition not in self._links:
            number = str(receipt.partition)
            raise PartitionNotFound(f"there is no partition {number}", partition=number)
        key = (receipt.partition, receipt.reservation_id)
        holder = self._directory.holder(key)
        held = None if holder is None else holder.find(key)
        given = each.given_messages
        if held is not None:
            held.given_at_least = max(held.given_at_least, min(given, held.messages))
            given = held.given_messages
        return receipt.partition, _Named(0, each.receipt, held, holder, given, receipt.owner_epoch)

    def _answered(
        self,
        waiting: _Waiting,
        names: list[_Named],
        visibility_ms: int,
        result: exchange_pb2.OperationResult | TidemarkError,
    ) -> None:
        if isinstance(result, TidemarkError) or result.HasField("error"):
            error = result if isinstance(result, TidemarkError) else from_status(result.error)
            for named in names:
                waiting.refuse(named, error)
            waiting.answered()
            return
        check_named([each.index for each in result.renew.refused], len(names))
        refused: set[int] = set()
        for each in result.renew.refused:
            refused.add(each.index)
            named, why = names[each.index], from_status(each.error)
            waiting.refuse(named, why)
            if named.held is not None and named.holder is not None:
                drop_refused(named.holder, named.held, why)
        now_ms = self._clock.monotonic_ms()
        for index, named in enumerate(names):
            if named.held is not None and index not in refused:
                held = named.held
                held.noted_messages = named.given_messages
                renewed_ms = now_ms + (visibility_ms or held.visibility_ms)
                held.deadline_ms = max(held.deadline_ms, renewed_ms)
        waiting.answered()


def _refuse_all(
    renewal: broker_pb2.Renewal, result: broker_pb2.RenewalResult, reason: TidemarkError
) -> None:
    error = to_status(reason)
    for tag in renewal.delivery_tags:
        result.refused.add(delivery_tag=tag, error=error)
    for each in renewal.receipts:
        result.refused.add(receipt=each.receipt, error=error)


def _operation(names: list[_Named], visibility_ms: int, client_id: str) -> exchange_pb2.Operation:
    operation = exchange_pb2.Operation()
    operation.renew.client_id = client_id
    operation.renew.visibility_ms = visibility_ms
    for each in names:
        operation.renew.held.add(
            receipt=each.receipt,
            given_messages=each.given_messages,
            owner_epoch=each.owner_epoch,
            at_least=not each.tag,
        )
    return operation
