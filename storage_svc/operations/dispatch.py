"""Which module carries out which operation: one table for the whole writer."""

from collections.abc import Awaitable, Callable
from typing import Any

from storage_svc import operations as op
from storage_svc.operations import administer as administering
from storage_svc.operations import claim as claiming
from storage_svc.operations import deliver as delivering
from storage_svc.operations import load as loading
from storage_svc.operations import outbox, system_metrics
from storage_svc.operations import ownership as owning
from storage_svc.operations import publish as appending
from storage_svc.operations import redrive as redriving
from storage_svc.operations import retain as retention
from storage_svc.operations import sweep as sweeping
from storage_svc.partition.commit import CommitContext

Handler = Callable[[CommitContext, Any], Awaitable[op.Result]]

HANDLERS: dict[type, Handler] = {
    op.Materialize: loading.materialize,
    op.Unmaterialize: loading.unmaterialize,
    op.KeepHouse: loading.keep_house,
    op.Append: appending.append,
    op.Reserve: delivering.reserve,
    op.Settle: delivering.settle,
    op.Extend: delivering.extend,
    op.ExpireDue: delivering.expire_due,
    op.TakeOwnership: owning.take,
    op.ConfirmOwnership: owning.confirm,
    op.DropOwnership: owning.drop,
    op.PlaceGroup: administering.place_group,
    op.RemoveGroup: administering.remove_group,
    op.RemoveQueue: administering.remove_queue,
    op.Purge: administering.purge,
    op.Unschedule: appending.unschedule,
    op.Redrive: redriving.redrive,
    op.ExpireReservation: delivering.expire_reservation,
    op.Bury: sweeping.bury,
    op.PromoteScheduled: appending.promote,
    op.ReadyDelayed: delivering.ready_delayed,
    op.AppendFromOutbox: outbox.append_from,
    op.ClearOutbox: outbox.clear,
    op.ApplyRetention: retention.apply,
    op.RecordMetrics: system_metrics.record,
    op.ClaimPartition: claiming.claim,
    op.ReleaseUnreported: claiming.release_unreported,
    op.PutTopic: claiming.put_topic,
    op.DropTopic: claiming.drop_topic,
    op.ApplyTopic: claiming.apply_topic,
}
