"""The takeover of an exclusive queue as a state machine: OWNED, TRANSFERRING, OWNED (E9).

Pure: events in, a new state out; an event that a state does not allow raises and changes nothing.
While a transfer is under way nothing is delivered to anybody. A claim whose outcome is unknown
stays TRANSFERRING until storage has been read.

    state         event                        next
    VACANT        transfer_began(B)            TRANSFERRING(to B)
    VACANT        confirmed(A, n)              OWNED(A, n)
    OWNED(A, n)   transfer_began(B)            TRANSFERRING(to B, from A, n)
    OWNED(A, n)   confirmed(A, n)              OWNED(A, n)
    TRANSFERRING  transferred(B, m > n)        OWNED(B, m)
    TRANSFERRING  refused()                    what was before
    TRANSFERRING  outcome_unknown()            TRANSFERRING, to be read
    any           read(X, m >= n)              OWNED(X, m), or VACANT(m) without an X
"""

from typing import NamedTuple


class IllegalEvent(Exception):
    """The state does not allow the event: a mistake of the program."""


class Owner(NamedTuple):
    """A client and the epoch under which it owns."""

    client_id: str
    epoch: int


class Vacant(NamedTuple):
    """No owner; `epoch` is the last one known, 0 if none is."""

    epoch: int = 0


class Owned(NamedTuple):
    """One client owns."""

    owner: Owner


class Transferring(NamedTuple):
    """Ownership is on its way; `before` is what it was, `must_read` that only storage knows."""

    to_client_id: str
    before: Vacant | Owned
    must_read: bool = False


State = Vacant | Owned | Transferring


def epoch_of(state: State) -> int:
    """The highest epoch that the state knows of."""
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
    """Storage has raised the epoch for the new owner, or said that it owned already."""
    match state:
        case Transferring(to_client_id, before, _) if epoch >= epoch_of(before):
            return Owned(Owner(to_client_id, epoch))
    raise IllegalEvent(f"epoch {epoch} cannot end {state}")


def refused(state: State) -> Vacant | Owned:
    """Storage has said no, and nothing was changed."""
    match state:
        case Transferring(_, before, False):
            return before
    raise IllegalEvent(f"nothing was asked in {state}")


def outcome_unknown(state: State) -> Transferring:
    """The link broke under the claim."""
    match state:
        case Transferring():
            return state._replace(must_read=True)
    raise IllegalEvent(f"nothing was asked in {state}")


def read(state: State, client_id: str, epoch: int) -> Vacant | Owned:
    """Storage was read: the client that it names is the owner."""
    if epoch < epoch_of(state):
        raise IllegalEvent(f"epoch {epoch} is older than {state}")
    return Owned(Owner(client_id, epoch)) if client_id else Vacant(epoch)
