"""The counts of the history beside an exact model: what each rule settles or removes (R5, R6).

Queues of all kinds are filled at random, and every stored run is planned for every rule, so that
storage alone decides. Between two rounds of passes new groups take what is kept for replay.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.retention_calls import Planned, apply, rows_of
from tests.support.retention_workload import (
    EVICTED,
    PARTITIONS,
    QueueModel,
    fill,
    take_for_new_groups,
)
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_COMPLETED,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    SCAN_TABLE_NAME_RUNS,
    ListRetentionHistoryRequest,
    RetentionType,
)
from tidemark.clock import ManualClock

QUEUES = 400
TOPICS = ("completed", "both", "waiting", "waiting-kept", "waiting-completed")
KINDS = (
    RETENTION_TYPE_MAX_WAIT_TIME_EVICTION,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_COMPLETED,
)

Counts = Counter[tuple[str, str]]
"""Messages by queue and type."""


async def run_passes(storage: RunningStorage) -> None:
    """Eviction and then retention, as two passes would have them applied."""
    for partition in range(PARTITIONS):
        for kind in KINDS:
            rows = [
                Planned(
                    row["queue_id"],
                    row["lmq_name"],
                    row["first_offset"],
                    row["first_offset"] + row["messages"],
                )
                for row in await rows_of(
                    storage.retention, SCAN_TABLE_NAME_RUNS, partition=partition
                )
            ]
            await apply(storage, kind, *rows, partition=partition)


async def counted(storage: RunningStorage) -> Counts:
    found: Counts = Counter()
    asked: dict[str, Any] = {"page_size": 1000}
    while asked.get("page_token") != "":
        answer = await storage.retention.ListRetentionHistory(ListRetentionHistoryRequest(**asked))
        for row in answer.rows:
            kind = RetentionType.Name(row.type).removeprefix("RETENTION_TYPE_").lower()
            found[row.lmq_name, kind] += row.messages
        asked["page_token"] = answer.next_page_token
    return found


async def stored(storage: RunningStorage) -> Counter[str]:
    """Messages by queue."""
    found: Counter[str] = Counter()
    for partition in range(PARTITIONS):
        for row in await rows_of(storage.retention, SCAN_TABLE_NAME_RUNS, partition=partition):
            found[row["lmq_name"]] += row["messages"]
    return found


def expect(models: Sequence[QueueModel], counts: Counts) -> None:
    """Add the counts of the next passes."""
    for model in models:
        for kind, messages in model.apply_rules().items():
            counts[model.lmq_name, kind] += messages


@pytest.mark.parametrize("seed", [1, 2])
async def test_each_rule_counts_what_it_settles_or_removes(
    start_storage: StartStorage, clock: ManualClock, seed: int
) -> None:
    """R5, R6, R2: messages that an eviction settles in a run that stays are counted by it; the rule
    that removes the run counts them as well, and no pass counts anything twice."""
    rng = random.Random(seed)
    storage = await start_storage(partitions=PARTITIONS)
    models = await fill(storage, clock, QUEUES, rng, TOPICS)
    expected: Counts = Counter()

    expect(models, expected)
    await run_passes(storage)
    first = await counted(storage)
    await run_passes(storage)
    repeated = await counted(storage)
    kept = {model.lmq_name: len(model.stored) for model in models if model.stored}
    of_first = Counter(expected)
    await take_for_new_groups(storage, models, rng)
    expect(models, expected)
    await run_passes(storage)
    second = await counted(storage)

    assert first == of_first
    assert repeated == first
    assert kept != {model.lmq_name: len(model.stored) for model in models if model.stored}
    assert second == expected
    assert await stored(storage) == Counter({m.lmq_name: len(m.stored) for m in models if m.stored})
    evicted_again = [
        name
        for name, kind in of_first
        if kind == EVICTED and second[name, kind] > first[name, kind]
    ]
    assert evicted_again, "new groups let messages wait again that had waited before"
