"""Plans become bounded requests; pure, without Spark."""

from typing import NamedTuple

import pyarrow as pa

from spark_batch.passes.calls import RUNS_PER_ROW_MAX, Call, fold, pack
from spark_batch.passes.rules import PLAN
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_INACTIVE_QUEUE,
    SCAN_TABLE_NAME_HISTORY,
)

Range = tuple[int, int, int]


class Row(NamedTuple):
    """One row of a plan, in the order of `rules.PLAN`."""

    partition: int
    topic: str
    retention_type: str
    lmq_name: str
    queue_id: int
    group: str
    fairness_key: str
    first_offset: int
    messages: int
    bytes: int
    before_ms: int
    age_ms: int = 0


def run(first_offset: int, queue_id: int = 1, messages: int = 10, key: str = "") -> Row:
    return Row(0, "t", "expired", f"t/{queue_id}", queue_id, "", key, first_offset, messages, 9, 5)


def calls_of(plan: list[Row], batch_size: int = 1000) -> list[Call]:
    """As an executor makes them of one batch."""
    columns = dict(zip(PLAN, map(list, zip(*plan, strict=True)), strict=True))
    folded = fold(pa.RecordBatch.from_pydict(columns), min(batch_size, RUNS_PER_ROW_MAX))
    return list(pack(folded, "pass", batch_size))


def packed(plan: list[Row], batch_size: int = 1000) -> list[list[Range]]:
    """Queue, start and end of every row of every request."""
    return [
        [(row.queue_id, row.range.start, row.range.end) for row in call.request.rows]
        for call in calls_of(plan, batch_size)
    ]


def test_runs_of_one_queue_become_one_row() -> None:
    assert packed([run(0), run(10), run(30), run(0, queue_id=2)]) == [[(1, 0, 40), (2, 0, 10)]]


def test_runs_of_different_fairness_keys_stay_apart() -> None:
    (call,) = calls_of([run(0, key="a"), run(20, key="a"), run(10, key="b")])

    rows = [(row.fairness_key, row.range.start, row.range.end) for row in call.request.rows]
    assert rows == [("a", 0, 30), ("b", 10, 20)]


def test_a_row_names_a_bounded_number_of_runs() -> None:
    """R7: so that no commit takes long."""
    plan = [run(10 * number) for number in range(RUNS_PER_ROW_MAX + 1)]

    assert packed(plan) == [[(1, 0, 1000), (1, 1000, 1010)]]


def test_a_call_takes_no_more_planned_rows_than_the_batch_size() -> None:
    """R7."""
    plan = [run(10 * number) for number in range(5)]

    assert packed(plan, batch_size=2) == [[(1, 0, 20)], [(1, 20, 40)], [(1, 40, 50)]]


def test_partitions_topics_and_types_are_calls_of_their_own() -> None:
    plan = [
        run(0),
        run(10)._replace(topic="u"),
        run(20)._replace(topic="u", retention_type="completed"),
        run(30)._replace(topic="u", retention_type="completed", partition=1),
    ]

    calls = calls_of(plan)

    assert [(call.topic, call.retention_type, call.request.partition) for call in calls] == [
        ("t", "expired", 0),
        ("u", "expired", 0),
        ("u", "completed", 0),
        ("u", "completed", 1),
    ]
    assert {call.request.pass_id for call in calls} == {"pass"}
    assert calls[0].request.type == RETENTION_TYPE_EXPIRED


def test_queues_and_records_are_sent_with_their_age() -> None:
    """R3, R4: storage compares it with its own clock."""
    queue = Row(0, "t", "inactive_queue", "t/1", 1, "", "", 0, 1, 0, 77, 7)
    records = Row(0, "history", "old_records", "", 0, "", "", 0, 12, 0, 0, 99)

    queues, old = calls_of([queue, queue._replace(queue_id=2), records])

    assert queues.request.type == RETENTION_TYPE_INACTIVE_QUEUE
    assert [(row.queue_id, row.before_ms, row.age_ms) for row in queues.request.rows] == [
        (1, 77, 7),
        (2, 77, 7),
    ]
    (row,) = old.request.rows
    assert (row.table, row.age_ms) == (SCAN_TABLE_NAME_HISTORY, 99)


def test_a_lane_that_starts_over_is_a_row_of_its_own() -> None:
    """Two topics' readings may meet in one batch: offsets that go back are no range."""
    assert packed([run(10), run(20), run(0), run(20)]) == [[(1, 10, 30), (1, 0, 30)]]


def test_a_call_is_filled_up_to_the_batch_size_and_not_beyond() -> None:
    """R7: two queues of three runs each do not fit into a call of five."""
    plan = [run(10 * number, queue_id) for queue_id in (1, 2) for number in range(3)]

    assert packed(plan, batch_size=5) == [[(1, 0, 30)], [(2, 0, 30)]]


def test_an_empty_plan_makes_no_call() -> None:
    schema = pa.schema([(name, pa.int64()) for name in PLAN])

    assert list(fold(pa.RecordBatch.from_pylist([], schema), 100)) == []
    assert list(pack([], "pass", 1000)) == []
