"""Standing reserves: the commit that makes messages ready hands them out (C4, E8, E9, S2, V1)."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from storage_svc.partition.frames import EMBEDDED
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    settle,
)
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tests.support.unowned_partition import undriven
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import (
    EVICTION_OUTCOME_EVICTED,
    SUBSCRIPTION_KIND_EXCLUSIVE,
)
from tidemark.api.storage.v1.action_pb2 import Action
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_NACK,
    ExpireDue,
    LeaveGroup,
    Operation,
    PlaceGroup,
    Recall,
    RemoveGroup,
    RemoveQueue,
    ReserveResult,
    TakeOwnership,
    Unmaterialize,
)
from tidemark.clock import ManualClock
from tidemark.limits import FRAME_BYTES_MAX, RUN_BYTES_MAX

VISIBILITY_MS = 20_000  # below a minute, at which storage records its own figures

Message: TypeAlias = Callable[[ExchangeClient, ManualClock], Awaitable[Operation]]
"""Leaves a message that is due; returns what makes it ready."""


def standing(lmq_name: str, messages: int = 10, **fields: Any) -> Operation:
    """A reserve that stands if there is nothing."""
    fields = {"standing_id": 1, "standing_messages": messages, "standing_bytes": 4096, **fields}
    return reserve(lmq_name, messages, **fields)


def recall(lmq_name: str, standing_id: int = 1) -> Operation:
    recalled = Recall(lmq_name=lmq_name, group="default", standing_id=standing_id)
    return operation(recall=recalled)


def owned_by(client_id: str) -> Operation:
    taken = TakeOwnership(lmq_name="own/a", group="default", client_id=client_id)
    return operation(take_ownership=taken)


async def stand(exchange: ExchangeClient, lmq_name: str, *args: Any, **fields: Any) -> None:
    """The queue exists and is empty, and a reserve stands on it."""
    _, taken = await exchange.ask_all(append(lmq_name, b"first"), reserve(lmq_name))
    await exchange.ask(settle(taken.slices[0].receipt))
    stood = await exchange.ask(standing(lmq_name, *args, **fields))
    assert stood.standing_messages


async def commits_of(storage: RunningStorage) -> int:
    return int((await storage.info()).commits)


async def nothing_more(exchange: ExchangeClient) -> bool:
    """Whether no result of a standing reserve comes before that of an operation."""
    await exchange.ask(append("jobs/after", b"x"))
    return exchange.handed_out.empty()


def payloads_of(handed_out: ReserveResult) -> list[list[bytes]]:
    return [payloads(each.body) for each in handed_out.slices]


async def test_an_append_hands_out_in_its_commit_until_the_messages_are_used(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S2: no reserve, no ready event and no second commit; then the group is reported as ever."""
    await stand(exchange, "jobs", 3)
    before = await commits_of(storage)

    await exchange.ask(append("jobs", b"1"))
    await exchange.ask_all(append("jobs", b"2"), append("jobs", b"3"))
    first, second = await exchange.handed_out.get(), await exchange.handed_out.get()
    commits = await commits_of(storage) - before
    await exchange.ask(append("jobs", b"4"))

    assert (payloads_of(first), first.standing_messages, first.more) == ([[b"1"]], 2, False)
    assert (payloads_of(second), second.standing_messages) == ([[b"2"], [b"3"]], 0)
    assert {first.standing_id, second.standing_id} == {1}
    assert commits == 2
    assert await exchange.ready.get() == ("jobs", "default")
    assert exchange.handed_out.empty()


async def test_a_reserve_and_the_append_behind_it_are_answered_in_order(
    exchange: ExchangeClient,
) -> None:
    """S2: a standing reserve exists before it hands out, also within one commit."""
    await exchange.ask_all(append("jobs", b"1"))

    asked, _ = await exchange.ask_all(standing("jobs"), append("jobs", b"2"))
    later = await exchange.handed_out.get()

    assert (payloads_of(asked), asked.standing_messages) == ([[b"1"]], 9)
    assert (payloads_of(later), later.standing_messages) == ([[b"2"]], 8)


async def test_a_reserve_in_a_frame_of_several_commits_is_answered_before_what_it_hands_out(
    exchange: ExchangeClient,
) -> None:
    """S2: a broker knows the credit of a standing reserve before its messages arrive."""
    await stand(exchange, "jobs")
    others = [recall("jobs/none")] * EMBEDDED.operations

    asked, *_ = await exchange.send(standing("jobs", standing_id=2), *others, append("jobs", b"1"))
    handed_out = await exchange.handed_out.get()
    while handed_out.standing_id != 2:
        handed_out = await exchange.handed_out.get()

    assert payloads_of(handed_out) == [[b"1"]]
    assert asked.done()


async def test_a_group_that_its_broker_leaves_has_nobody_who_waits(
    exchange: ExchangeClient,
) -> None:
    """The broker has ended the standing reserve with its subscription: there is no last result."""
    await stand(exchange, "jobs")

    await exchange.ask(operation(leave_group=LeaveGroup(lmq_names=["jobs"], group="default")))
    await exchange.ask(append("jobs", b"1"))
    (taken,) = await exchange.ask_all(reserve("jobs"))

    assert payloads_of(taken) == [[b"1"]]
    assert exchange.handed_out.empty()


async def expires(exchange: ExchangeClient, clock: ManualClock) -> Operation:
    await exchange.ask(append("jobs", b"again"))
    await exchange.handed_out.get()
    await clock.advance_ms(VISIBILITY_MS)
    return operation(expire_due=ExpireDue())


async def was_delayed(exchange: ExchangeClient, clock: ManualClock) -> Operation:
    await exchange.ask(append("jobs", b"again"))
    (held,) = (await exchange.handed_out.get()).slices
    await exchange.ask(settle(held.receipt, SETTLE_ACTION_NACK, duration_ms=100))
    await clock.advance_ms(100)
    return operation(expire_due=ExpireDue())


async def was_scheduled(exchange: ExchangeClient, clock: ManualClock) -> Operation:
    due_ms = clock.wall_ms() + 100
    scheduled = await exchange.ask(append("jobs", b"again", delay_ms=100))
    await clock.advance_ms(100)
    action = Action()
    action.promote_scheduled.schedule_id = scheduled.schedule_id
    action.promote_scheduled.expected_due_ms = due_ms
    return operation(action=action)


@pytest.mark.parametrize("message", [expires, was_delayed, was_scheduled])
async def test_what_becomes_ready_by_time_is_handed_out_by_that_commit(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, message: Message
) -> None:
    """V1, V2, L5: one commit, where a report and a reserve made it two."""
    await stand(exchange, "jobs", visibility_ms=VISIBILITY_MS)
    due = await message(exchange, clock)
    before = await commits_of(storage)

    await exchange.ask(due)
    handed_out = await exchange.handed_out.get()

    assert payloads_of(handed_out) == [[b"again"]]
    assert await commits_of(storage) == before + 1
    assert exchange.ready.empty()


async def test_what_exceeds_the_bytes_ends_it_and_asks_the_broker(
    exchange: ExchangeClient,
) -> None:
    """S3: a large message waits for a reserve with room for it."""
    await stand(exchange, "jobs", standing_bytes=100)

    await exchange.ask(append("jobs", bytes(101)))
    ended = await exchange.handed_out.get()

    assert (len(ended.slices), ended.more, ended.standing_messages) == (0, True, 0)
    assert len((await exchange.ask(reserve("jobs"))).slices) == 1


async def test_a_recall_ends_it_and_leaves_the_interest(exchange: ExchangeClient) -> None:
    """What was handed out before is sent before its last result."""
    await stand(exchange, "jobs")

    _, recalled, again = await exchange.ask_all(
        append("jobs/x", b"1"), recall("jobs"), recall("jobs")
    )
    ended = await exchange.handed_out.get()
    await exchange.ask(append("jobs", b"2"))

    assert (recalled.stood, again.stood) == (True, False)
    assert (len(ended.slices), ended.more, ended.standing_messages) == (0, False, 0)
    assert await exchange.ready.get() == ("jobs", "default")
    assert exchange.handed_out.empty()


@pytest.mark.parametrize("wrong", [recall("jobs", 2), recall("jobs/none"), recall("other")])
async def test_a_recall_of_another_one_changes_nothing(
    exchange: ExchangeClient, wrong: Operation
) -> None:
    await stand(exchange, "jobs")

    assert not (await exchange.ask(wrong)).stood
    await exchange.ask(append("jobs", b"1"))

    assert payloads_of(await exchange.handed_out.get()) == [[b"1"]]


async def test_a_reserve_takes_over_what_it_replaces_and_ends_any_other(
    exchange: ExchangeClient,
) -> None:
    """Credit that the same consumer holds there is used; that of another comes back."""
    await stand(exchange, "jobs", 3)

    _, taken = await exchange.ask_all(
        append("jobs", b"1", b"2", b"3", b"4", b"5"), reserve("jobs", 2, replaces=1)
    )
    quiet = await nothing_more(exchange)
    await exchange.ask(standing("jobs", standing_id=2))
    await exchange.ask(standing("jobs", standing_id=3))
    ended = await exchange.handed_out.get()

    assert [each.count for each in taken.slices] == [5]
    assert quiet
    assert (ended.standing_id, ended.standing_messages, ended.more) == (2, 0, False)


async def test_an_unloaded_queue_does_not_lose_it_silently(exchange: ExchangeClient) -> None:
    """I4: the broker gets a last result that asks it to reserve again."""
    await stand(exchange, "jobs/idle")

    unloaded = await exchange.ask(operation(unmaterialize=Unmaterialize(lmq_name="jobs/idle")))
    ended = await exchange.handed_out.get()

    assert unloaded.outcome == EVICTION_OUTCOME_EVICTED
    assert (ended.more, ended.standing_messages) == (True, 0)


@pytest.mark.parametrize(
    "removal",
    [
        operation(remove_queue=RemoveQueue(lmq_name="jobs")),
        operation(remove_group=RemoveGroup(lmq_name="jobs", group="default")),
    ],
    ids=["queue", "group"],
)
async def test_it_ends_with_its_queue_or_group(
    exchange: ExchangeClient, removal: Operation
) -> None:
    await stand(exchange, "jobs")

    await exchange.ask(removal)
    ended = await exchange.handed_out.get()
    await exchange.ask(append("jobs", b"1"))

    assert (len(ended.slices), ended.standing_messages) == (0, 0)
    assert await nothing_more(exchange)


async def test_a_group_that_is_moved_hands_out_from_its_new_place(
    exchange: ExchangeClient,
) -> None:
    """R15: it waits still, and messages are ready now."""
    await exchange.ask_all(append("jobs", b"1"), reserve("jobs", group="other"))
    await stand(exchange, "jobs", group="default")

    start = StartPosition(earliest=True)
    await exchange.ask(
        operation(place_group=PlaceGroup(lmq_name="jobs", group="default", start=start))
    )

    assert (b"1") in [each for run in payloads_of(await exchange.handed_out.get()) for each in run]


async def test_a_takeover_ends_it_before_anything_is_handed_to_the_old_owner(
    start_storage: StartStorage,
) -> None:
    """E8, E9: also where the message comes in the commit of the takeover."""
    storage = await start_storage()
    await storage.create_topic("own", subscription=SUBSCRIPTION_KIND_EXCLUSIVE)
    async with storage.exchange() as exchange:
        old = await exchange.ask(owned_by("a"))
        stood = await exchange.ask(standing("own/a", owner_epoch=old.epoch))

        _, new, _ = await exchange.ask_all(
            append("own/a", b"before"),
            owned_by("b"),
            append("own/a", b"after"),
        )
        ended = await exchange.handed_out.get()
        got = await exchange.ask(reserve("own/a", owner_epoch=new.epoch))

    assert stood.standing_messages
    assert (len(ended.slices), ended.standing_messages) == (0, 0)
    assert payloads_of(got) == [[b"before"], [b"after"]]
    assert {each.delivery_count for each in got.slices} == {1}


async def test_it_is_forgotten_with_the_claim_it_was_made_under(storage: RunningStorage) -> None:
    """C4: nothing is reserved for a broker that has claimed again, or is gone."""
    async with storage.exchange() as old:
        await stand(old, "jobs")
    async with storage.exchange() as new:
        await new.ask(append("jobs", b"1"))
        quiet = await nothing_more(new)
        got = await new.ask(reserve("jobs"))

    assert quiet
    assert [each.delivery_count for each in got.slices] == [1]


async def test_nothing_is_reserved_for_a_broker_that_is_not_connected(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """V8: an answer that no broker can get would keep the message until its deadline."""
    async with storage.exchange() as gone:
        await stand(gone, "jobs")
        due = await was_scheduled(gone, clock)
    await undriven(storage)

    await storage.delegate(due.action)

    assert (await storage.queue("jobs")).queue.inflight == 0


async def test_large_hand_outs_of_one_commit_come_in_frames_that_fit(
    exchange: ExchangeClient,
) -> None:
    """S3: one commit hands a run out to many groups."""
    groups = [f"g{number}" for number in range(6)]
    await exchange.ask(append("jobs", b"first"))
    for standing_id, group in enumerate(groups, 1):
        fields = {"standing_id": standing_id, "standing_bytes": RUN_BYTES_MAX}
        assert (await exchange.ask(standing("jobs", group=group, **fields))).standing_messages

    large = bytes(RUN_BYTES_MAX - 1024)
    await exchange.ask(append("jobs", large))
    handed_out = [await exchange.handed_out.get() for _ in groups]

    assert {each.standing_id for each in handed_out} == set(range(1, len(groups) + 1))
    assert all(payloads_of(each) == [[large]] for each in handed_out)
    assert exchange.stream.frame_bytes_max < FRAME_BYTES_MAX


async def test_large_hand_outs_that_end_their_reserves_come_in_frames_that_fit(
    exchange: ExchangeClient,
) -> None:
    """S3: none of them is plain, and a result without hand-outs would break the stream."""
    groups = [f"g{number}" for number in range(3)]
    await exchange.ask(append("jobs", b"first"))
    for standing_id, group in enumerate(groups, 1):
        fields = {"standing_id": standing_id, "standing_bytes": RUN_BYTES_MAX}
        assert (await exchange.ask(standing("jobs", 2, group=group, **fields))).standing_messages

    large = bytes(RUN_BYTES_MAX - 1024)
    await exchange.ask(append("jobs", large))
    handed_out = [await exchange.handed_out.get() for _ in groups]

    assert {each.standing_id for each in handed_out} == set(range(1, len(groups) + 1))
    assert all(payloads_of(each) == [[large]] for each in handed_out)
    assert await nothing_more(exchange)
