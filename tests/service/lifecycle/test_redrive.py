"""Redrive: dead letters go back to where they came from, by choice, by limit, or only counted."""

from typing import Any

import pytest

from tests.service.lifecycle.conftest import StartSwept
from tests.support.dead_letters import ADA, BOB, DEAD, broker_with_dead_letters
from tests.support.local_broker import TOPIC, payloads_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter
from tidemark.api.broker.v1.topic_pb2 import (
    DeadLetterFilter,
    DeleteTopicRequest,
    PeekQueueRequest,
    RedriveDeadLettersRequest,
    RedriveDeadLettersResponse,
)
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, InvalidName, TopicNotFound

pytestmark = pytest.mark.slow


@pytest.fixture
async def swept(start: StartSwept) -> SweptBroker:
    return await broker_with_dead_letters(start)


async def dead(swept: SweptBroker) -> list[bytes]:
    try:
        peeked = await swept.topics.PeekQueue(PeekQueueRequest(lmq_name=DEAD, max_messages=100))
    except Exception:
        return []
    return sorted(each.message.payload for each in peeked.messages)


async def redrive(
    swept: SweptBroker,
    lmq_name: str = DEAD,
    *,
    limit: int = 0,
    dry_run: bool = False,
    **chosen: Any,
) -> RedriveDeadLettersResponse:
    request = RedriveDeadLettersRequest(
        lmq_name=lmq_name, filter=DeadLetterFilter(**chosen), limit=limit, dry_run=dry_run
    )
    return await swept.topics.RedriveDeadLetters(request)


async def test_dead_letters_return_to_their_queues_as_they_were(swept: SweptBroker) -> None:
    """L6: by the same mechanism, without the headers of their death."""
    moved = await redrive(swept)

    ada, bob = await swept.pulled(ADA), await swept.pulled(BOB)
    assert (moved.messages, moved.orphans) == (3, 0)
    assert (payloads_of([ada]), payloads_of([bob])) == ([b"a1", b"a2"], [b"b1"])
    assert [dict(each.headers) for each in ada.batch.messages] == [{}, {}]
    assert ada.attempt_count == 0
    assert await dead(swept) == []


async def test_a_dry_run_counts_and_changes_nothing(swept: SweptBroker) -> None:
    counted = await redrive(swept, dry_run=True)

    assert counted.messages == 3
    assert await dead(swept) == [b"a1", b"a2", b"b1"]


async def test_only_what_matches_is_moved(swept: SweptBroker) -> None:
    by_reason = await redrive(swept, reason="attempts_exhausted")
    by_source = await redrive(swept, source_lmq_name=BOB)

    assert (by_reason.messages, by_source.messages) == (0, 1)
    assert payloads_of([await swept.pulled(BOB)]) == [b"b1"]
    assert await dead(swept) == [b"a1", b"a2"]


@pytest.mark.parametrize("reason", ["REJECTED", "redrive", "nonsense"])
async def test_an_unknown_reason_is_refused_with_the_known_ones(
    swept: SweptBroker, reason: str
) -> None:
    """S3: it would match nothing, silently."""
    with pytest.raises(InvalidArgument) as refused:
        await redrive(swept, reason=reason)

    assert refused.value.detail == (
        "reason is one of attempts_exhausted, time_to_live, rejected, max_wait_time_eviction, "
        f"not {reason!r}"
    )
    assert await dead(swept) == [b"a1", b"a2", b"b1"]


async def test_a_time_window_holds_at_its_bounds(swept: SweptBroker, clock: ManualClock) -> None:
    peeked = await swept.topics.PeekQueue(PeekQueueRequest(lmq_name=DEAD, max_messages=100))
    times = sorted(int(each.message.headers["tidemark-dead-time-ms"]) for each in peeked.messages)
    later = DeadLetterFilter()
    later.after_time.FromMilliseconds(times[-1] + 1)
    exactly = DeadLetterFilter()
    exactly.after_time.FromMilliseconds(times[0])
    exactly.before_time.FromMilliseconds(times[-1] + 1)

    none = await redrive(swept, dry_run=True, after_time=later.after_time)
    everything = await redrive(
        swept, dry_run=True, after_time=exactly.after_time, before_time=exactly.before_time
    )

    assert (none.messages, everything.messages) == (0, 3)


async def test_a_limit_may_cut_a_run(swept: SweptBroker) -> None:
    moved = await redrive(swept, limit=1, source_lmq_name=ADA)

    assert moved.messages == 1
    assert payloads_of([await swept.pulled(ADA)]) == [b"a1"]
    assert await dead(swept) == [b"a2", b"b1"]
    rest = await redrive(swept, source_lmq_name=ADA)
    assert rest.messages == 1
    assert payloads_of([await swept.pulled(ADA)]) == [b"a2"]


async def test_what_is_held_or_settled_stays(swept: SweptBroker) -> None:
    """R9's rule holds here too: nothing under a live reservation is touched."""
    held = await swept.pull(DEAD, max_messages=3)

    moved = await redrive(swept)

    assert sum(each.count for each in held) == 3
    assert moved.messages == 0
    assert [(await swept.settle(each.receipt, Ack())).messages for each in held] == [
        each.count for each in held
    ]
    assert (await redrive(swept)).messages == 0


async def test_messages_whose_source_is_gone_are_orphans_and_stay(swept: SweptBroker) -> None:
    for lmq_name in (ADA, BOB):
        assert await swept.pull(lmq_name) == []
    await swept.topics.DeleteTopic(DeleteTopicRequest(name=TOPIC, force=True))

    moved = await redrive(swept)

    assert (moved.messages, moved.orphans) == (0, 3)
    assert await dead(swept) == [b"a1", b"a2", b"b1"]


async def test_a_message_that_never_died_is_an_orphan(swept: SweptBroker) -> None:
    await swept.publish(run_of(DEAD, b"published here"))

    moved = await redrive(swept)

    assert (moved.messages, moved.orphans) == (3, 1)


async def test_more_than_one_page_is_moved_in_one_call(swept: SweptBroker) -> None:
    for number in range(210):  # each a run of its own
        await swept.publish(run_of(f"{TOPIC}/many", str(number).encode()))
    taken = 0
    while taken < 210:
        deliveries = await swept.pull(f"{TOPIC}/many", max_messages=1_000)
        for delivery in deliveries:
            await swept.settle(delivery.receipt, DeadLetter(reason="many"))
        taken += sum(each.count for each in deliveries)

    async def all_dead() -> bool:
        return (await swept.queue(DEAD)).messages == 213

    await swept.passing(all_dead)

    moved = await redrive(swept)

    assert moved.messages == 213


async def test_what_is_wrong_in_a_call_is_refused(swept: SweptBroker) -> None:
    """S3."""
    with pytest.raises(TopicNotFound):
        await redrive(swept, lmq_name="nowhere")
    with pytest.raises(InvalidName):
        await redrive(swept, lmq_name="")
    bad = RedriveDeadLettersRequest(lmq_name=DEAD)
    bad.filter.after_time.seconds = 1 << 60
    with pytest.raises(InvalidArgument) as refused:
        await swept.topics.RedriveDeadLetters(bad)
    assert refused.value.metadata["field"] == "after_time"
