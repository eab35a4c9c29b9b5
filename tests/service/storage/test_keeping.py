"""What stays and what goes: settled, purged, rejected, unscheduled, and with its queue."""

import pytest

from storage_svc.engines import run_rows
from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import CLUSTER_ID, RunningStorage, loaded
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_OFF
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_DEAD_LETTER,
    SETTLE_ACTION_NACK,
    Purge,
    RemoveQueue,
    Unmaterialize,
    Unschedule,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_SCHEDULES_DUE
from tidemark.clock import ManualClock


async def test_a_message_is_dropped_as_soon_as_every_group_has_settled_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R2 inline."""
    await exchange.ask(append("jobs", b"0", b"1"))
    one_group = await reserved(exchange, "jobs", group="a")
    other_group = await reserved(exchange, "jobs", group="b")

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
    await exchange.ask(settle((await reserved(exchange, "kept")).receipt))

    late = await reserved(exchange, "kept", group="late")

    assert payloads(late.body) == [b"x"]


@pytest.mark.parametrize("cold", [False, True])
async def test_settled_messages_go_when_retention_is_switched_off(
    storage: RunningStorage,
    exchange: ExchangeClient,
    cold: bool,
) -> None:
    """R2: they are never settled again, and would count towards the quota without end."""
    await storage.create_topic("kept", retention_enabled=True, queue_messages_max=4)
    for number in range(3):
        await exchange.ask(append("kept", b"%d" % number))
        await exchange.ask(settle((await reserved(exchange, "kept")).receipt))
    await exchange.ask(append("kept", b"waits"))
    with pytest.raises(errors.QueueFull):
        await exchange.ask(append("kept", b"too many"))
    if cold:
        await exchange.ask(operation(unmaterialize=Unmaterialize(lmq_name="kept")))
        assert await loaded(storage) == 0

    await storage.update_topic("kept", queue_messages_max=4)
    await exchange.ask(append("kept", b"has room"))
    await exchange.ask(append("kept", b"has room, too"))

    assert (await storage.queue("kept")).queue.messages == 3
    late = (await exchange.ask(reserve("kept", group="late"))).slices
    assert [payloads(each.body) for each in late] == [[b"waits"], [b"has room"], [b"has room, too"]]


@pytest.mark.rocksdb(reason="it reads the data directory")
async def test_each_settled_range_leaves_one_consumption_record(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R13: off by topic setting; a nack or a release is no consumption."""
    await storage.create_topic("unrecorded", consumption_records=CONSUMPTION_RECORDS_OFF)
    await exchange.ask_all(append("jobs", *[b"x"] * 1000), append("unrecorded", b"x"))
    got, unrecorded = await reserved(exchange, "jobs"), await reserved(exchange, "unrecorded")

    await exchange.ask_all(
        settle(got.receipt, SETTLE_ACTION_ACK, (0, 600)),
        settle(got.receipt, SETTLE_ACTION_NACK),
        settle(unrecorded.receipt),
    )
    await storage.stop()

    engine = await RocksEngines(storage.data_dir).open(Identity(CLUSTER_ID, 0, 1))
    with engine.reader() as reader:
        found = await reader.scan(Table.CONSUMED, b"", None, limit=10)
    await engine.close()
    ((_, value),) = found
    (consumed,) = run_rows.read_consumed(value)
    now_ms = clock.wall_ms()
    assert consumed == run_rows.Consumed(got.queue_id, 0, 600, now_ms, now_ms, "default", "jobs")


async def test_dead_letters_without_a_topic_for_them_are_deleted(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L6."""
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await reserved(exchange, "jobs")

    settled = await exchange.ask(
        settle(got.receipt, SETTLE_ACTION_DEAD_LETTER, detail="cannot be read")
    )

    assert settled.messages == 2
    assert (await storage.queue("jobs")).queue.messages == 0


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


async def test_a_purge_deletes_what_no_reservation_holds_and_writes_one_row_of_history(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """R6."""
    await exchange.ask_all(
        append("jobs", b"held"), append("jobs", b"1", b"2"), append("jobs", b"3")
    )
    held = await reserved(exchange, "jobs", 1)

    purged = await exchange.ask(operation(purge=Purge(lmq_name="jobs")))

    assert (purged.messages, purged.skipped) == (3, 1)
    assert not (await exchange.ask(reserve("jobs"))).slices
    assert (await exchange.ask(settle(held.receipt))).messages == 1
    assert (await storage.queue("jobs")).queue.messages == 0


async def test_a_purge_deletes_what_is_scheduled_too(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """It counts among the messages of its queue."""
    later = append("jobs", b"2", b"3", delay_ms=1000)
    await exchange.ask_all(append("jobs", b"1"), later)
    purge = operation(purge=Purge(lmq_name="jobs"))

    purged = await exchange.ask(purge)
    _, in_one_commit = await exchange.ask_all(later, purge)

    assert (purged.messages, in_one_commit.messages) == (3, 2)
    assert (await storage.queue("jobs")).queue.messages == 0
    assert not (await storage.scan(SCAN_KIND_SCHEDULES_DUE)).HasField("next_due_in_ms")


async def test_a_queue_deleted_and_created_again_is_another_queue(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    first = await exchange.ask(append("jobs", b"x"))
    await exchange.ask(append("jobs", b"later", delay_ms=1000))
    got = await reserved(exchange, "jobs")
    remove = RemoveQueue(lmq_name="jobs", expected_queue_id=first.queue_id)

    removed = await exchange.ask(operation(remove_queue=remove))
    second = await exchange.ask(append("jobs", b"y"))
    late, not_that_one = await exchange.ask_all(settle(got.receipt), operation(remove_queue=remove))

    assert removed.messages == 2
    assert second.queue_id > first.queue_id
    assert isinstance(late, errors.ReservationNotFound)
    assert isinstance(not_that_one, errors.QueueNotFound)
    assert payloads((await reserved(exchange, "jobs")).body) == [b"y"]
    assert (await storage.info()).reservations == 1
