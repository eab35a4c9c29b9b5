"""How the rows of a pass are shared out among commits (R9)."""

from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import RUNS_PER_ROW_MAX, ApplyRetention
from storage_svc.operations.retention_rules import RetentionRow


def test_rows_of_many_runs_do_not_share_a_commit() -> None:
    """R9: a commit removes at most about as many runs as one row may name; no row is lost."""
    rows = [
        RetentionRow(queue_id=number, end_offset=messages)
        for number, messages in enumerate((1, 400, 700, 5_000, 1, 1))
    ]

    parts = list(ApplyRetention("p", RetentionType.EXPIRED, tuple(rows)).split())

    assert [row for part in parts for row in part.rows] == rows
    assert [len(part.rows) for part in parts] == [2, 1, 1, 2]
    assert RUNS_PER_ROW_MAX == 1_000
