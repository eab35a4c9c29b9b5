"""Orders of an operator: which assignment moves a partition, and whether a member can be drained.

Pure. Members and processes that only look at them carry them out.
"""

from tidemark.errors import InvalidArgument
from tidemark.registry.protocol import Assignment, Member, View


def moved(view: View, partition: int, member_id: str, version: int) -> Assignment | None:
    """The assignment that moves a partition and keeps it there; None if it is there already.

    `version` is the next one. Raises InvalidArgument for a member that takes no partitions.
    """
    known = view.assignment
    if member_id not in view.members:
        raise InvalidArgument(f"there is no member {member_id}")
    if member_id in view.draining:
        raise InvalidArgument(f"{member_id} is drained: it takes no partitions")
    if known.holders.get(partition) == member_id and partition in known.pinned:
        return None
    holders = {**known.holders, partition: member_id}
    return Assignment(version, holders, known.pinned | {partition})


def drainable(view: View, member_id: str) -> Member:
    """The member; raises InvalidArgument if it is gone, or no other can take its partitions."""
    member = view.members.get(member_id)
    if member is None:
        raise InvalidArgument(f"there is no member {member_id}")
    if not view.members.keys() - view.draining - {member_id}:
        raise InvalidArgument(f"no other member can take the partitions of {member_id}")
    return member


def gone(member_id: str) -> InvalidArgument:
    """The member that was to be drained is not in the registry."""
    return InvalidArgument(f"{member_id} is gone, or has started again")
