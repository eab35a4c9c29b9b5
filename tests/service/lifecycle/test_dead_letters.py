"""Dead letters and outboxes in the hands of an operator: listed, counted, deleted, dropped (L9)."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.service.lifecycle.conftest import StartSwept
from tests.support.dead_letters import ADA, BOB, DEAD, broker_with_dead_letters, die
from tests.support.local_broker import payloads_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.topic_pb2 import DeleteDeadLettersRequest, ListDeadLettersRequest
from tidemark.client.admin.admin import Admin
from tidemark.client.admin.values import DeadLetterCount, DeadLetters, OutboxEntry
from tidemark.client.transport.repeater import Repeater
from tidemark.errors import InvalidArgument, InvalidName, TopicNotFound
from tidemark.names import partition_of
from tidemark.rpc import open_channel

pytestmark = pytest.mark.slow


@pytest.fixture
async def swept(start: StartSwept) -> SweptBroker:
    return await broker_with_dead_letters(start)


@pytest.fixture
async def admin(swept: SweptBroker) -> AsyncIterator[Admin]:
    async with open_channel(swept.address) as channel:
        yield Admin(lambda: channel, Repeater(60_000, while_unreachable=False))


async def listed(admin: Admin, **chosen: Any) -> list[DeadLetters]:
    found = [each async for each in admin.list_dead_letters(DEAD, **chosen)]
    return sorted(found, key=lambda each: each.source_lmq_name)


async def waiting(admin: Admin, destination: str = "") -> list[OutboxEntry]:
    return [each async for each in admin.list_outbox(destination)]


async def test_dead_letters_are_listed_with_their_story(admin: Admin) -> None:
    """L9: messages that died together are one entry."""
    ada, bob = await listed(admin)

    assert (ada.messages, ada.source_lmq_name, ada.source_offset) == (2, ADA, 0)
    assert (ada.reason, ada.group, ada.detail) == ("rejected", "default", "why")
    assert (ada.attempt_count, bob.messages, bob.detail) == (0, 1, "other")
    assert ada.dead_time_ms is not None
    assert ada.partition == partition_of(DEAD, 2)


async def test_dead_letters_are_counted_by_reason_and_source(
    admin: Admin, swept: SweptBroker
) -> None:
    """L9: also those that never died, which any publisher may leave there."""
    await swept.publish(run_of(DEAD, b"published here"))
    ada, bob = (each for each in await listed(admin) if each.reason)

    counted = await admin.count_dead_letters(DEAD)
    only_bob = await admin.count_dead_letters(DEAD, reason="rejected", source_lmq_name=BOB)

    assert counted[0] == DeadLetterCount("rejected", ADA, 2, ada.dead_time_ms)
    assert sorted(counted[1:], key=lambda each: each.reason) == [
        DeadLetterCount("", "", 1, None),
        DeadLetterCount("rejected", BOB, 1, bob.dead_time_ms),
    ]
    assert only_bob == [DeadLetterCount("rejected", BOB, 1, bob.dead_time_ms)]


async def test_a_listing_goes_on_page_by_page(admin: Admin) -> None:
    """L9: each page is bounded."""
    by_one = await listed(admin, page_size=1)

    assert by_one == await listed(admin)
    assert len(by_one) == 2


async def test_only_what_the_filter_names_is_deleted(admin: Admin, swept: SweptBroker) -> None:
    """L9: by the filter of a redrive; it leaves a row in the history."""
    (_, bob) = await listed(admin)
    assert bob.dead_time_ms is not None
    none = await admin.delete_dead_letters(DEAD, reason="time_to_live")
    late = await admin.delete_dead_letters(DEAD, after_time_ms=bob.dead_time_ms + 1)
    counted = await admin.delete_dead_letters(DEAD, source_lmq_name=BOB, dry_run=True)
    before = await listed(admin)

    deleted = await admin.delete_dead_letters(DEAD, source_lmq_name=BOB)

    assert (none, late, counted, len(before), deleted) == (0, 0, 1, 2, 1)
    assert [each.source_lmq_name for each in await listed(admin)] == [ADA]
    assert (await swept.queue(DEAD)).messages == 2
    assert await waiting(admin) == []


async def test_a_limit_may_cut_what_died_together(admin: Admin, swept: SweptBroker) -> None:
    """L9."""
    deleted = await admin.delete_dead_letters(DEAD, source_lmq_name=ADA, limit=1)

    (left,) = await listed(admin, source_lmq_name=ADA)
    assert (deleted, left.messages) == (1, 1)
    assert sorted(each.payload for each in await admin.peek_queue(DEAD)) == [b"a2", b"b1"]


async def test_what_is_held_or_settled_is_neither_listed_nor_deleted(
    admin: Admin, swept: SweptBroker
) -> None:
    """L9: nothing under a live reservation is touched."""
    held = await swept.pull(DEAD, max_messages=3)

    while_held = (await listed(admin), await admin.delete_dead_letters(DEAD))
    settled = [(await swept.settle(each.receipt, Ack())).messages for each in held]

    assert while_held == ([], 0)
    assert sum(settled) == 3
    assert (await listed(admin), await admin.delete_dead_letters(DEAD)) == ([], 0)


async def test_more_than_one_page_is_deleted_with_progress(
    admin: Admin, swept: SweptBroker
) -> None:
    """L9: a long deletion is many bounded calls."""
    runs = [run_of(DEAD, b"x") for _ in range(450)]
    for each in range(0, len(runs), 50):
        await swept.publish(*runs[each : each + 50])
    steps: list[int] = []

    deleted = await admin.delete_dead_letters(DEAD, on_progress=steps.append)

    assert deleted == sum(steps) == 453
    assert len(steps) > 1
    assert (await swept.queue(DEAD)).messages == 0


async def test_what_is_wrong_in_a_call_is_refused(admin: Admin, swept: SweptBroker) -> None:
    """S3."""
    with pytest.raises(TopicNotFound):
        await admin.count_dead_letters("nowhere")
    with pytest.raises(InvalidArgument):
        await admin.delete_dead_letters(DEAD, reason="REJECTED")
    with pytest.raises(InvalidArgument):
        await admin.drop_outbox(DEAD, sequence=1)
    with pytest.raises(InvalidArgument):
        await admin.drop_outbox(DEAD, partition=2)
    with pytest.raises(InvalidName):
        await admin.drop_outbox("a/b/c")
    for token in ("nonsense", "0:zz", "7:00", "0:00"):
        with pytest.raises(InvalidArgument):
            await swept.topics.ListDeadLetters(
                ListDeadLettersRequest(lmq_name=DEAD, page_token=token)
            )
        with pytest.raises(InvalidArgument):
            await swept.topics.DeleteDeadLetters(
                DeleteDeadLettersRequest(lmq_name=DEAD, page_token=token)
            )
    assert (await swept.queue(DEAD)).messages == 3


# --- the outbox -----------------------------------------------------------------------------------


async def four_wait(swept: SweptBroker, admin: Admin) -> list[OutboxEntry]:
    """Dead letters of ada, one entry each, for a dead-letter topic that is away."""
    await admin.delete_topic(DEAD, force=True)
    for payload in (b"1", b"2", b"3", b"4"):
        await die(swept, ADA, payload)
    entries = await waiting(admin, DEAD)
    assert [each.messages for each in entries] == [1, 1, 1, 1]
    return entries


async def until_arrived(swept: SweptBroker, admin: Admin) -> list[bytes]:
    """The dead letters, once the outbox is empty, in their order."""

    async def ask() -> bool:
        return await waiting(admin) == []

    await swept.passing(ask)
    return [each.payload for each in await admin.peek_queue(DEAD)]


async def test_what_waits_in_an_outbox_is_listed_until_its_destination_refuses_no_more(
    admin: Admin, swept: SweptBroker
) -> None:
    """L9: with the time of the next try."""
    await four_wait(swept, admin)

    async def refused() -> bool:
        return all(each.retry_time_ms is not None for each in await waiting(admin))

    await swept.passing(refused)
    entries = await waiting(admin)
    elsewhere = await waiting(admin, "elsewhere")
    paged = [each async for each in admin.list_outbox(page_size=1)]
    await swept.create_topic(DEAD)

    assert [(each.destination_lmq_name, each.reason) for each in entries] == [
        (DEAD, "rejected")
    ] * 4
    assert {each.partition for each in entries} == {partition_of(ADA, 2)}
    assert [each.sequence for each in entries] == sorted(each.sequence for each in entries)
    assert elsewhere == []
    assert paged == entries
    assert await until_arrived(swept, admin) == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("dropped", [0, 1, 3], ids=["the first", "in between", "the last"])
async def test_the_others_arrive_when_one_entry_is_dropped(
    admin: Admin, swept: SweptBroker, dropped: int
) -> None:
    """L9, L6: no entry waits for one that was dropped, also after a restart."""
    entries = await four_wait(swept, admin)
    gone = entries[dropped]

    messages = await admin.drop_outbox(DEAD, partition=gone.partition, sequence=gone.sequence)
    again = await admin.drop_outbox(DEAD, partition=gone.partition, sequence=gone.sequence)
    await swept.create_topic(DEAD)
    await die(swept, ADA, b"5")

    left = [b"1", b"2", b"3", b"4", b"5"]
    del left[dropped]
    assert (messages, again) == (1, 0)
    assert await until_arrived(swept, admin) == left


async def test_all_that_waits_for_a_destination_is_dropped(
    admin: Admin, swept: SweptBroker
) -> None:
    """L9: what dies later finds its way."""
    await four_wait(swept, admin)

    elsewhere = await admin.drop_outbox("elsewhere")
    dropped = await admin.drop_outbox(DEAD)
    left = await waiting(admin)
    await swept.create_topic(DEAD)
    await die(swept, ADA, b"5")

    assert (elsewhere, dropped, left) == (0, 4, [])
    assert await until_arrived(swept, admin) == [b"5"]
    assert payloads_of([await swept.pulled(DEAD)]) == [b"5"]
