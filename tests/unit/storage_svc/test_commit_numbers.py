"""Which commits a partition has, as witnesses ask for them."""

from storage_svc.engines.engine import Batch
from storage_svc.partition.commit_numbers import SPANS_MAX, CommitNumbers, Loss


class Opened:
    """A partition that is opened again and again, and its row."""

    def __init__(self) -> None:
        self.row: bytes | None = None
        self.found = 0

    def open(self, floor: int, commits: int) -> CommitNumbers:
        """Under an epoch whose numbers begin after the floor; commit so many times."""
        numbers = CommitNumbers(self.row, self.found, floor)
        if commits:
            self.found = numbers.last = numbers.before_first + commits
            batch = Batch()
            numbers.write(batch)
            self.row = next((value for _, _, value, _ in batch.operations), self.row)
        return numbers


def floor(epoch: int, chance: int = 0) -> int:
    return (epoch << 32) + chance


def test_numbers_without_epochs_have_no_gap_and_need_no_row() -> None:
    """S9: with RocksDB what is stored reaches up to its last commit, over restarts as well."""
    opened = Opened()
    opened.open(0, 10)

    numbers = opened.open(0, 5)

    assert opened.row is None
    assert [number for number in range(17) if numbers.has(number)] == list(range(16))


def test_commits_of_earlier_openings_are_known() -> None:
    """S9."""
    opened = Opened()
    opened.open(floor(1, 100), 10)
    opened.open(floor(2, 50), 0)
    opened.open(floor(3, 70), 5)

    numbers = opened.open(floor(4), 1)

    known = [0, floor(1, 101), floor(1, 110), floor(3, 71), floor(3, 75), floor(4) + 1]
    assert all(map(numbers.has, known))
    lost = [floor(1, 111), floor(2, 51), floor(3, 76), floor(4) + 2, floor(5)]
    assert not any(map(numbers.has, lost))


def test_a_lost_commit_is_missed_however_many_were_made_in_its_place() -> None:
    """S9: also if the epoch under which it was made was lost and given again."""
    opened = Opened()
    opened.open(floor(1), 60)
    lost = [floor(1) + 60, floor(2, 1_000_000) + 3]
    opened.found = floor(1) + 8

    opened.open(floor(2), 500)
    numbers = opened.open(floor(3), 500)

    assert not any(map(numbers.has, lost))
    assert numbers.has(floor(1) + 8)


def test_a_partition_of_which_everything_is_lost_misses_all_commits() -> None:
    """S9."""
    assert not CommitNumbers(None, 0, floor(1)).has(floor(1, 7))
    assert not CommitNumbers(None, 0, 0).has(1)


def test_after_a_confirmed_loss_only_what_is_made_then_can_be_missed() -> None:
    """S9: witnesses that report later, of the same loss, miss nothing."""
    opened = Opened()
    opened.open(floor(1), 60)
    opened.found = floor(1) + 8
    numbers = CommitNumbers(opened.row, opened.found, floor(2))
    numbers.accept(Loss(floor(1) + 60, opened.found))
    batch = Batch()
    numbers.write(batch)
    opened.row, opened.found = batch.operations[0][2], numbers.before_first + 4

    later = opened.open(floor(3, 9), 2)

    lost = [floor(1) + 60, floor(1) + 61, floor(7, 5)]
    assert all(map(later.has, [*lost, floor(1) + 8, opened.found]))
    assert not any(map(later.is_stored, lost))
    assert all(map(later.is_stored, [0, floor(1) + 8, opened.found]))
    assert later.has(numbers.before_first + 4)
    assert not later.has(numbers.before_first + 5)
    assert not later.has(opened.found + 1)
    assert later.before_first > numbers.before_first + 4


def test_the_row_does_not_grow_with_the_openings() -> None:
    """S9: what a witness saw long ago is not compared any more."""
    opened = Opened()
    numbers = opened.open(floor(1), 2)
    for epoch in range(2, 3 * SPANS_MAX):
        numbers = opened.open(floor(epoch), 2)

    assert opened.row is not None
    assert len(opened.row) <= 8 * 2 * (SPANS_MAX + 1)
    assert numbers.has(floor(2) + 1)
    assert not numbers.has(floor(3 * SPANS_MAX - 2) + 3)
