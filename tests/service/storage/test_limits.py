"""Refusals: every field at its limit and one past it, quotas, and what is not there (S3)."""

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    body,
    operation,
    published,
    reserve,
    settle,
)
from tests.support.storage_client import RunningStorage
from tidemark import errors, limits
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    Append,
    Operation,
    PlaceGroup,
    Purge,
    RemoveGroup,
    RemoveQueue,
    SettleAction,
    Unschedule,
)
from tidemark.receipts import Receipt

HOURS_12_MS = limits.VISIBILITY_TIMEOUT_MS_MAX
RECEIPT = Receipt(0, 1, 1, 0).encode()
LONGEST = "x" * limits.GROUP_NAME_BYTES_MAX


def filled(body_bytes: int) -> bytes:
    """A run of one message whose body has exactly that many bytes."""
    overhead = len(body(bytes(body_bytes))) - body_bytes
    return bytes(body_bytes - overhead)


AT_THE_LIMIT = [
    append("jobs", *[b""] * limits.RUN_MESSAGES_MAX),
    append("jobs", filled(limits.RUN_BYTES_MAX)),
    append("jobs", b"x", delay_ms=limits.DELAY_MS_MAX),
    append("jobs", b"x", ttl_ms=limits.TTL_MS_MAX),
    append("jobs", b"x", fairness_key="k" * limits.FAIRNESS_KEY_BYTES_MAX),
    append("jobs", b"x", producer_id="p" * limits.PRODUCER_ID_BYTES_MAX, sequence=1),
    append("jobs/" + "l" * limits.LITE_NAME_BYTES_MAX, b"x"),
    reserve("jobs", limits.PULL_MESSAGES_MAX),
    reserve("jobs", visibility_ms=limits.VISIBILITY_TIMEOUT_MS_MIN),
    reserve("jobs", visibility_ms=HOURS_12_MS),
    reserve("jobs", group=LONGEST),
]
ONE_PAST = [
    (append("jobs", *[b""] * (limits.RUN_MESSAGES_MAX + 1)), "count"),
    (append("jobs", filled(limits.RUN_BYTES_MAX + 1)), "body"),
    (append("jobs"), "count"),
    (append("jobs", b"x", delay_ms=limits.DELAY_MS_MAX + 1), "delay_ms"),
    (append("jobs", b"x", ttl_ms=limits.TTL_MS_MAX + 1), "ttl_ms"),
    (append("jobs", b"x", fairness_key="k" * 129), "fairness_key"),
    (append("jobs", b"x", producer_id="p" * 129, sequence=1), "producer_id"),
    (append("jobs", b"x", sequence=1), "producer_id"),
    (append("jobs/" + "l" * 257, b"x"), "lite"),
    (append("jo bs", b"x"), "topic"),
    (reserve("jobs", 0), "max_messages"),
    (reserve("jobs", limits.PULL_MESSAGES_MAX + 1), "max_messages"),
    (reserve("jobs", visibility_ms=limits.VISIBILITY_TIMEOUT_MS_MIN - 1), "visibility_ms"),
    (reserve("jobs", visibility_ms=HOURS_12_MS + 1), "visibility_ms"),
    (reserve("jobs", group=LONGEST + "x"), "group"),
    (reserve("jobs", group=""), "group"),
    (settle(RECEIPT, SETTLE_ACTION_NACK, duration_ms=HOURS_12_MS + 1), "duration_ms"),
    (settle(RECEIPT, SETTLE_ACTION_EXTEND, duration_ms=HOURS_12_MS + 1), "visibility_ms"),
    (settle(RECEIPT, SETTLE_ACTION_EXTEND, duration_ms=49), "visibility_ms"),
    (settle(RECEIPT, SettleAction.ValueType(0)), "action"),
    (settle(RECEIPT, SettleAction.ValueType(99)), "action"),
    (Operation(), "kind"),
    (Operation(append=Append(lmq_name="jobs", count=2, body=body(b"x"))), "body"),
    (Operation(append=Append(lmq_name="jobs", count=1, body=b"\xff\xff")), "body"),
    (
        operation(place_group=PlaceGroup(lmq_name="jobs", group="g", start=StartPosition())),
        "start",
    ),
]


async def test_every_field_is_taken_up_to_its_limit(exchange: ExchangeClient) -> None:
    """S3: at the limit."""
    await exchange.ask(append("jobs", b"x"))

    outcomes = await exchange.ask_all(*AT_THE_LIMIT)

    assert [each for each in outcomes if isinstance(each, Exception)] == []


async def test_every_field_is_refused_one_past_its_limit(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: one past it; a machine-readable reason, and nothing is changed."""
    outcomes = await exchange.ask_all(*(each for each, _ in ONE_PAST))

    assert [each.metadata["field"] for each in outcomes] == [field for _, field in ONE_PAST]
    assert {each.reason for each in outcomes} == {"INVALID_ARGUMENT", "INVALID_NAME"}
    assert (await storage.info()).queues == 0


NOT_FOUND = [
    (append("no-such-topic", b"x"), "TOPIC_NOT_FOUND"),
    (reserve("jobs"), "QUEUE_NOT_FOUND"),
    (operation(remove_queue=RemoveQueue(lmq_name="jobs")), "QUEUE_NOT_FOUND"),
    (operation(remove_group=RemoveGroup(lmq_name="jobs", group="g")), "QUEUE_NOT_FOUND"),
    (operation(remove_group=RemoveGroup(lmq_name="jobs/a", group="g")), "GROUP_NOT_FOUND"),
    (operation(purge=Purge(lmq_name="jobs")), "QUEUE_NOT_FOUND"),
    (operation(unschedule=Unschedule(lmq_name="jobs", schedule_id=1)), "QUEUE_NOT_FOUND"),
    (operation(unschedule=Unschedule(lmq_name="jobs/a", schedule_id=1)), "RUN_NOT_SCHEDULED"),
]


async def test_what_is_not_there_is_named(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs/a", b"x"))

    outcomes = await exchange.ask_all(*(each for each, _ in NOT_FOUND))

    assert [each.reason for each in outcomes] == [reason for _, reason in NOT_FOUND]


async def test_a_version_of_the_topic_that_has_not_arrived_is_refused(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    topic = await storage.update_topic("jobs", max_attempts=3)

    with pytest.raises(errors.TopicVersionMismatch):
        await exchange.ask(append("jobs", b"x", topic_version=topic.version + 1))

    await exchange.ask(append("jobs", b"x", topic_version=topic.version))
    await exchange.ask(append("jobs", b"x", topic_version=topic.version - 1))


@pytest.mark.parametrize("quota", [{"queue_messages_max": 2}, {"queue_bytes_max": 24}])
async def test_a_queue_takes_messages_up_to_its_quota(
    storage: RunningStorage, exchange: ExchangeClient, quota: dict[str, int]
) -> None:
    """S3, S7: queue depth at the limit and one past it."""
    await storage.create_topic("small", **quota)
    assert len(body(b"12345678")) == 12

    await exchange.ask(append("small/a", b"12345678"))
    await exchange.ask(append("small/a", b"12345678"))
    refused = await exchange.ask_all(
        append("small/a", b""), append("small/b", b"1", b"2", b"3" * 30)
    )

    assert [each.reason for each in refused] == ["QUEUE_FULL", "QUEUE_FULL"]
    assert refused[0].retry_after_ms is not None
    assert (await storage.info()).queues == 1


async def test_a_disk_past_its_watermark_refuses_publishes_while_settles_go_on(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: a repeat of what is stored is still answered."""
    await exchange.ask_all(published(1, b"x"), append("jobs", b"y"))
    await storage.restart(disk_free_bytes_min=1 << 60)

    async with storage.exchange() as after:
        refused, repeated = await after.ask_all(append("jobs", b"z"), published(1, b"x"))
        first, second = (await after.ask(reserve("jobs"))).slices
        settled = await after.ask(settle(first.receipt))
        purged = await after.ask(operation(purge=Purge(lmq_name="jobs")))

    assert isinstance(refused, errors.DiskFull)
    assert refused.retry_after_ms is not None
    assert repeated.duplicate
    assert (settled.messages, purged.skipped) == (1, 1)
    assert second.count == 1
