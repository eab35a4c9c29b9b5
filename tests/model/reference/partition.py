"""A partition in its simplest form: the answer and the change of every operation.

`perform` carries an operation out on the model and compares the real answer with its own. Where an
answer was lost with a failed commit the model goes by itself. Where storage is free to
choose (which messages a hand-out takes, which of them are set aside as undeliverable) the model
checks what was chosen instead of choosing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from storage_svc.operations.acks import AckReservations
from storage_svc.operations.dead_letters import Bury
from storage_svc.operations.expire import ExpireDue, ExpireReservation, ReadyDelayed
from storage_svc.operations.groups import GroupPlaced, PlaceGroup, RemoveGroup
from storage_svc.operations.loading import Materialize, RunHousekeeping, Unmaterialize
from storage_svc.operations.operation import Operation
from storage_svc.operations.outbox import AppendFromOutbox, ClearOutbox
from storage_svc.operations.ownership import (
    ConfirmOwnership,
    DropOwnership,
    Ownership,
    TakeOwnership,
)
from storage_svc.operations.publish import Append
from storage_svc.operations.queues import PauseQueue, Purge, RemoveQueue
from storage_svc.operations.renew import Renew
from storage_svc.operations.reserve import Reserve, Reserved
from storage_svc.operations.schedule import PromoteScheduled, Unschedule
from storage_svc.operations.settle import Extend, Settle
from storage_svc.operations.standing import Recall
from storage_svc.operations.topics import PutTopic
from tests.model.reference import (
    administration,
    dead_letters,
    loading,
    outbox,
    ownership,
    publish,
    reservations,
)
from tests.model.reference.state import ModelState, Refused

Handler = Callable[[ModelState, Any, Any], object]

HANDLERS: dict[type, Handler] = {
    Materialize: loading.materialize,
    Unmaterialize: loading.unmaterialize,
    RunHousekeeping: loading.run_housekeeping,
    Append: publish.append,
    Reserve: reservations.reserve,
    Settle: reservations.settle,
    Extend: reservations.extend,
    Renew: reservations.renew,
    AckReservations: reservations.acks,
    Recall: reservations.recall,
    ExpireDue: reservations.expire_due,
    ExpireReservation: reservations.expire_reservation,
    ReadyDelayed: reservations.ready_delayed,
    PromoteScheduled: publish.promote,
    Unschedule: publish.unschedule,
    Bury: dead_letters.bury,
    AppendFromOutbox: outbox.append_from,
    ClearOutbox: outbox.clear,
    TakeOwnership: ownership.take,
    ConfirmOwnership: ownership.confirm,
    DropOwnership: ownership.drop,
    PlaceGroup: administration.place_group,
    RemoveGroup: administration.remove_group,
    RemoveQueue: administration.remove_queue,
    Purge: administration.purge,
    PauseQueue: administration.pause_queue,
    PutTopic: administration.put_topic,
}


class PartitionModel(ModelState):
    """What a partition must know and, operation by operation, what it must answer."""

    def begin(self, now_ms: int, told: set[tuple[str, str]]) -> None:
        """A commit begins."""
        self.now_ms = now_ms
        self.told = told
        self.took_some.clear()
        self.ends_standing.clear()
        self.left_behind.clear()
        self.touched.clear()
        self.unloaded.clear()
        self.brief.clear()
        self.expired.clear()
        self.erased_later.clear()
        self.stored_before = {each.queue_id: set(each.runs) for each in self.queues.values()}

    def perform(self, operation: Operation[object], answer: object, *, lost: bool = False) -> None:
        """Carry an operation out and check its answer.

        Where the answer was lost there is None, but for a hand-out: that is read back from storage,
        which does not distinguish a refused one from an empty one.
        """
        self.lost = lost
        try:
            expected = HANDLERS[type(operation)](self, operation, answer)
        except Refused as refused:
            empty = lost and answer in (None, Reserved(()))
            if not empty and not isinstance(answer, refused.kinds):
                raise AssertionError(f"{operation}: {answer!r}, not {refused.kinds}") from None
        else:
            same = _in_order(answer) == _in_order(expected)
            assert lost or same, f"{operation}: {answer!r} != {expected!r}"

    def conclude(self, handed_out: Sequence[Reserved] = ()) -> None:
        """A commit ends: what is due expires, because a broker listens, and reserves that stand
        hand out what is ready."""
        assert not self.left_behind, self.left_behind
        if reservations.is_due(self):
            reservations.expire_due(self, ExpireDue(), None)
        # Of each they may have set aside what was undeliverable, without a result.
        self.took_some.update(each.place for each in self.standing.values())
        for result in handed_out:
            reservations.handed_out(self, result)
        reservations.check_standing(self)
        for queue in self.queues.values():
            if queue.queue_id in self.erased_later:
                self.delete_settled(queue, list(queue.runs.values()))
        for name in self.brief & self.queues.keys():
            if not self.queues[name].tracked:
                self.queues[name].unload()

    def reloaded(self) -> None:
        """The partition was opened again: nothing is materialized, no consumer is known to wait."""
        self.standing.clear()
        for queue in self.queues.values():
            queue.unload()


def _in_order(answer: object) -> object:
    """Reservations are revoked in no particular order."""
    if isinstance(answer, GroupPlaced | Ownership):
        return answer._replace(revoked=tuple(sorted(answer.revoked)))
    return answer
