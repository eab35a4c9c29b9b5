"""The takeover of an exclusive queue as a state machine: OWNED, TRANSFERRING, OWNED (E9).

Pure: events in, a new state out; an event that a state does not allow raises and changes nothing.
During a transfer nothing is delivered. A claim whose outcome is unknown stays TRANSFERRING until
storage has been read.

    state         event                        next
    VACANT        transfer_began(B)            TRANSFERRING(to B)
    VACANT        confirmed(A, n)              OWNED(A, n)
    OWNED(A, n)   transfer_began(B)            TRANSFERRING(to B, from A, n)
    OWNED(A, n)   confirmed(A, n)              OWNED(A, n)
    TRANSFERRING  transferred(B, m > n)        OWNED(B, m)
    TRANSFERRING  refused()                    the state before
    TRANSFERRING  outcome_unknown()            TRANSFERRING, to be read
    any           read(X, m >= n)              OWNED(X, m), or VACANT(m) without an X
"""

from typing import NamedTuple


class IllegalEvent(Exception):
    """The state does not allow the event: a bug."""


class Owner(NamedTuple):
    """A client and the epoch of its ownership."""

    client_id: str
    epoch: int


class Vacant(NamedTuple):
    """No owner; `epoch` is the last known one, 0 if there is none."""

    epoch: int = 0


class Owned(NamedTuple):
    """One client is the owner."""

    owner: Owner


class Transferring(NamedTuple):
    """A takeover is in progress; with `must_read` its outcome is unknown until storage is read."""

    to_client_id: str
    before: Vacant | Owned
    must_read: bool = False


State = Vacant | Owned | Transferring


def epoch_of(state: State) -> int:
    """The highest epoch in the state."""
    match state:
        case Vacant(epoch):
            return epoch
        case Owned(owner):
            return owner.epoch
        case Transferring(_, before, _):
            return epoch_of(before)


def transfer_began(state: State, to_client_id: str) -> Transferring:
    match state:
        case Vacant() | Owned():
            return Transferring(to_client_id, state)
        case Transferring():
            raise IllegalEvent("one transfer at a time")


def confirmed(state: State, owner: Owner) -> Owned:
    """Storage has compared: the client is the owner."""
    match state:
        case Vacant(epoch) if owner.epoch >= epoch:
            return Owned(owner)
        case Owned(current) if owner.epoch >= current.epoch:
            return Owned(owner)
    raise IllegalEvent(f"{owner} cannot be confirmed in {state}")


def transferred(state: State, epoch: int) -> Owned:
    """Storage has raised the epoch for the new owner, or confirmed that it already was the
    owner."""
    match state:
        case Transferring(to_client_id, before, _) if epoch >= epoch_of(before):
            return Owned(Owner(to_client_id, epoch))
    raise IllegalEvent(f"epoch {epoch} cannot end {state}")


def refused(state: State) -> Vacant | Owned:
    """Storage refused the takeover and changed nothing."""
    match state:
        case Transferring(_, before, False):
            return before
    raise IllegalEvent(f"no takeover is pending in {state}")


def outcome_unknown(state: State) -> Transferring:
    """The link broke during the takeover."""
    match state:
        case Transferring():
            return state._replace(must_read=True)
    raise IllegalEvent(f"no takeover is pending in {state}")


def read(state: State, client_id: str, epoch: int) -> Vacant | Owned:
    """Storage was read: the client it names is the owner."""
    if epoch < epoch_of(state):
        raise IllegalEvent(f"epoch {epoch} is older than {state}")
    return Owned(Owner(client_id, epoch)) if client_id else Vacant(epoch)
