"""Owners of exclusive queues."""

from typing import NamedTuple

from storage_svc.operations.administration import Start


class TakeOwnership(NamedTuple):
    """Raise the owner epoch of (group, queue) for a client, revoking what others hold (E9)."""

    lmq_name: str
    group: str
    client_id: str
    start: Start | None = None


class ConfirmOwnership(NamedTuple):
    """Compare (client, epoch) with what is stored; changes nothing (E7)."""

    lmq_name: str
    group: str
    client_id: str = ""
    epoch: int = 0


class DropOwnership(NamedTuple):
    """Give ownership up, if (client, epoch) is what is stored."""

    lmq_name: str
    group: str
    client_id: str
    epoch: int


class Ownership(NamedTuple):
    """Who owns (group, queue) after the operation."""

    client_id: str
    epoch: int
    matched: bool
    revoked: tuple[int, ...] = ()
