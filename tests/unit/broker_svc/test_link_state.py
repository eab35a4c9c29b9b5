"""What a broker may do with a partition, by assignments and by the answers of storage."""

from broker_svc.links.link_state import Assigned, Holding, LinkState

AWAY, CLAIMING, FAULTY, HELD, LEAVING = (
    LinkState.AWAY,
    LinkState.CLAIMING,
    LinkState.FAULTY,
    LinkState.HELD,
    LinkState.LEAVING,
)


def mine(version: int) -> Assigned:
    return Assigned(version, "me", "me:1")


def other(version: int, broker_id: str = "other") -> Assigned:
    return Assigned(version, broker_id, f"{broker_id}:1")


def held(version: int = 1) -> Holding:
    holding = Holding("me")
    holding.follow(mine(version))
    holding.claimed()
    return holding


def test_a_partition_is_claimed_only_where_it_is_assigned() -> None:
    """S8."""
    unassigned, assigned, elsewhere = Holding("me"), Holding("me"), Holding("me")
    assigned.follow(mine(1))
    elsewhere.follow(other(1))

    assert [each.state for each in (unassigned, assigned, elsewhere)] == [AWAY, CLAIMING, AWAY]
    assert [each.may_claim for each in (unassigned, assigned, elsewhere)] == [False, True, False]
    assert elsewhere.holder_address == "other:1"
    assert (unassigned.holder_address, assigned.holder_address) == ("", "")


def test_a_partition_is_served_until_its_new_holder_has_claimed_it() -> None:
    """S8, C5."""
    holding = held()

    holding.follow(other(2))
    leaving = (holding.state, holding.holder_address)
    holding.lost()

    assert leaving == (LEAVING, "")
    assert (holding.state, holding.holder_address) == (AWAY, "other:1")


def test_a_move_that_is_taken_back_in_time_changes_nothing() -> None:
    """S8: the epoch of the claim is still the newest one."""
    holding = held()
    holding.follow(other(2))
    holding.follow(mine(3))

    assert holding.state is HELD


def test_a_refused_claim_is_repeated_only_under_a_newer_assignment() -> None:
    """C5: or brokers with different views would fence each other in turn."""
    holding = held(4)
    holding.lost()
    again = holding.state
    holding.refused(4, "other:1")
    refused = (holding.state, holding.holder_address, holding.may_claim)
    holding.follow(mine(4))
    holding.follow(mine(5))

    assert again is CLAIMING
    assert refused == (AWAY, "other:1", False)
    assert (holding.state, holding.may_claim, holding.holder_address) == (CLAIMING, True, "")


def test_a_claim_that_is_refused_late_does_not_undo_a_newer_assignment() -> None:
    """C5."""
    holding = held(4)
    holding.lost()
    holding.follow(mine(6))
    holding.refused(4, "other:1")

    assert (holding.state, holding.holder_address) == (CLAIMING, "")


def test_an_older_assignment_is_ignored() -> None:
    """C5: a registry that lies or was lost does not take a partition away."""
    holding = held(4)
    holding.follow(other(3))

    assert (holding.state, holding.assigned) == (HELD, mine(4))


def test_a_holder_that_is_not_alive_has_no_address() -> None:
    """S8: clients wait at this broker, and do not try to reach it."""
    holding = Holding("me")
    holding.follow(Assigned(3, "gone"))
    before = holding.holder_address
    holding.follow(other(3, "gone"))  # it is back, at an address of its own

    assert (before, holding.holder_address) == ("", "gone:1")


def test_a_faulty_partition_is_claimed_again_until_it_is_assigned_elsewhere() -> None:
    """L1."""
    holding = Holding("me")
    holding.follow(mine(1))
    holding.lost(faulty=True)
    faulty = holding.state
    holding.follow(other(2))

    assert (faulty, holding.state) == (FAULTY, AWAY)


def test_a_claim_that_succeeds_after_the_partition_was_assigned_elsewhere_serves_meanwhile() -> (
    None
):
    """S8."""
    holding = Holding("me")
    holding.follow(mine(1))
    holding.follow(other(2))
    holding.claimed()

    assert holding.state is LEAVING
