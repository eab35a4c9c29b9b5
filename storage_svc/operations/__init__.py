"""The operations of the writer of a partition: one module per subject, collected here.

`operation.py` describes the shape of an operation. To add one, declare its request and result in
the module of its subject, with `from_proto`, `apply` and `write_to`, and enter it in that module's
OPERATIONS or ACTIONS under the name of its proto field.
"""

from storage_svc.operations import (
    abandoned_groups,
    acks,
    dead_letters,
    expire,
    groups,
    loading,
    outbox,
    ownership,
    publish,
    queues,
    redrive,
    renew,
    reserve,
    schedule,
    settle,
    standing,
    topics,
)
from storage_svc.operations.operation import ActionDecoders, ExchangeDecoders

OPERATIONS: ExchangeDecoders = {
    **publish.OPERATIONS,
    **schedule.OPERATIONS,
    **reserve.OPERATIONS,
    **standing.OPERATIONS,
    **settle.OPERATIONS,
    **acks.OPERATIONS,
    **renew.OPERATIONS,
    **expire.OPERATIONS,
    **groups.OPERATIONS,
    **abandoned_groups.OPERATIONS,
    **queues.OPERATIONS,
    **loading.OPERATIONS,
    **ownership.OPERATIONS,
    **topics.OPERATIONS,
    **redrive.OPERATIONS,
    **outbox.OPERATIONS,
}
"""Operations that a broker sends through its exchange."""

ACTIONS: ActionDecoders = {
    **schedule.ACTIONS,
    **expire.ACTIONS,
    **dead_letters.ACTIONS,
    **outbox.ACTIONS,
}
"""Actions that a sweep plans and delegates."""
