"""The rights of this broker on one partition: a state machine over assignments and claims.

    AWAY -> CLAIMING -> HELD -> LEAVING -> AWAY

Pure. An assignment is a hint: it makes this broker claim, and storage decides. A claim that storage
refused is not repeated under the same version, so brokers never fence each other in turn. A broker
that an assignment takes a partition from serves it until the new holder has claimed it.
"""

from enum import Enum
from typing import Final, NamedTuple


class LinkState(Enum):
    """Whether this broker can use a partition."""

    AWAY = "away"
    """Another broker holds it, or is to claim it."""
    CLAIMING = "claiming"
    """This broker is to hold it. Storage does not answer, or the link is being made again."""
    FAULTY = "faulty"
    """The same, and storage answers that the partition cannot be claimed."""
    HELD = "held"
    LEAVING = "leaving"
    """Held and served, until the broker that it is assigned to has claimed it."""


class Assigned(NamedTuple):
    """The broker that an assignment names for a partition; no id: none."""

    version: int
    broker_id: str = ""
    address: str = ""


NOT_ASSIGNED: Final = Assigned(0)
_SERVING: Final = (LinkState.HELD, LinkState.LEAVING)


class Holding:
    """The state of one partition at one broker."""

    def __init__(self, broker_id: str) -> None:
        self.state = LinkState.AWAY
        self.assigned = NOT_ASSIGNED
        self._broker_id = broker_id
        self._refused_version = -1
        """The newest version under which a claim was refused."""
        self._fenced_by = ""
        """The address that came with a fence, until a newer assignment names a holder."""

    @property
    def is_assigned(self) -> bool:
        """Whether the newest assignment names this broker."""
        return bool(self.assigned.broker_id) and self.assigned.broker_id == self._broker_id

    @property
    def may_claim(self) -> bool:
        return self.is_assigned and self.assigned.version > self._refused_version

    @property
    def holder_address(self) -> str:
        """The address of the other broker that holds the partition; "" if none is known."""
        if self.state is not LinkState.AWAY:
            return ""
        return self._fenced_by or ("" if self.is_assigned else self.assigned.address)

    def follow(self, assigned: Assigned) -> None:
        """Take an assignment into account; an older one than the last is ignored."""
        if assigned.version < self.assigned.version or assigned == self.assigned:
            return
        self.assigned = assigned
        self._fenced_by = ""
        if self.state in _SERVING:
            self.state = LinkState.HELD if self.is_assigned else LinkState.LEAVING
        elif not self.may_claim:
            self.state = LinkState.AWAY
        elif self.state is LinkState.AWAY:
            self.state = LinkState.CLAIMING

    def claimed(self) -> None:
        """Storage has this broker as the holder."""
        self.state = LinkState.HELD if self.may_claim else LinkState.LEAVING

    def refused(self, version: int, holder_address: str) -> None:
        """Storage refused a claim under that version: another broker holds the partition."""
        self._refused_version = max(self._refused_version, version)
        if self.assigned.version <= version:
            self._fenced_by = holder_address
        self.state = LinkState.CLAIMING if self.may_claim else LinkState.AWAY

    def lost(self, *, faulty: bool = False) -> None:
        """The partition is not claimed any more, or could not be."""
        again = LinkState.FAULTY if faulty else LinkState.CLAIMING
        self.state = again if self.may_claim else LinkState.AWAY
