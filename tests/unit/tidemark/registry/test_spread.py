"""How partitions are spread over members: sticky and balanced (S8)."""

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from tidemark.registry.spread import Move, next_balancing_move, place

IDS = [f"m-{number}" for number in range(8)]
MEMBERS = st.lists(st.sampled_from(IDS), min_size=1, unique=True)
PARTITIONS = st.integers(1, 40)
BEFORE = st.dictionaries(st.integers(-2, 45), st.sampled_from([*IDS, "stranger"]))


def spread(partitions: int, members: list[str], before: dict[int, str]) -> dict[int, str]:
    """The assignment after all moves of a membership."""
    holders = place(partitions, members, before)
    while move := next_balancing_move(holders, members):
        holders[move.partition] = move.member_id
    return holders


def loads(holders: dict[int, str], members: list[str]) -> list[int]:
    counted = Counter(holders.values())
    assert counted.keys() <= set(members)
    return [counted[member] for member in members]


def moves(before: dict[int, str], after: dict[int, str]) -> set[int]:
    return {number for number, holder in after.items() if before.get(number) != holder}


@given(PARTITIONS, MEMBERS, BEFORE)
def test_every_partition_has_a_holder_and_loads_differ_by_at_most_one(
    partitions: int, members: list[str], before: dict[int, str]
) -> None:
    """S8."""
    after = spread(partitions, members, before)

    assert sorted(after) == list(range(partitions))
    assert max(loads(after, members)) - min(loads(after, members)) <= 1


@given(PARTITIONS, MEMBERS, BEFORE)
def test_no_partition_moves_without_need(
    partitions: int, members: list[str], before: dict[int, str]
) -> None:
    """S8: as few moves as any balanced assignment needs, and none if it is balanced."""
    after = spread(partitions, members, before)

    kept = {n: m for n, m in before.items() if 0 <= n < partitions and m in members}
    least, larger = divmod(partitions, len(members))
    # The members with most keep the larger shares.
    shares = [least + (place < larger) for place in range(len(members))]
    present = sorted(loads(kept, members), reverse=True)
    stay = sum(min(held, share) for held, share in zip(present, shares, strict=True))
    assert len(moves(before, after)) == partitions - stay
    assert spread(partitions, members, after) == after


@given(PARTITIONS, MEMBERS, BEFORE)
def test_a_member_that_joins_gets_its_share_and_nothing_else_moves(
    partitions: int, members: list[str], before: dict[int, str]
) -> None:
    """S8: at most ceil(P / (n + 1)) moves, all to the new member."""
    present = spread(partitions, members, before)

    after = spread(partitions, [*members, "new"], present)

    moved = moves(present, after)
    assert len(moved) <= ceil(partitions / (len(members) + 1))
    assert {after[number] for number in moved} <= {"new"}


@given(PARTITIONS, MEMBERS, BEFORE)
def test_only_the_partitions_of_a_member_that_leaves_move(
    partitions: int, members: list[str], before: dict[int, str]
) -> None:
    """S8."""
    present = spread(partitions, [*members, "leaver"], before)

    after = spread(partitions, members, present)

    assert moves(present, after) == {n for n, holder in present.items() if holder == "leaver"}


@given(PARTITIONS, MEMBERS, BEFORE)
def test_failover_moves_only_what_has_no_holder(
    partitions: int, members: list[str], before: dict[int, str]
) -> None:
    """S8: balance comes later, one partition at a time."""
    after = place(partitions, members, before)

    assert moves(before, after) == {n for n in range(partitions) if before.get(n) not in members}


def test_the_order_of_members_does_not_matter() -> None:
    """S8: every member computes the same."""
    one = spread(16, ["a", "b", "c"], {})

    assert spread(16, ["c", "a", "b"], {}) == one


def test_without_members_nothing_is_held() -> None:
    """S8."""
    assert spread(4, [], {0: "a"}) == {}
    assert next_balancing_move({0: "a"}, []) is None


def test_a_pinned_partition_is_not_moved_for_balance() -> None:
    """S8: an operator moved it."""
    holders = dict.fromkeys(range(4), "a")

    move = next_balancing_move(holders, ["a", "b"], pinned={0, 1, 2})
    none_left = next_balancing_move(holders, ["a", "b"], pinned={0, 1, 2, 3})

    assert move == Move(3, "b")
    assert none_left is None


def test_balancing_ends_after_the_moves_that_are_needed() -> None:
    """S8."""
    holders = dict.fromkeys(range(16), "a")
    made = 0

    while move := next_balancing_move(holders, ["a", "b", "c"]):
        holders[move.partition] = move.member_id
        made += 1

    assert made == 10
    assert sorted(Counter(holders.values()).values()) == [5, 5, 6]
