"""The tally of passes, for their progress."""

from storage_svc.pass_tally import PASSES_MAX, PassTally


def test_rows_are_counted_by_pass_for_the_last_passes() -> None:
    """R11: a pass that is under way stays, however many ended before it."""
    tally = PassTally()
    for number in range(PASSES_MAX):
        tally.add(f"pass-{number}", planned=4, applied=1)

    tally.add("pass-0", applied=2)
    tally.add("new", planned=5)

    assert tally.rows("pass-0") == (4, 3)
    assert tally.rows("new") == (5, 0)
    assert tally.rows("pass-1") == (0, 0)
    assert tally.rows("never") == (0, 0)
