"""Renewing: many reservations get more time at once, and what the application was given is noted.

A reservation that cannot be renewed is left out and named with its reason; the others are renewed.
"""

from typing import NamedTuple

from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.settle import find_by_receipt
from storage_svc.partition.commit import CommitContext
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.field_checks import check_range, check_visibility
from tidemark.rpc.statuses import to_status


class HeldReservation(NamedTuple):
    """A reservation in the hands of a client."""

    receipt: bytes
    given_messages: int = 0
    owner_epoch: int = 0
    client_id: str = ""  # none: the broker itself
    at_least: bool = False  # whether more may have been given, and was noted before


class Renewed(NamedTuple):
    """The reservations that were not refused are renewed, on disk."""

    refused: tuple[tuple[int, TidemarkError], ...] = ()
    """The place of each among those that were named, and why."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.renew.SetInParent()
        for index, error in self.refused:
            proto.renew.refused.add(index=index, error=to_status(error))


class Renew(NamedTuple):
    """Give reservations more time, from now, and note what the application was given of them."""

    held: tuple[HeldReservation, ...]
    visibility_ms: int = 0  # 0: the topic's
    keep_deadlines: bool = False  # whether only what was given is noted

    @classmethod
    def from_proto(cls, proto: exchange_pb2.RenewReservations) -> "Renew":
        check_range("held", len(proto.held), 1, limits.RENEWALS_PER_FRAME_MAX)
        check_visibility(proto.visibility_ms)
        held = (
            HeldReservation(
                each.receipt,
                each.given_messages,
                each.owner_epoch,
                proto.client_id,
                each.at_least,
            )
            for each in proto.held
        )
        return cls(tuple(held), proto.visibility_ms, proto.keep_deadlines)

    async def apply(self, commit: CommitContext) -> Renewed:
        """Later deadlines, from now; none comes earlier than it was."""
        refused: list[tuple[int, TidemarkError]] = []
        for index, held in enumerate(self.held):
            try:
                handle, reservation = await find_by_receipt(
                    commit,
                    held.receipt,
                    held.owner_epoch,
                    held.client_id,
                    by_broker=self.keep_deadlines,
                )
                visibility_ms = self.visibility_ms or handle.topic.settings.visibility_timeout_ms
                deadline_ms = 0 if self.keep_deadlines else commit.now_ms + visibility_ms
                reservation.check_live()
                reservation.note_given(held.given_messages, at_least=held.at_least)
                handle.state.renew(reservation, deadline_ms, commit.journal)
            except TidemarkError as error:
                refused.append((index, error))
        return Renewed(tuple(refused))


OPERATIONS: ExchangeDecoders = {"renew": Renew.from_proto}
