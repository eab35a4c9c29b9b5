"""Which member is to hold which partition: sticky, balanced, and the same in every process.

Pure. A partition stays with its holder while that one is a member, except for balance. Among
members with the same load, rendezvous hashing decides.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple


class Move(NamedTuple):
    """One partition changes its holder."""

    partition: int
    member_id: str


def place(partitions: int, members: Collection[str], before: Mapping[int, str]) -> dict[int, str]:
    """Give each partition without a holder to the least loaded member, and move no other.

    Without members nothing is held.
    """
    holders = {
        number: before[number] for number in range(partitions) if before.get(number) in members
    }
    load = _load(holders, members)
    for number in range(partitions):
        if number not in holders and members:
            least = min(load.values())
            candidates = [member for member in members if load[member] == least]
            holders[number] = max(candidates, key=lambda member: _score(number, member))
            load[holders[number]] += 1
    return dict(sorted(holders.items()))


def next_balancing_move(
    holders: Mapping[int, str],
    members: Collection[str],
    pinned: Collection[int] = frozenset(),
) -> Move | None:
    """The next move from the most to the least loaded member; None if loads are balanced.

    Pinned partitions stay, even if loads stay unbalanced for it.
    """
    if not members:
        return None
    load = _load(holders, members)
    movable = [number for number in holders if number not in pinned and holders[number] in load]
    least = min(load.values())
    most = max((load[holders[number]] for number in movable), default=least)
    if most - least <= 1:
        return None
    receivers = [member for member in members if load[member] == least]
    givable = [number for number in movable if load[holders[number]] == most]
    return max(
        (Move(number, member) for number in givable for member in receivers),
        key=lambda move: _score(*move),
    )


def _load(holders: Mapping[int, str], members: Collection[str]) -> Counter[str]:
    load = Counter(dict.fromkeys(members, 0))
    load.update(holder for holder in holders.values() if holder in load)
    return load


def _score(partition: int, member_id: str) -> tuple[bytes, str]:
    digest = blake2b(f"{partition}/{member_id}".encode(), digest_size=8).digest()
    return digest, member_id
