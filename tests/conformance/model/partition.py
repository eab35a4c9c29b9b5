"""A partition, as simple as it can be told: what every operation must answer and change.

`perform` carries an operation out on the model and compares the real answer with its own. Where an
answer was lost with a failed commit the model goes by itself. Where storage is free to
choose (which messages a hand-out takes, which of them are set aside as undeliverable) the model
checks what was chosen instead of choosing.
"""

from collections.abc import Callable
from typing import Any

from storage_svc import operations as op
from storage_svc.operations import Result
from tests.conformance.model import (
    administering,
    appending,
    delivering,
    loading,
    outbox,
    owning,
    sweeping,
)
from tests.conformance.model.state import PartitionState, Refused

Handler = Callable[[PartitionState, Any, Any], Result | None]

HANDLERS: dict[type, Handler] = {
    op.Materialize: loading.materialize,
    op.Unmaterialize: loading.unmaterialize,
    op.KeepHouse: loading.keep_house,
    op.Append: appending.append,
    op.Reserve: delivering.reserve,
    op.Settle: delivering.settle,
    op.Extend: delivering.extend,
    op.ExpireDue: delivering.expire_due,
    op.ExpireReservation: delivering.expire_reservation,
    op.ReadyDelayed: delivering.ready_delayed,
    op.PromoteScheduled: appending.promote,
    op.Unschedule: appending.unschedule,
    op.Bury: sweeping.bury,
    op.AppendFromOutbox: outbox.append_from,
    op.ClearOutbox: outbox.clear,
    op.TakeOwnership: owning.take,
    op.ConfirmOwnership: owning.confirm,
    op.DropOwnership: owning.drop,
    op.PlaceGroup: administering.place_group,
    op.RemoveGroup: administering.remove_group,
    op.RemoveQueue: administering.remove_queue,
    op.Purge: administering.purge,
    op.PutTopic: administering.put_topic,
}


class PartitionModel(PartitionState):
    """What a partition must know and, operation by operation, what it must answer."""

    def begin(self, now_ms: int, told: set[tuple[str, str]]) -> None:
        """A commit begins."""
        self.now_ms = now_ms
        self.told = told
        self.took_some.clear()
        self.touched.clear()
        self.expired.clear()

    def perform(
        self, operation: op.Operation, answer: Result | None, *, lost: bool = False
    ) -> None:
        """Carry an operation out and check its answer.

        Where the answer was lost there is None, but for a hand-out: that is read back from storage,
        which does not tell a refused one from an empty one.
        """
        self.lost = lost
        try:
            expected = HANDLERS[type(operation)](self, operation, answer)
        except Refused as refused:
            empty = lost and answer in (None, op.Reserved(()))
            if not empty and not isinstance(answer, refused.kinds):
                raise AssertionError(f"{operation}: {answer!r}, not {refused.kinds}") from None
        else:
            assert lost or answer == expected, f"{operation}: {answer!r} != {expected!r}"

    def conclude(self) -> None:
        """A commit ends: what is due expires, because a broker listens."""
        if delivering.is_due(self):
            delivering.expire_due(self, op.ExpireDue(), None)

    def reloaded(self) -> None:
        """The partition was opened again: nothing is materialized, nobody is known to wait."""
        for queue in self.queues.values():
            queue.unload()
