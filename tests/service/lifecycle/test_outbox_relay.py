"""Outbox entries travel beside the sweep: one that cannot arrive delays nothing else (L1, L11)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64
from tests.service.lifecycle.conftest import StartSwept
from tests.support.faulty_reads import FaultyReads
from tests.support.local_broker import TOPIC, payloads_of, reason_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import DeadLetter, Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import (
    PARTITION_STATE_SERVING,
    ListPartitionsRequest,
    RedriveDeadLettersRequest,
)
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument
from tidemark.names import partition_of

REFUSING = 1_100
"""Destinations; one request could name 1 000 of them."""

CALL_TIMEOUT_MS = 60_000
"""After which a call to a partition that hangs fails."""


@pytest.fixture
async def reads() -> AsyncIterator[FaultyReads]:
    made = FaultyReads()
    yield made
    for hung in made.hung.values():
        hung.set()


def topic_in(partition: int, of: int = 2) -> str:
    """The name of a topic whose plain queue is in that partition."""
    names = (f"dead-{number}" for number in range(99))
    return next(name for name in names if partition_of(name, of) == partition)


async def rejected(swept: SweptBroker, lmq_name: str, payload: bytes) -> None:
    await swept.publish(run_of(lmq_name, payload))
    delivery = await swept.pulled(lmq_name)
    await swept.settle(delivery.receipt, DeadLetter())


def dead_letter_of(source: str) -> PublishRun:
    """What a dead letter looks like that came from a queue."""
    headers = {"tidemark-dead-queue": source, "tidemark-dead-reason": "rejected"}
    batch = MessageBatch(messages=[Message(payload=b"x", headers=headers)])
    return PublishRun(lmq_name="dead", batch=batch, count=1)


async def test_more_refusing_destinations_than_a_request_could_name_leave_their_source_alone(
    start: StartSwept, caplog: pytest.LogCaptureFixture
) -> None:
    """L6, L11: neither a fault of the source nor a delay of the destination that takes its own."""
    swept = await start()
    await swept.create_topic("dead")
    await swept.create_topic("full", queue_bytes_max=1)
    await swept.create_topic(TOPIC)
    for first in range(0, REFUSING, 100):
        letters = [dead_letter_of(f"full/{number}") for number in range(first, first + 100)]
        results = await swept.publish(*letters)
        assert {reason_of(result) for result in results} == {""}
    await swept.topics.RedriveDeadLetters(RedriveDeadLettersRequest(lmq_name="dead"))

    async def all_refused() -> bool:
        """Three times each, so that the pauses of all of them overlap."""
        refused = Counter(getattr(record, "destination", "") for record in caplog.records)
        return sum(count >= 3 for name, count in refused.items() if name) == REFUSING

    await swept.passing(all_refused)
    await swept.publish(dead_letter_of(f"{TOPIC}/ada"))
    await swept.topics.RedriveDeadLetters(RedriveDeadLettersRequest(lmq_name="dead"))
    delivery = await swept.pulled(f"{TOPIC}/ada")

    (info,) = (await swept.topics.ListPartitions(ListPartitionsRequest())).partitions
    status = await swept.lifecycle.status()
    assert payloads_of([delivery]) == [b"x"]
    assert (info.state, list(info.faults)) == (PARTITION_STATE_SERVING, [])
    assert status.failures == 0


async def test_a_hung_destination_partition_delays_no_sweep_and_no_other_destination(
    start: StartSwept, reads: FaultyReads, clock: ManualClock
) -> None:
    """L1, L6: scheduled messages of the source, and dead letters for another partition."""
    swept = await start(
        partitions=2, wrap=reads.around, lifecycle={"sweep_timeout_ms": CALL_TIMEOUT_MS}
    )
    hanging, sound = topic_in(1), topic_in(0)
    for destination, topic in ((hanging, "stuck"), (sound, "fine")):
        await swept.create_topic(destination)
        await swept.create_topic(topic, dead_letter_topic=destination)
    await swept.create_topic()
    (stuck, _) = swept.names_in(0, 2, topic="stuck")
    (fine, _) = swept.names_in(0, 2, topic="fine")
    (queue, _) = swept.names_in(0, 2)

    reads.hung[1] = asyncio.Event()
    await rejected(swept, stuck, b"waits")
    await swept.publish(run_of(queue, b"in time", delay_ms=1_000))
    await rejected(swept, fine, b"arrives")
    dead = await swept.pulled(sound)
    await clock.advance_ms(1_000)
    delivery = await swept.pulled(queue)
    waited_ms = clock.monotonic_ms()
    reads.hung.pop(1).set()
    late = await swept.pulled(hanging)

    assert payloads_of([dead, delivery, late]) == [b"arrives", b"in time", b"waits"]
    assert waited_ms < CALL_TIMEOUT_MS


@pytest.mark.parametrize("kind", ["corrupt", "lost"])
async def test_an_outbox_entry_that_cannot_be_read_holds_back_its_own_destination_alone(
    start: StartSwept, reads: FaultyReads, kind: str
) -> None:
    """V3, L11."""
    swept = await start(wrap=reads.around)
    for number in (1, 2):
        await swept.create_topic(f"dead-{number}")
        await swept.create_topic(f"topic-{number}", dead_letter_topic=f"dead-{number}")
    unreadable: set[tuple[Table, bytes]] = getattr(reads, kind)
    unreadable.add((Table.OUTBOX_BODIES, u64(1)))

    await rejected(swept, "topic-1", b"waits")
    await rejected(swept, "topic-2", b"arrives")
    sound = await swept.pulled("dead-2")
    status = await swept.lifecycle.status()
    unreadable.clear()
    late = await swept.pulled("dead-1")

    assert payloads_of([sound, late]) == [b"arrives", b"waits"]
    assert status.failures == 0


async def test_a_mistake_in_a_request_of_lifecycle_is_no_fault_of_the_partition(
    start: StartSwept, reads: FaultyReads
) -> None:
    """L11: it backs off and shows it; publishes go on."""
    swept = await start(wrap=reads.around, lifecycle={"sweep_interval_ms_max": 200})
    await swept.create_topic()
    reads.error = InvalidArgument("not what storage expects", field="kind")
    reads.failing.add(0)

    async def failed() -> bool:
        return (await swept.lifecycle.status()).failures > 1

    await swept.passing(failed)
    (published,) = await swept.publish(run_of(TOPIC, b"x"))
    status = await swept.lifecycle.status()

    assert reason_of(published) == ""
    assert "INVALID_ARGUMENT" in status.last_error
