"""How the rows of a pass are shared out among commits (R9)."""

from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import RUNS_PER_ROW_MAX, ApplyRetention, in_commits
from storage_svc.operations.retention_rules import RetentionRow


def test_rows_of_many_runs_do_not_share_a_commit() -> None:
    """R9: a commit removes at most about as many runs as one row may name; no row is lost."""
    rows = [
        RetentionRow(queue_id=number, end_offset=messages)
        for number, messages in enumerate((1, 400, 700, 5_000, 1, 1))
    ]

    commits = list(in_commits([ApplyRetention("p", RetentionType.EXPIRED, tuple(rows))]))

    assert [row for ((_, part),) in commits for row in part.rows] == rows
    assert [len(part.rows) for ((_, part),) in commits] == [2, 1, 1, 2]
    assert RUNS_PER_ROW_MAX == 1_000


def test_small_operations_share_a_commit() -> None:
    """R7: of topics, types and queues, in their order; a commit is filled and not exceeded."""
    single = RetentionRow(queue_id=1, end_offset=1)
    record = RetentionRow(table="history", age_ms=1)
    operations = [
        ApplyRetention("p", RetentionType.EXPIRED, (single,) * 100),
        ApplyRetention("p", RetentionType.COMPLETED, (single,) * 1_000),
        ApplyRetention("p", RetentionType.INACTIVE_QUEUE, (RetentionRow(queue_id=1),) * 3),
        ApplyRetention("p", RetentionType.OLD_RECORDS, (record,)),
        ApplyRetention("p", RetentionType.OLD_RECORDS, (record,)),
    ]

    commits = [
        [(place, len(part.rows)) for place, part in commit] for commit in in_commits(operations)
    ]

    assert commits == [[(0, 100), (1, 412)], [(1, 512)], [(1, 76), (2, 3)], [(3, 1)], [(4, 1)]]


def test_nothing_makes_no_commit() -> None:
    """R9."""
    assert list(in_commits([])) == []
