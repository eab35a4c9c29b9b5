"""The rules of claims themselves: what they accuse, and what they do not."""

from tests.model.histories.claims import Claim, ClaimRule, check_claims


def broken(*claims: Claim) -> set[ClaimRule]:
    return {rule for rule, _ in check_claims(claims)}


def test_brokers_that_take_turns_under_growing_versions_break_no_rule() -> None:
    """C5: also if one is refused in between, and comes back under a newer assignment."""
    assert (
        broken(
            Claim("a", 1, 1, 1),
            Claim("b", 2, 2, 2),
            Claim("a", 1, 1, None),
            Claim("a", 1, 3, 3),
            Claim("a", 9, 3, 4),  # started again
        )
        == set()
    )


def test_two_brokers_under_one_epoch_are_found() -> None:
    """C5."""
    assert broken(Claim("a", 1, 1, 1), Claim("b", 2, 2, 1)) == {ClaimRule.ONE_BROKER_PER_EPOCH}


def test_a_broker_that_gets_back_what_it_lost_under_the_same_version_is_found() -> None:
    """C5: also if the answers come in another order."""
    claims = Claim("a", 1, 2, 1), Claim("b", 2, 2, 2), Claim("a", 1, 2, 3)

    assert broken(*claims) == {ClaimRule.NO_CIRCLES}
    assert broken(*reversed(claims)) == {ClaimRule.NO_CIRCLES}


def test_a_broker_that_claims_again_after_a_refusal_is_found() -> None:
    """C5."""
    assert broken(Claim("a", 1, 2, None), Claim("a", 1, 2, None)) == {ClaimRule.REFUSED_ONCE}


def test_a_claim_that_is_granted_under_an_older_version_is_found() -> None:
    """C5: also if the answers come in another order."""
    claims = Claim("a", 1, 3, 1), Claim("b", 2, 2, 2)

    assert broken(*claims) == {ClaimRule.VERSIONS_GROW}
    assert broken(*reversed(claims)) == {ClaimRule.VERSIONS_GROW}


def test_the_claims_of_one_partition_are_no_excuse_for_another_and_no_accusation() -> None:
    """C5: epochs and versions are those of a partition."""
    assert broken(Claim("a", 1, 3, 1), Claim("b", 2, 2, 1, partition=1)) == set()
    assert broken(Claim("a", 1, 2, None), Claim("a", 1, 2, 1, partition=1)) == set()
