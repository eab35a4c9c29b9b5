"""Plans become bounded requests; pure, without Spark."""

from collections.abc import Collection
from typing import NamedTuple

import pyarrow as pa

from spark_batch.passes.calls import RUNS_PER_ROW_MAX, Call, fold, pack
from spark_batch.passes.rules import PLAN
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ABANDONED_GROUP,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_INACTIVE_QUEUE,
    SCAN_TABLE_NAME_HISTORY,
    RetentionPart,
)

Range = tuple[int, int, int]
ADDRESSES = {0: "a", 1: "a", 2: "b"}


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


def batch_of(plan: list[Row]) -> pa.RecordBatch:
    columns = dict(zip(PLAN, map(list, zip(*plan, strict=True)), strict=True))
    return pa.RecordBatch.from_pydict(columns)


def calls_of(*plans: list[Row], batch_size: int = 1000, failed: Collection[int] = ()) -> list[Call]:
    """As an executor makes them, with a batch per plan."""
    rows_max = min(batch_size, RUNS_PER_ROW_MAX)
    folded = (fold(batch_of(plan), rows_max) for plan in plans)
    return list(pack(folded, ADDRESSES, "pass", batch_size, failed))


def ranges(part: RetentionPart) -> list[Range]:
    return list(zip(part.queue_ids, part.first_offsets, part.end_offsets, strict=True))


def packed(plan: list[Row], batch_size: int = 1000) -> list[list[Range]]:
    """Queue, start and end of every row of every request."""
    return [
        [row for part in call.request.parts for row in ranges(part)]
        for call in calls_of(plan, batch_size=batch_size)
    ]


def test_runs_of_one_queue_become_one_row() -> None:
    """R7, R11: which counts as many planned rows as it stands for."""
    (call,) = calls_of([run(0), run(10), run(30), run(0, queue_id=2)])

    (part,) = call.request.parts
    assert ranges(part) == [(1, 0, 40), (2, 0, 10)]
    assert list(part.lmq_names) == ["t/1", "t/2"]
    assert list(part.planned_rows) == [3, 1]


def test_single_runs_of_many_queues_are_columns_as_they_were_planned() -> None:
    """P3: columns that have the same value in every row are left out."""
    (call,) = calls_of([run(7, queue_id, messages=1) for queue_id in range(1, 500)])

    (part,) = call.request.parts
    assert ranges(part) == [(queue_id, 7, 8) for queue_id in range(1, 500)]
    filled = {field.name for field, _ in part.ListFields()}
    assert filled == {"type", "queue_ids", "lmq_names", "first_offsets", "end_offsets"}


def test_single_runs_of_several_messages_are_named_as_such() -> None:
    """R7: otherwise each message could be a run, and commits would be small."""
    (call,) = calls_of([run(7, queue_id) for queue_id in range(1, 500)])

    (part,) = call.request.parts
    assert list(part.planned_rows) == [1] * 499


def test_runs_of_different_fairness_keys_stay_apart() -> None:
    (call,) = calls_of([run(0, key="a"), run(20, key="a"), run(10, key="b")])

    (part,) = call.request.parts
    assert list(part.fairness_keys) == ["a", "b"]
    assert ranges(part) == [(1, 0, 30), (1, 10, 20)]


def test_a_row_names_a_bounded_number_of_runs() -> None:
    """R7: so that no commit takes long."""
    plan = [run(10 * number) for number in range(2 * RUNS_PER_ROW_MAX + 1)]

    assert packed(plan) == [[(1, 0, 1000), (1, 1000, 2000), (1, 2000, 2010)]]


def test_a_call_takes_no_more_planned_rows_than_the_batch_size() -> None:
    """R7."""
    plan = [run(10 * number) for number in range(5)]

    assert packed(plan, batch_size=2) == [[(1, 0, 20)], [(1, 20, 40)], [(1, 40, 50)]]


def test_partitions_topics_and_types_of_one_service_share_a_call() -> None:
    """R7: each is a part of its own, because what was removed is counted by them."""
    plan = [
        run(0),
        run(10)._replace(topic="u"),
        run(20)._replace(topic="u", retention_type="completed"),
        run(30)._replace(topic="u", retention_type="completed", partition=1),
        run(40)._replace(topic="u", retention_type="completed", partition=2),
    ]

    calls = calls_of(plan)

    assert [(call.address, call.subjects) for call in calls] == [
        ("a", [("t", "expired"), ("u", "expired"), ("u", "completed"), ("u", "completed")]),
        ("b", [("u", "completed")]),
    ]
    assert [[part.partition for part in call.request.parts] for call in calls] == [
        [0, 0, 0, 1],
        [2],
    ]
    assert [call.partitions for call in calls] == [{0, 1}, {2}]
    assert {call.request.pass_id for call in calls} == {"pass"}
    assert calls[0].request.parts[0].type == RETENTION_TYPE_EXPIRED


def test_queues_and_records_are_sent_with_their_age() -> None:
    """R3, R4: storage compares it with its own clock."""
    queue = Row(0, "t", "inactive_queue", "t/1", 1, "", "", 0, 1, 0, 77, 7)
    records = Row(0, "history", "old_records", "", 0, "", "", 0, 12, 0, 0, 99)

    (call,) = calls_of([queue, queue._replace(queue_id=2), records])

    queues, old = call.request.parts
    assert (queues.type, queues.age_ms) == (RETENTION_TYPE_INACTIVE_QUEUE, 7)
    assert (list(queues.queue_ids), list(queues.before_ms)) == ([1, 2], [77, 77])
    assert (old.table, old.age_ms) == (SCAN_TABLE_NAME_HISTORY, 99)
    assert not old.queue_ids


def test_groups_are_sent_with_their_last_use() -> None:
    """R14."""
    group = Row(0, "t", "abandoned_group", "t/1", 1, "g", "", 0, 1, 0, 77)

    (call,) = calls_of([group, group._replace(group="h", before_ms=78)])

    (part,) = call.request.parts
    assert part.type == RETENTION_TYPE_ABANDONED_GROUP
    assert (list(part.queue_ids), list(part.groups)) == ([1, 1], ["g", "h"])
    assert list(part.before_ms) == [77, 78]


def test_a_lane_that_starts_over_is_a_row_of_its_own() -> None:
    """Two topics' readings may meet in one batch: offsets that go back are no range."""
    assert packed([run(10), run(20), run(0), run(20)]) == [[(1, 10, 30), (1, 0, 30)]]


def test_a_call_is_filled_up_to_the_batch_size_and_not_beyond() -> None:
    """R7: two queues of three runs each do not fit into a call of five."""
    plan = [run(10 * number, queue_id) for queue_id in (1, 2) for number in range(3)]

    assert packed(plan, batch_size=5) == [[(1, 0, 30)], [(2, 0, 30)]]


def test_a_call_is_filled_from_several_batches() -> None:
    """R7: the batches of a plan may be short."""
    plans = [[run(0, queue_id)] for queue_id in range(1, 6)]

    calls = calls_of(*plans, batch_size=2)

    assert [len(call.request.parts) for call in calls] == [2, 2, 1]


def test_a_partition_that_has_failed_gets_no_more_calls() -> None:
    """R9: also in the middle of a batch; the others do."""
    failed: set[int] = set()
    plan = [run(0, queue_id)._replace(partition=queue_id % 2) for queue_id in range(1, 7)]
    calls = pack([fold(batch_of(plan), 1)], ADDRESSES, "pass", 1, failed)

    first = next(calls)
    failed.add(1)

    assert first.partitions == {1}
    assert [call.partitions for call in calls] == [{0}, {0}, {0}]


def test_an_empty_plan_makes_no_call() -> None:
    schema = pa.schema([(name, pa.int64()) for name in PLAN])

    assert list(pack([fold(pa.RecordBatch.from_pylist([], schema), 100)], {}, "pass", 10)) == []
    assert list(pack([], {}, "pass", 1000)) == []
