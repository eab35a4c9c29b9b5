"""The loss of an exclusive queue, as the application is notified of it."""

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from tidemark.api.broker.v1 import subscription_pb2

_REPLACED: Final = subscription_pb2.SUBSCRIPTION_STATE_REPLACED


class EvictionReason(StrEnum):
    """Why a client no longer owns a queue."""

    EVICTED = "EVICTED"
    """Another client subscribed to it, or the queue, its group or its topic was deleted."""
    REPLACED = "REPLACED"
    """Another process with the same `client_id` subscribed to it."""

    @staticmethod
    def of(state: subscription_pb2.SubscriptionState.ValueType) -> "EvictionReason":
        """The reason for a state other than ACTIVE."""
        return EvictionReason.REPLACED if state == _REPLACED else EvictionReason.EVICTED


class Eviction(NamedTuple):
    """This client has lost an exclusive queue."""

    lmq_name: str
    group: str
    epoch: int
    """The epoch of the new owner; 0 when it is not known."""
    reason: EvictionReason


OnEvicted: TypeAlias = Callable[[Eviction], None]
