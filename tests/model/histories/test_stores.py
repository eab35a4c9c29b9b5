"""The rules of a shared store: a right log passes, and one broken rule at a time is seen."""

from storage_svc.engines.marks import Mark
from tests.model.histories.stores import Answered, StoreRule, check_store
from tests.support.shared_engine import Confirmed, TailLost


def commit(
    epoch: int, sequence: int, node: bytes = b"a", *, follows: bytes = b"", number: int = 0
) -> Confirmed:
    mark = Mark(epoch, node, sequence, b"%b%d" % (node, sequence))
    return Confirmed(0, mark, epoch, follows, number)


def broken(*log: Confirmed | TailLost) -> set[StoreRule]:
    return {rule for rule, _ in check_store(log, [])}


FIRST = commit(1, 1, number=7)
SECOND = commit(1, 2, follows=b"a1", number=8)


def test_commits_of_nodes_one_after_the_other_break_nothing() -> None:
    """S9."""
    verified = Confirmed(0, SECOND.mark, 1)

    assert broken(FIRST, SECOND, verified, commit(2, 3, b"b", follows=b"a2", number=9)) == set()


def test_an_epoch_that_was_lost_is_given_again() -> None:
    """S9: the store has lost the commits under it as well."""
    lost = TailLost(0, FIRST.mark)
    taken = commit(2, 2, b"b", follows=b"a1", number=9)
    again = commit(2, 2, b"c", follows=b"a1", number=11)

    assert broken(FIRST, taken, lost, again) == set()


def test_two_nodes_under_one_epoch_are_rejected() -> None:
    """S9."""
    other = commit(1, 2, b"b", follows=b"a1", number=9)

    assert broken(FIRST, other) == {StoreRule.ONE_NODE_PER_EPOCH}


def test_a_commit_that_does_not_follow_the_last_is_rejected() -> None:
    """S9: it was made on top of something else."""
    assert broken(FIRST, SECOND, commit(2, 2, b"b", follows=b"a1")) == {StoreRule.NO_FORK}
    assert broken(FIRST, commit(1, 3, follows=b"a1")) == {StoreRule.NO_FORK}


def test_a_number_that_a_lost_commit_had_is_rejected() -> None:
    """S9: a witness of the lost one would miss nothing."""
    lost = TailLost(0, FIRST.mark)
    again = commit(2, 2, b"b", follows=b"a1", number=8)

    assert broken(FIRST, SECOND, lost, again) == {StoreRule.ONE_COMMIT_PER_NUMBER}


def test_what_is_confirmed_below_the_newest_epoch_is_rejected() -> None:
    """S9."""
    stale = Confirmed(0, FIRST.mark, 2)

    assert broken(FIRST, stale) == {StoreRule.NO_STALE_CONFIRMATION}


def test_an_answer_to_what_was_asked_after_a_takeover_is_rejected() -> None:
    """S9, invariant 4: it may have been asked before, and answered after."""
    fresh, stale = Answered(0, 2, 2), Answered(0, 1, 2)

    assert [rule for rule, _ in check_store([], [fresh])] == []
    assert [rule for rule, _ in check_store([], [stale])] == [StoreRule.NO_STALE_ANSWER]
