"""Tables for a retention pass to plan from; reading them wakes no queue (R2, R5)."""

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from storage_svc.engines.engine import Table
from tests.support.counted_reads import count_reads
from tests.support.exchange_client import ExchangeClient, append, operation, reserve
from tests.support.retention_calls import UNKNOWN_TABLE, settled, table
from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON
from tidemark.api.storage.v1.exchange_pb2 import Purge
from tidemark.api.storage.v1.retention_pb2 import (
    SCAN_TABLE_NAME_GROUPS,
    SCAN_TABLE_NAME_HISTORY,
    SCAN_TABLE_NAME_MESSAGES_CONSUMED,
    SCAN_TABLE_NAME_QUEUES,
    SCAN_TABLE_NAME_RUNS,
    SCAN_TABLE_NAME_SYSTEM_METRICS,
    SCAN_TABLE_NAME_UNSPECIFIED,
    ScanTableName,
    ScanTableRequest,
)
from tidemark.api.storage.v1.storage_pb2 import DeleteTopicRequest
from tidemark.clock import ManualClock


async def test_tables_show_what_is_stored_without_waking_a_queue(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R2, R5: all that the rules need to know."""
    await exchange.ask_all(append("jobs/a", b"1", b"2", fairness_key="k"), append("jobs/a", b"3"))
    await storage.create_topic("other", consumption_records=CONSUMPTION_RECORDS_ON)
    await exchange.ask(append("other", b"x"))
    (got,) = (await exchange.ask(reserve("jobs/a", 1))).slices
    await storage.restart()

    runs = await table(storage, SCAN_TABLE_NAME_RUNS, topic="jobs")
    groups = await table(storage, SCAN_TABLE_NAME_GROUPS)
    queues = await table(storage, SCAN_TABLE_NAME_QUEUES, batch_rows=1)

    shown = [(row["fairness_key"], row["first_offset"], row["messages"]) for row in runs]
    assert sorted(shown) == [("", 2, 1), ("k", 0, 2)]
    assert [row["groups"] for row in runs] == [1, 1]
    assert [row["waiting_groups"] for row in runs] == [1, 1]
    assert sum(row["held"] for row in runs) == 1
    assert [(row["group"], row["unsettled"], row["inflight"]) for row in groups] == [
        ("default", 3, 1)
    ]
    assert [row["lmq_name"] for row in queues] == ["jobs/a", "other"]
    assert [row["materialized"] for row in queues] == [False, False]
    assert (await storage.info()).materialized_queues == 0
    assert got.count == 1


async def test_a_table_can_be_narrowed_to_columns_topic_and_time(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    await storage.update_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    start_ms = clock.wall_ms()
    for _ in range(3):
        await exchange.ask(append("jobs", b"x"))
        await settled(exchange, "jobs")
        await clock.advance_ms(10)
    asked = ScanTableRequest(columns=["start"], topic="jobs")
    asked.after_time.FromMilliseconds(start_ms + 10)
    asked.before_time.FromMilliseconds(start_ms + 20)
    fields = {name.name: value for name, value in asked.ListFields()}

    rows = await table(storage, SCAN_TABLE_NAME_MESSAGES_CONSUMED, **fields)

    assert rows == [{"start": 1}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lmq_name": "jobs/a7"}, ["jobs/a7"]),
        ({"lmq_name": "jobs"}, ["jobs"]),
        ({"lmq_name": "jobs/a7", "topic": "jobs", "prefix": "jobs/a"}, ["jobs/a7"]),
        ({"lmq_name": "jobs/a7", "topic": "other"}, []),
        ({"lmq_name": "jobs/a7", "prefix": "jobs/b"}, []),
        ({"lmq_name": "jobs/none"}, []),
        ({"prefix": "jobs/b"}, ["jobs/b1", "jobs/b2"]),
        ({"prefix": "jobs/b", "topic": "jobs"}, ["jobs/b1", "jobs/b2"]),
        ({"prefix": "jobs/b", "topic": "other"}, []),
        ({"prefix": "oth"}, ["other", "other/x"]),
        ({"prefix": "other/"}, ["other/x"]),
        ({"prefix": "oth", "topic": "other"}, ["other", "other/x"]),
    ],
)
@pytest.mark.parametrize("name", [SCAN_TABLE_NAME_QUEUES, SCAN_TABLE_NAME_RUNS])
async def test_a_queue_or_a_prefix_costs_what_it_holds_and_not_what_all_queues_hold(
    storage: RunningStorage,
    exchange: ExchangeClient,
    monkeypatch: pytest.MonkeyPatch,
    name: ScanTableName.ValueType,
    fields: dict[str, str],
    expected: list[str],
) -> None:
    """P2: counted in rows that are read from the engine."""
    await storage.create_topic("other", consumption_records=CONSUMPTION_RECORDS_ON)
    names = [f"jobs/a{number}" for number in range(100)]
    names += ["jobs", "jobs/b1", "jobs/b2", "other", "other/x"]
    await exchange.ask_all(*(append(each, b"x") for each in names))

    reads = count_reads(monkeypatch)
    rows = await table(storage, name, **fields)

    assert sorted(row["lmq_name"] for row in rows) == expected
    assert reads[Table.CATALOG] <= 3
    assert reads[Table.RUN_HEADERS] <= 3


async def test_records_can_be_narrowed_to_a_queue_or_a_prefix(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """P2."""
    await storage.update_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    for lmq_name in ("jobs/a", "jobs/b"):
        await exchange.ask(append(lmq_name, b"x"))
        await settled(exchange, lmq_name)
        await exchange.ask(append(lmq_name, b"y"))
        await exchange.ask(operation(purge=Purge(lmq_name=lmq_name)))

    found = {
        (name, option): [row["lmq_name"] for row in await table(storage, name, **{option: value})]
        for name in (SCAN_TABLE_NAME_MESSAGES_CONSUMED, SCAN_TABLE_NAME_HISTORY)
        for option, value in (("lmq_name", "jobs/a"), ("prefix", "jobs/b"), ("topic", "jobs"))
    }

    for name in (SCAN_TABLE_NAME_MESSAGES_CONSUMED, SCAN_TABLE_NAME_HISTORY):
        assert found[name, "lmq_name"] == ["jobs/a"]
        assert found[name, "prefix"] == ["jobs/b"]
        assert found[name, "topic"] == ["jobs/a", "jobs/b"]


async def test_a_queue_whose_topic_is_gone_keeps_no_table_from_being_read(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    await storage.create_topic("gone")
    await exchange.ask_all(append("gone", b"x"), append("jobs", b"x"))
    await storage.storage.DeleteTopic(DeleteTopicRequest(name="gone"))
    await storage.restart()

    rows = await table(storage, SCAN_TABLE_NAME_RUNS)

    assert "jobs" in [row["lmq_name"] for row in rows]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"name": SCAN_TABLE_NAME_UNSPECIFIED}, "INVALID_ARGUMENT"),
        ({"columns": ["no-such-column"]}, "INVALID_ARGUMENT"),
        ({"batch_rows": 65_537}, "INVALID_ARGUMENT"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
        ({"lmq_name": "a/b/c"}, "INVALID_NAME"),
        ({"name": SCAN_TABLE_NAME_SYSTEM_METRICS, "topic": "a"}, "INVALID_ARGUMENT"),
        ({"name": SCAN_TABLE_NAME_SYSTEM_METRICS, "prefix": "a"}, "INVALID_ARGUMENT"),
        pytest.param({"name": UNKNOWN_TABLE}, "INVALID_ARGUMENT"),
        ({"after_time": Timestamp(nanos=-1)}, "INVALID_ARGUMENT"),
        ({"before_time": Timestamp(seconds=2**62)}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_table_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    asked: dict[str, Any] = {"name": SCAN_TABLE_NAME_RUNS, "batch_rows": 65_536}
    assert await table(storage, **asked) == []

    with pytest.raises(errors.TidemarkError) as refused:
        await table(storage, **{**asked, **fields})

    assert refused.value.reason == reason
