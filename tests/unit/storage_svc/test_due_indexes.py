"""Where scans of the due indexes start."""

from storage_svc.partition.due_indexes import DueIndexes


def test_a_scan_starts_where_the_one_before_it_ended() -> None:
    """V5: deleted entries at the front of an index cost nothing."""
    indexes = DueIndexes()

    indexes.scanned("deadlines", 500)

    assert indexes.mark_ms("deadlines") == 500
    assert indexes.mark_ms("delays") == 0


def test_an_entry_that_is_due_earlier_is_not_passed_over() -> None:
    """L7: a scan starts at the earliest entry, also at one that was added behind the mark."""
    indexes = DueIndexes()
    indexes.scanned("schedule", 500)

    indexes.added("schedule", 700)
    indexes.added("schedule", 300)

    assert indexes.mark_ms("schedule") == 300
