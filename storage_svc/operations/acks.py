"""Acknowledging: many reservations end at once, each as a whole.

The short form of the settlement that there is most of: one operation and one result for all that
clients acknowledge in a frame. A reservation that cannot be acknowledged is named with its reason.
"""

from typing import NamedTuple

from storage_svc.empty_containers import NO_LIST
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.settle import ack
from storage_svc.partition.commit import CommitContext, count_fenced
from storage_svc.turns import TURN_OPERATIONS_MAX, give_way
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import DataCorrupt, Fenced, TidemarkError
from tidemark.field_checks import check_range
from tidemark.rpc.statuses import to_status


class Acked(NamedTuple):
    """The reservations that were not refused are acknowledged, on disk."""

    messages: tuple[int, ...]
    """How many messages of each were open until now."""
    refused: tuple[tuple[int, TidemarkError], ...] = ()
    """The place of each among those that were named, and why."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.acks.messages.extend(self.messages)
        for index, error in self.refused:
            proto.acks.refused.add(index=index, error=to_status(error))


class AckReservations(NamedTuple):
    """Acknowledge all messages of reservations that are not settled yet."""

    receipts: tuple[bytes, ...]
    client_id: str = ""

    @classmethod
    def from_proto(cls, proto: exchange_pb2.AckReservations) -> "AckReservations":
        return cls.of(tuple(proto.receipts), proto.client_id)

    @classmethod
    def of(cls, receipts: tuple[bytes, ...], client_id: str) -> "AckReservations":
        """Raises InvalidArgument for too many or none."""
        check_range("receipts", len(receipts), 1, limits.ACKS_PER_OPERATION_MAX)
        return cls(receipts, client_id)

    async def apply(self, commit: CommitContext) -> Acked:
        """Each is acknowledged, or answered as before (V6), or refused without any change."""
        messages: list[int] = []
        refused: list[tuple[int, TidemarkError]] = NO_LIST
        for index, receipt in enumerate(self.receipts):
            if index and index % TURN_OPERATIONS_MAX == 0:
                await give_way()
            try:
                messages.append(await ack(commit, receipt, self.client_id))
            except DataCorrupt:
                raise  # a fault of the partition
            except TidemarkError as error:
                if isinstance(error, Fenced):
                    count_fenced("client")
                messages.append(0)
                refused = refused or []
                refused.append((index, error))
        return Acked(tuple(messages), tuple(refused))


OPERATIONS: ExchangeDecoders = {"acks": AckReservations.from_proto}
