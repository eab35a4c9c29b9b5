"""The exchange: publishing, reserving and settling over a real stream, and every refusal of it."""

from contextlib import suppress
from typing import Any

import pytest

from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.keys import read_u64x3
from storage_svc.engines.rocksdb import RocksEngines
from tests.rpc.storage_client import (
    CLUSTER_ID,
    ExchangeClient,
    RunningStorage,
    append,
    body,
    operation,
    payloads,
    reserve,
    settle,
)
from tidemark import errors, limits
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_DEAD_LETTER,
    SETTLE_ACTION_DISCONNECT,
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    SETTLE_ACTION_RELEASE,
    Append,
    Bind,
    ExchangeRequest,
    ExpireDue,
    Operation,
    PlaceGroup,
    Purge,
    RemoveGroup,
    RemoveQueue,
    SettleAction,
    Unschedule,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_SCHEDULES_DUE
from tidemark.clock import ManualClock, SystemClock
from tidemark.receipts import Receipt

EXPIRE_DUE = operation(expire_due=ExpireDue())


async def one(exchange: ExchangeClient, *asked: Any, **fields: Any) -> Any:
    """Reserve what is expected to be one slice."""
    (got,) = (await exchange.ask(reserve(*asked, **fields))).slices
    return got


# --- the way of a message -------------------------------------------------------------------------


async def test_messages_come_back_as_they_were_published(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    run = append("jobs/a", b"one", b"two", fairness_key="k", traceparent=traceparent)
    appended = await exchange.ask(run)

    got = await one(exchange, "jobs/a", visibility_ms=60_000)

    assert payloads(got.body) == [b"one", b"two"]
    assert (got.first_offset, got.count, got.queue_id) == (0, 2, appended.queue_id)
    assert (got.attempt_count, got.delivery_count, got.owner_epoch) == (0, 1, 0)
    assert (got.fairness_key, got.traceparent) == ("k", traceparent)
    assert (got.visibility_ms, got.publish_time_ms) == (60_000, clock.wall_ms())


async def test_offsets_of_a_queue_have_no_gaps_and_a_reserve_may_cut_a_run(
    exchange: ExchangeClient,
) -> None:
    first, second = await exchange.ask_all(append("jobs", b"0", b"1", b"2"), append("jobs", b"3"))

    cut = await one(exchange, "jobs", 2)
    rest = (await exchange.ask(reserve("jobs"))).slices

    assert (first.first_offset, second.first_offset) == (0, 3)
    assert payloads(cut.body) == [b"0", b"1"]
    assert [(each.first_offset, payloads(each.body)) for each in rest] == [(2, [b"2"]), (3, [b"3"])]


async def test_a_reserve_gives_one_message_however_few_bytes_it_may(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", bytes(1000), bytes(1000)))

    got = await one(exchange, "jobs", max_bytes=1)

    assert got.count == 1


async def test_a_strict_reserve_leaves_a_message_that_is_too_large_and_says_that_there_is_one(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", bytes(1000), bytes(1000)))

    none = await exchange.ask(reserve("jobs", max_bytes=999, strict_bytes=True))
    got = await one(exchange, "jobs", max_bytes=1999, strict_bytes=True)
    (rest,) = (await exchange.ask(reserve("jobs"))).slices
    nothing = await exchange.ask(reserve("jobs", max_bytes=1, strict_bytes=True))

    assert (list(none.slices), none.more) == ([], True)
    assert (got.count, rest.count) == (1, 1)
    assert not nothing.more


async def test_each_group_gets_every_message(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))

    audit, billing = await exchange.ask_all(
        reserve("jobs", group="audit"), reserve("jobs", group="billing")
    )

    assert payloads(audit.slices[0].body) == payloads(billing.slices[0].body) == [b"x"]


async def test_one_bad_operation_spoils_no_other_of_its_frame(exchange: ExchangeClient) -> None:
    """S3."""
    good, bad, also_good = await exchange.ask_all(
        append("jobs", b"x"), append("no-such-topic", b"x"), append("jobs", b"y")
    )

    assert isinstance(bad, errors.TopicNotFound)
    assert (good.first_offset, also_good.first_offset) == (0, 1)


# --- settling (V6, V8) ----------------------------------------------------------------------------


async def test_an_ack_before_the_deadline_prevents_redelivery(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await one(exchange, "jobs", visibility_ms=50)

    settled = await exchange.ask(settle(got.receipt))
    await clock.advance_ms(100)
    expired = await exchange.ask(EXPIRE_DUE)

    assert settled.messages == 2
    assert (expired.messages, list(expired.reservation_ids)) == (0, [])
    assert not (await exchange.ask(reserve("jobs"))).slices


@pytest.mark.parametrize(
    ("action", "attempts"),
    [
        (SETTLE_ACTION_NACK, 1),
        (SETTLE_ACTION_DISCONNECT, 1),
        (SETTLE_ACTION_RELEASE, 0),
    ],
)
async def test_what_is_given_back_counts_an_attempt_unless_it_is_released(
    exchange: ExchangeClient, action: SettleAction.ValueType, attempts: int
) -> None:
    """V8: attempt_count grows on nack and disconnect, delivery_count with every hand-out."""
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs")

    await exchange.ask(settle(got.receipt, action))
    again = await one(exchange, "jobs")

    assert (again.attempt_count, again.delivery_count) == (attempts, 2)


async def test_a_nack_with_a_delay_is_ready_after_it(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V8."""
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK, duration_ms=500))

    await clock.advance_ms(499)
    early = await exchange.ask(EXPIRE_DUE)
    await clock.advance_ms(1)
    due = await exchange.ask(EXPIRE_DUE)

    assert (early.messages, due.messages) == (0, 1)
    assert (await one(exchange, "jobs")).attempt_count == 1


async def test_messages_of_one_reservation_can_end_in_different_ways(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", b"0", b"1", b"2", b"3"))
    got = await one(exchange, "jobs")

    acked = await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, (0, 1), (2, 3)))
    nacked = await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
    again = (await exchange.ask(reserve("jobs"))).slices

    assert (acked.messages, nacked.messages) == (2, 2)
    assert [payloads(each.body) for each in again] == [[b"1"], [b"3"]]


async def test_repeating_a_settlement_is_a_success_and_a_different_one_is_refused(
    exchange: ExchangeClient,
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs")
    await exchange.ask(settle(got.receipt))

    repeated = await exchange.ask(settle(got.receipt))
    (different,) = await exchange.ask_all(settle(got.receipt, SETTLE_ACTION_NACK))
    (extended,) = await exchange.ask_all(settle(got.receipt, SETTLE_ACTION_EXTEND))

    assert repeated.messages == 0
    assert isinstance(different, errors.AlreadySettled)
    assert isinstance(extended, errors.AlreadySettled)


async def test_a_settlement_after_expiry_is_refused_and_changes_nothing(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V2, V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs", visibility_ms=50)
    await clock.advance_ms(50)
    expired = await exchange.ask(EXPIRE_DUE)

    late = await exchange.ask_all(
        settle(got.receipt),
        settle(got.receipt, SETTLE_ACTION_NACK),
        settle(got.receipt, SETTLE_ACTION_EXTEND),
    )
    again = await one(exchange, "jobs")

    assert (list(expired.reservation_ids), expired.messages) == ([got.reservation_id], 1)
    assert all(isinstance(each, errors.ReservationExpired) for each in late)
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_an_extended_reservation_expires_later(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs", visibility_ms=100)
    await clock.advance_ms(99)

    extended = await exchange.ask(settle(got.receipt, SETTLE_ACTION_EXTEND, duration_ms=100))
    await clock.advance_ms(99)
    early = await exchange.ask(EXPIRE_DUE)
    by_topic = await exchange.ask(settle(got.receipt, SETTLE_ACTION_EXTEND))
    await clock.advance_ms(29_999)
    still_early = await exchange.ask(EXPIRE_DUE)
    await clock.advance_ms(1)
    due = await exchange.ask(EXPIRE_DUE)

    assert (extended.messages, extended.visibility_ms, by_topic.visibility_ms) == (1, 100, 30_000)
    assert (early.messages, still_early.messages, due.messages) == (0, 0, 1)


async def test_expiry_takes_no_more_than_it_is_asked_to(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V5."""
    for name in ("jobs/a", "jobs/b", "jobs/c"):
        await exchange.ask(append(name, b"x"))
        await exchange.ask(reserve(name, visibility_ms=50))
    await clock.advance_ms(50)

    some = await exchange.ask(operation(expire_due=ExpireDue(limit=2)))
    rest = await exchange.ask(EXPIRE_DUE)

    assert (len(some.reservation_ids), len(rest.reservation_ids)) == (2, 1)


async def test_receipts_that_stand_for_nothing_are_refused(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs")
    mine = Receipt.decode(got.receipt)
    malformed = [b"", b"not a receipt", got.receipt + b"x", b"\xff" + got.receipt[1:]]
    foreign = [
        Receipt(mine.partition + 1, mine.queue_id, mine.reservation_id, 0),
        Receipt(mine.partition, mine.queue_id + 1, mine.reservation_id, 0),
        Receipt(mine.partition, mine.queue_id, mine.reservation_id + 1, 0),
    ]

    refused = await exchange.ask_all(*map(settle, malformed))
    unknown = await exchange.ask_all(*(settle(each.encode()) for each in foreign))

    assert [error.reason for error in refused] == ["INVALID_ARGUMENT"] * 4
    assert all(error.metadata["field"] == "receipt" for error in refused)
    assert [error.reason for error in unknown] == ["RESERVATION_NOT_FOUND"] * 3
    assert (await exchange.ask(settle(got.receipt))).messages == 1


@pytest.mark.parametrize("ranges", [[(0, 3)], [(1, 1)], [(1, 0)], [(1, 2), (0, 1)], [(0, 2)] * 2])
async def test_ranges_outside_a_reservation_or_out_of_order_are_refused(
    exchange: ExchangeClient, ranges: list[tuple[int, int]]
) -> None:
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await one(exchange, "jobs")

    with pytest.raises(errors.InvalidArgument):
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, *ranges))

    assert (await exchange.ask(settle(got.receipt))).messages == 2


# --- refusals (S3) --------------------------------------------------------------------------------

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


# --- scheduled runs, groups, queues ---------------------------------------------------------------


async def test_a_scheduled_run_can_be_forgotten_until_it_is_due(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    scheduled = await exchange.ask(append("jobs", b"x", b"y", delay_ms=1000))
    forget = operation(unschedule=Unschedule(lmq_name="jobs", schedule_id=scheduled.schedule_id))

    assert not (await exchange.ask(reserve("jobs"))).slices
    assert (await storage.queue("jobs")).queue.messages == 2
    assert (await exchange.ask(forget)).messages == 2

    (again,) = await exchange.ask_all(forget)
    assert isinstance(again, errors.RunNotScheduled)
    assert (await storage.queue("jobs")).queue.messages == 0
    assert not (await storage.scan(SCAN_KIND_SCHEDULES_DUE)).HasField("next_due_in_ms")


@pytest.mark.parametrize(
    ("start", "offsets"),
    [
        (StartPosition(earliest=True), [0, 1, 2, 3]),
        (StartPosition(latest=True), []),
        (StartPosition(last=1), [3]),
        (StartPosition(offset=2), [2, 3]),
        (StartPosition(offset=99), []),
    ],
)
async def test_a_group_can_be_moved_and_what_it_held_is_revoked(
    storage: RunningStorage, exchange: ExchangeClient, start: StartPosition, offsets: list[int]
) -> None:
    await storage.create_topic("kept", retention_enabled=True)
    await exchange.ask(append("kept", b"0", b"1", b"2", b"3"))
    got = await one(exchange, "kept", 2)

    move = PlaceGroup(lmq_name="kept", group="default", start=start)
    placed = await exchange.ask(operation(place_group=move))
    slices = (await exchange.ask(reserve("kept"))).slices

    assert (placed.created, list(placed.revoked_reservation_ids)) == (False, [got.reservation_id])
    assert placed.cursor == min([*offsets, 4])
    given = [each.first_offset + at for each in slices for at in range(each.count)]
    assert given == offsets


async def test_a_group_that_goes_takes_its_reservations_with_it(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))
    got = await one(exchange, "jobs", group="g")

    await exchange.ask(operation(remove_group=RemoveGroup(lmq_name="jobs", group="g")))

    (late,) = await exchange.ask_all(settle(got.receipt))
    assert isinstance(late, errors.ReservationNotFound)
    assert (await one(exchange, "jobs", group="g")).delivery_count == 1


async def test_a_purge_deletes_what_no_reservation_holds_and_writes_one_row_of_history(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R6."""
    await exchange.ask_all(
        append("jobs", b"held"), append("jobs", b"1", b"2"), append("jobs", b"3")
    )
    held = await one(exchange, "jobs", 1)

    purged = await exchange.ask(operation(purge=Purge(lmq_name="jobs")))

    assert (purged.messages, purged.skipped) == (3, 1)
    assert not (await exchange.ask(reserve("jobs"))).slices
    assert (await exchange.ask(settle(held.receipt))).messages == 1
    assert (await storage.queue("jobs")).queue.messages == 0


async def test_a_queue_deleted_and_created_again_is_another_queue(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    first = await exchange.ask(append("jobs", b"x"))
    await exchange.ask(append("jobs", b"later", delay_ms=1000))
    got = await one(exchange, "jobs")
    remove = RemoveQueue(lmq_name="jobs", expected_queue_id=first.queue_id)

    removed = await exchange.ask(operation(remove_queue=remove))
    second = await exchange.ask(append("jobs", b"y"))
    late, not_that_one = await exchange.ask_all(settle(got.receipt), operation(remove_queue=remove))

    assert removed.messages == 2
    assert second.queue_id > first.queue_id
    assert isinstance(late, errors.ReservationNotFound)
    assert isinstance(not_that_one, errors.QueueNotFound)
    assert payloads((await one(exchange, "jobs")).body) == [b"y"]
    assert (await storage.info()).reservations == 1


# --- fairness, time to live, attempts -------------------------------------------------------------


async def test_a_key_that_becomes_active_in_a_backlog_is_served_within_one_round(
    exchange: ExchangeClient,
) -> None:
    """V7."""
    for _ in range(4):
        await exchange.ask(append("jobs", *[bytes(1000)] * 200, fairness_key="loud"))
    loud = await one(exchange, "jobs", 10)
    await exchange.ask(append("jobs", b"quiet", fairness_key="quiet"))

    keys = [each.fairness_key for each in (await exchange.ask(reserve("jobs", 200))).slices]

    assert loud.fairness_key == "loud"
    assert "quiet" in keys


async def test_a_message_past_its_time_to_live_is_never_handed_out(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5."""
    await storage.create_topic("brief", default_ttl_ms=100)
    await exchange.ask_all(append("brief", b"topic's"), append("jobs", b"own", ttl_ms=100))
    await clock.advance_ms(99)
    in_time = await one(exchange, "jobs")
    await exchange.ask(settle(in_time.receipt, SETTLE_ACTION_RELEASE))

    await clock.advance_ms(1)

    assert not (await exchange.ask(reserve("brief"))).slices
    assert not (await exchange.ask(reserve("jobs"))).slices


async def test_a_message_is_handed_out_until_its_attempts_are_exhausted(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L5."""
    await storage.create_topic("twice", max_attempts=2)
    await exchange.ask(append("twice", b"x"))
    for attempts in (0, 1):
        got = await one(exchange, "twice")
        assert got.attempt_count == attempts
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))

    assert not (await exchange.ask(reserve("twice"))).slices


# --- idempotent publishing (S11) ------------------------------------------------------------------


def published(sequence: int, payload: bytes = b"x", **fields: Any) -> Operation:
    return append("jobs", payload, producer_id="p", sequence=sequence, **fields)


async def test_a_repeated_publish_gets_the_first_answer(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S11: also after a restart, a scheduled run too, and never a second append."""
    first = await exchange.ask(published(1))
    delayed = await exchange.ask(published(2, b"later", delay_ms=1000))

    again = await exchange.ask(published(1))
    await storage.restart()
    async with storage.exchange() as after:
        after_restart = await after.ask(published(1))
        delayed_again = await after.ask(published(2, b"later", delay_ms=1000))

    assert not first.duplicate
    assert again.duplicate
    assert after_restart.duplicate
    assert again.first_offset == after_restart.first_offset == first.first_offset
    assert (delayed_again.duplicate, delayed_again.schedule_id) == (True, delayed.schedule_id)
    assert (await storage.queue("jobs")).queue.messages == 2


async def test_two_tries_of_one_run_in_one_frame_are_stored_once(exchange: ExchangeClient) -> None:
    """S11."""
    first, second = await exchange.ask_all(published(1), published(1))

    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.first_offset == second.first_offset


async def test_another_run_under_a_used_sequence_is_a_conflict(exchange: ExchangeClient) -> None:
    """S11."""
    await exchange.ask(published(1))
    other_queue = append("jobs/other", b"x", producer_id="p", sequence=1)

    conflicts = await exchange.ask_all(published(1, b"another"), other_queue)

    assert [each.reason for each in conflicts] == ["SEQUENCE_CONFLICT"] * 2


async def test_repeats_are_answered_within_the_window_and_refused_before_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S11: at the limit and one past it."""
    last = limits.PRODUCER_SEQUENCES_MAX + 1
    await exchange.ask_all(*(published(sequence) for sequence in range(1, last + 1)))

    async def check(exchange: ExchangeClient) -> None:
        oldest, too_old = await exchange.ask_all(published(2), published(1))
        assert (oldest.duplicate, oldest.first_offset) == (True, 1)
        assert isinstance(too_old, errors.SequenceTooOld)

    await check(exchange)
    await storage.restart()
    async with storage.exchange() as after:
        await check(after)

    assert (await storage.queue("jobs")).queue.messages == last


async def test_what_a_producer_published_is_remembered_after_the_messages_are_gone(
    exchange: ExchangeClient,
) -> None:
    """S11: independently of retention."""
    await exchange.ask(published(1))
    await exchange.ask(settle((await one(exchange, "jobs")).receipt))

    again = await exchange.ask(published(1))

    assert again.duplicate
    assert not (await exchange.ask(reserve("jobs"))).slices


# --- what stays and what goes ---------------------------------------------------------------------


async def test_a_message_is_dropped_as_soon_as_every_group_has_settled_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R2 inline."""
    await exchange.ask(append("jobs", b"0", b"1"))
    one_group = await one(exchange, "jobs", group="a")
    other_group = await one(exchange, "jobs", group="b")

    await exchange.ask(settle(one_group.receipt))
    kept = (await storage.queue("jobs")).queue
    await exchange.ask(settle(other_group.receipt, SETTLE_ACTION_ACK, (0, 1)))
    half = (await storage.queue("jobs")).queue
    await exchange.ask(settle(other_group.receipt))
    gone = (await storage.queue("jobs")).queue

    assert (kept.messages, half.messages) == (2, 2)
    assert (gone.messages, gone.bytes, gone.next_offset) == (0, 0, 2)


async def test_settled_messages_stay_where_retention_is_enabled(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R2: a group created later starts at the earliest message still there."""
    await storage.create_topic("kept", retention_enabled=True)
    await exchange.ask(append("kept", b"x"))
    await exchange.ask(settle((await one(exchange, "kept")).receipt))

    late = await one(exchange, "kept", group="late")

    assert payloads(late.body) == [b"x"]


async def test_each_settled_range_leaves_one_consumption_record(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R13: off by topic setting; a nack or a release is no consumption."""
    await storage.create_topic("unrecorded", consumption_records_disabled=True)
    await exchange.ask_all(append("jobs", *[b"x"] * 1000), append("unrecorded", b"x"))
    got, unrecorded = await one(exchange, "jobs"), await one(exchange, "unrecorded")

    await exchange.ask_all(
        settle(got.receipt, SETTLE_ACTION_ACK, (0, 600)),
        settle(got.receipt, SETTLE_ACTION_NACK),
        settle(unrecorded.receipt),
    )
    await storage.stop()

    engine = await RocksEngines(storage.data_dir).open(Identity(CLUSTER_ID, 0, 1))
    with engine.reader() as reader:
        rows = await reader.scan(Table.CONSUMED, b"", None, limit=10)
    await engine.close()
    ((_, value),) = rows
    assert read_u64x3(value) == (got.queue_id, 0, 600)
    assert value.endswith(b"jobs")


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


async def test_dead_letters_without_a_topic_for_them_are_deleted(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await one(exchange, "jobs")

    settled = await exchange.ask(
        settle(got.receipt, SETTLE_ACTION_DEAD_LETTER, detail="cannot be read")
    )

    assert settled.messages == 2
    assert (await storage.queue("jobs")).queue.messages == 0


# --- the stream itself ----------------------------------------------------------------------------


async def test_many_frames_in_flight_share_commits_and_answers(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """What gathered while the last commit ran, or the last frame was sent, goes into the next."""
    before = (await storage.info()).commits
    frames = 400

    sent = [(await exchange.send(append(f"jobs/{n}", b"x")))[0] for n in range(frames)]
    for each in sent:
        assert (await each).HasField("append")

    assert exchange.frames < frames / 2
    assert (await storage.info()).commits - before < frames / 2


async def test_a_broker_that_stops_writing_gets_its_answers_and_the_end_of_the_stream(
    exchange: ExchangeClient,
) -> None:
    (result,) = await exchange.send(append("jobs", b"x"))

    await exchange.done_writing()

    assert (await result).HasField("append")
    assert isinstance(await exchange.ended, errors.Unavailable)


async def test_a_broker_that_never_reads_is_no_longer_read_from_and_holds_up_nobody(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """Its answers wait in a bounded number of frames; the exchange beside it goes on."""
    frames_max = 200
    epoch = (await storage.info()).broker_epoch
    deaf: Any = storage.storage.Exchange()
    await deaf.write(ExchangeRequest(bind=Bind(partition=0, broker_epoch=epoch)))
    frame = ExchangeRequest(operations=[append("jobs", bytes(1_000_000)), reserve("jobs")])

    written = 0
    with suppress(TimeoutError):  # the only sign of a stream that is not read from
        while written < frames_max:
            await SystemClock().wait_for(deaf.write(frame), 2000)
            written += 1
    beside = await exchange.ask(append("jobs/beside", b"x"))

    deaf.cancel()
    assert 0 < written < frames_max
    assert beside.queue_id
