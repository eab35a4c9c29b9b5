"""The outbox: a dead letter reaches its topic, and once (L6)."""

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    operation,
    reserved,
    settle,
)
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tests.support.unowned_partition import undriven
from tidemark import errors, limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_DONE,
    ACTION_OUTCOME_REFUSED,
    ACTION_OUTCOME_STALE,
    Action,
    ClearOutbox,
    OutboxEntry,
)
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_DEAD_LETTER,
    SETTLE_ACTION_NACK,
    Redrive,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_ATTEMPTS_EXHAUSTED, SCAN_KIND_OUTBOX
from tidemark.names import partition_of

pytestmark = pytest.mark.slow


def clear_action(entry: OutboxEntry) -> Action:
    name = entry.destination_lmq_name
    return Action(clear_outbox=ClearOutbox(sequence=entry.sequence, destination_lmq_name=name))


@pytest.fixture
async def two_partitions(start_storage: StartStorage) -> RunningStorage:
    """The topic `jobs` in partition 0, its dead letters in partition 1."""
    storage = await start_storage(partitions=2)
    dead = next(name for name in map("dead-{}".format, range(99)) if partition_of(name, 2) == 1)
    await storage.create_topic("jobs", dead_letter_topic=dead, max_attempts=1)
    topic = await storage.create_topic(dead)
    async with storage.exchange(partition=1) as exchange:
        await apply_topic(exchange, topic)
    return storage


async def test_a_dead_letter_reaches_its_topic_once_whichever_service_dies_in_between(
    two_partitions: RunningStorage,
) -> None:
    """L6: append once, clear; a repeat of either is stale; restarted between any two steps."""
    storage = two_partitions
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"fine", b"bad", fairness_key="k"))
        got = await reserved(exchange, "jobs/a")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER, (1, 2), detail="bad!"))
        await exchange.ask(settle(got.receipt))

    await storage.restart()
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    (appended,) = await storage.delegate(entry, partition=1)
    await storage.restart()
    (again,) = await storage.delegate(entry, partition=1)
    clear = clear_action(entry.append_from_outbox.entry)
    (cleared,) = await storage.delegate(clear)
    await storage.restart()
    (cleared_again,) = await storage.delegate(clear)

    assert (appended.outcome, appended.messages) == (ACTION_OUTCOME_DONE, 1)
    assert again.outcome == ACTION_OUTCOME_STALE
    assert (cleared.outcome, cleared_again.outcome) == (ACTION_OUTCOME_DONE, ACTION_OUTCOME_STALE)
    assert await storage.due(SCAN_KIND_OUTBOX) == []
    async with storage.exchange(partition=1) as exchange:
        dead = entry.append_from_outbox.entry.destination_lmq_name
        copy = await reserved(exchange, dead)
        (message,) = MessageBatch.FromString(copy.body).messages
        assert (message.payload, copy.fairness_key) == (b"bad", "k")
        headers = dict(message.headers)
        assert int(headers.pop("tidemark-dead-time-ms")) > 0
        assert headers == {
            "tidemark-dead-reason": "rejected",
            "tidemark-dead-detail": "bad!",
            "tidemark-dead-topic": "jobs",
            "tidemark-dead-queue": "jobs/a",
            "tidemark-dead-offset": "1",
            "tidemark-dead-group": "default",
            "tidemark-dead-attempts": "0",
        }


async def test_exhausted_messages_go_to_the_dead_letter_topic(
    two_partitions: RunningStorage,
) -> None:
    """L6."""
    storage = two_partitions
    async with storage.exchange() as exchange:
        await exchange.ask(append("jobs/a", b"x"))
        got = await reserved(exchange, "jobs/a")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
        (bury,) = await storage.due(SCAN_KIND_ATTEMPTS_EXHAUSTED)
        await exchange.ask(operation(action=bury))

    (entry,) = await storage.due(SCAN_KIND_OUTBOX)
    (message,) = MessageBatch.FromString(entry.append_from_outbox.entry.body).messages
    assert message.headers["tidemark-dead-reason"] == "attempts_exhausted"
    assert message.headers["tidemark-dead-attempts"] == "1"
    assert (await storage.queue("jobs/a")).queue.messages == 0


async def test_a_dead_letter_waits_while_its_destination_refuses(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await storage.create_topic("doomed", dead_letter_topic="not-yet")
    await exchange.ask(append("doomed", b"x"))
    got = await reserved(exchange, "doomed")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    (entry,) = await storage.due(SCAN_KIND_OUTBOX)

    (refused,) = await exchange.ask_all(operation(action=entry))
    await storage.create_topic("not-yet")
    done = await exchange.ask(operation(action=entry))

    assert isinstance(refused, errors.TopicNotFound)
    assert done.outcome == ACTION_OUTCOME_DONE


async def test_a_refused_dead_letter_is_not_lost_when_a_later_one_is_appended(
    storage: RunningStorage,
) -> None:
    """L6: no loss; a sweep hands over a page of entries at once."""
    await storage.create_topic("first", dead_letter_topic="not-yet")
    await storage.create_topic("second", dead_letter_topic="jobs")
    async with storage.exchange() as exchange:
        for name in ("first", "second"):
            await exchange.ask(append(name, b"x"))
            got = await reserved(exchange, name)
            await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    await undriven(storage)
    entries = await storage.due(SCAN_KIND_OUTBOX)

    refused, _ = await storage.delegate(*entries)
    await storage.create_topic("not-yet")
    again = await storage.delegate(*entries)

    assert refused.outcome == ACTION_OUTCOME_REFUSED
    assert [each.outcome for each in again if each.outcome == ACTION_OUTCOME_REFUSED] == []
    assert (await storage.queue("not-yet")).queue.messages == 1
    assert (await storage.queue("jobs")).queue.messages == 1


async def test_large_dead_letters_can_be_read(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await storage.create_topic("large", dead_letter_topic="jobs")
    for number in range(5):
        await exchange.ask(append(f"large/{number}", *[bytes(1_000_000)] * 4))
        got = await reserved(exchange, f"large/{number}")
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))

    assert await storage.due(SCAN_KIND_OUTBOX) != []


async def test_the_largest_run_under_the_longest_names_reaches_its_dead_letter_topic(
    two_partitions: RunningStorage,
) -> None:
    """L6, S3: headers make a run larger than runs may be; a page of them must fit a frame."""
    storage = two_partitions
    lmq_name = "jobs/" + "l" * limits.LITE_NAME_BYTES_MAX
    payload = bytes(limits.RUN_BYTES_MAX // limits.RUN_MESSAGES_MAX - 8)
    async with storage.exchange() as exchange:
        for _ in range(2):
            await exchange.ask(append(lmq_name, *[payload] * limits.RUN_MESSAGES_MAX))
            got = await reserved(exchange, lmq_name, limits.PULL_MESSAGES_MAX)
            rejected = settle(got.receipt, SETTLE_ACTION_DEAD_LETTER, detail="d" * 1024)
            await exchange.ask(rejected)

    offsets: list[int] = []
    while entries := await storage.due(SCAN_KIND_OUTBOX):
        for action in entries:
            (appended,) = await storage.delegate(action, partition=1)
            assert appended.outcome == ACTION_OUTCOME_DONE
            entry = action.append_from_outbox.entry
            letters = MessageBatch.FromString(entry.body).messages
            offsets += [int(each.headers["tidemark-dead-offset"]) for each in letters]
            await storage.delegate(clear_action(entry))

    assert offsets == list(range(2 * limits.RUN_MESSAGES_MAX))


async def test_a_forged_source_is_left_where_it_is(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: anybody may publish to a dead-letter topic; no destination takes a name that is none."""
    forged = append("jobs")
    body = MessageBatch()
    body.messages.add(payload=b"x").headers["tidemark-dead-queue"] = "jobs/a/b"
    forged.append.count, forged.append.body = 1, body.SerializeToString()
    await exchange.ask(forged)

    redriven = await exchange.ask(operation(redrive=Redrive(lmq_name="jobs")))

    assert (redriven.messages, redriven.skipped) == (0, 1)
    assert await storage.due(SCAN_KIND_OUTBOX) == []
    assert (await storage.queue("jobs")).queue.messages == 1
