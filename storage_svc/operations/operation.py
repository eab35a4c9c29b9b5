"""The shape of an operation, and the results that operations of several subjects share.

An operation is a request that one commit applies. Each subject has one module with its request and
result types, how a commit applies them and how they look on the wire; the proto is the only other
place that names them. Requests and results are tuples, not dataclasses, because one is made per run
on the hot path. An operation that fails is answered with its error in place of a result, so that
one bad operation never spoils the frame it came in.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from storage_svc.partition.commit import CommitContext
from tidemark.api.storage.v1 import action_pb2, exchange_pb2

R_co = TypeVar("R_co", covariant=True)


class Operation(Protocol[R_co]):
    """A request to the writer of a partition."""

    async def apply(self, commit: CommitContext) -> R_co:
        """Carry it out; raises a TidemarkError, and changes nothing, if it is refused."""
        ...


class ExchangeResult(Protocol):
    """A result that goes back to a broker."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        """Written in place: a result that is appended to a frame is copied, bodies and all."""
        ...


class Action(Operation["Acted"], Protocol):
    """An operation that phase one of a sweep finds due, for phase two to ask for."""

    def write_to(self, proto: action_pb2.Action) -> None: ...


ExchangeDecoders = dict[str, Callable[[Any], Operation[ExchangeResult]]]
"""How operations of an exchange are decoded, by the field of the proto that carries them."""

ActionDecoders = dict[str, Callable[[Any], Operation["Acted"]]]
"""The same for the actions that sweeps delegate."""


class ActionOutcome(Enum):
    """How a delegated action ended; one that is refused is answered with its error."""

    DONE = "DONE"
    STALE = "STALE"


class Acted(NamedTuple):
    """The outcome of a delegated action."""

    outcome: ActionOutcome
    messages: int = 0

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.action.CopyFrom(self.to_proto())

    def to_proto(self) -> action_pb2.ActionResult:
        outcome = action_pb2.ActionOutcome.Value(f"ACTION_OUTCOME_{self.outcome.value}")
        return action_pb2.ActionResult(outcome=outcome, messages=self.messages)


STALE = Acted(ActionOutcome.STALE)
"""The state that an action was planned from has changed: it does nothing (L8)."""


class Removed(NamedTuple):
    """The counts of a deletion."""

    messages: int
    body_bytes: int = 0
    skipped: int = 0
    next_token: bytes = b""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.removed.messages = self.messages
        proto.removed.skipped = self.skipped
        proto.removed.next_page_token = self.next_token
