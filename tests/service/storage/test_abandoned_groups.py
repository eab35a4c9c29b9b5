"""Groups that no consumer uses any more: found by an index, and removed with what they kept."""

from collections.abc import Sequence
from typing import Any

import pytest

from storage_svc.partition import erasures
from tests.support.counted_reads import count_reads
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    settle,
)
from tests.support.local_broker import until
from tests.support.retention_calls import (
    Planned,
    apply,
    apply_parts,
    history,
    part_of,
    settled,
    table,
)
from tests.support.storage_client import RunningStorage
from tests.support.unowned_partition import undriven
from tidemark import errors
from tidemark.api.storage.v1.exchange_pb2 import (
    JoinGroup,
    LeaveGroup,
    Materialize,
    PlaceGroup,
    TakeOwnership,
    Unmaterialize,
)
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ABANDONED_GROUP,
    RETENTION_TYPE_COMPLETED,
    SCAN_TABLE_NAME_GROUPS,
    NextDueRequest,
)
from tidemark.clock import ManualClock

EXPIRY_S = 3_600
EXPIRY_MS = EXPIRY_S * 1000
GONE_MS = EXPIRY_MS + EXPIRY_MS // 4
"""When a group leaves: uses that are not noted may follow for a quarter of the expiry."""
CLIENT_TIMEOUT_MS = 30_000
NEVER = None


@pytest.fixture
async def storage(storage: RunningStorage) -> RunningStorage:
    await storage.create_topic("t", group_expiry_seconds=EXPIRY_S)
    return storage


async def due_in(storage: RunningStorage) -> int | None:
    """Time until a group can be removed in partition 0; `NEVER` if none will be."""
    request = NextDueRequest(types=[RETENTION_TYPE_ABANDONED_GROUP])
    (found,) = (await storage.retention.NextDue(request)).partitions
    assert not found.error
    return found.due_in_ms if found.HasField("due_in_ms") else NEVER


async def due_groups(storage: RunningStorage) -> list[dict[str, Any]]:
    """The rows that a pass plans from."""
    kinds = [RETENTION_TYPE_ABANDONED_GROUP]
    found = await table(storage, SCAN_TABLE_NAME_GROUPS, due_types=kinds)
    return [row for row in found if row["age_ms"] >= EXPIRY_MS and not row["in_use"]]


async def remove(storage: RunningStorage, groups: Sequence[dict[str, Any]] | None = None) -> Any:
    """Apply a plan of these groups, or of all that are due."""
    planned = await due_groups(storage) if groups is None else groups
    rows = [
        Planned(
            queue_id=row["queue_id"],
            lmq_name=row["lmq_name"],
            group=row["group"],
            before_ms=int(row["last_used"].timestamp() * 1000),
        )
        for row in planned
    ]
    (applied,) = await apply_parts(storage.retention, part_of(RETENTION_TYPE_ABANDONED_GROUP, rows))
    return applied


async def groups_of(storage: RunningStorage, lmq_name: str) -> list[str]:
    return sorted(group.name for group in (await storage.queue(lmq_name)).groups)


async def place(exchange: ExchangeClient, lmq_name: str, *groups: str) -> None:
    for group in groups:
        await exchange.ask(operation(place_group=PlaceGroup(lmq_name=lmq_name, group=group)))


def joined(lmq_name: str, *groups: str) -> Any:
    return operation(materialize=Materialize(lmq_name=lmq_name, create=True, groups=groups))


def joins(group: str, *lmq_names: str) -> Any:
    return operation(join_group=JoinGroup(lmq_names=lmq_names, group=group))


def left(lmq_name: str, group: str) -> Any:
    return operation(leave_group=LeaveGroup(lmq_names=[lmq_name], group=group))


async def test_a_forgotten_group_leaves_with_what_only_it_kept(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14, R6: one that is used stays, and so does what it has not settled."""
    await place(exchange, "t/a", "used", "forgotten")
    await exchange.ask(append("t/a", b"1", b"2"))
    await clock.advance_ms(GONE_MS - 1)
    await settled(exchange, "t/a", "used")
    await exchange.ask(append("t/a", b"3"))
    soon = await due_in(storage)
    await clock.advance_ms(1)

    now = await due_in(storage)
    (planned,) = await due_groups(storage)
    removed = await remove(storage)
    again = await remove(storage, [planned])

    assert (soon, now) == (1, 0)
    assert (planned["group"], planned["age_ms"]) == ("forgotten", EXPIRY_MS)
    assert (removed.groups, removed.messages, removed.stale) == (1, 2, 0)
    assert (again.groups, again.messages, again.stale) == (0, 0, 1)
    assert await groups_of(storage, "t/a") == ["used"]
    assert (await storage.queue("t/a")).queue.messages == 1
    assert await history(storage) == [("t/a", 2, RETENTION_TYPE_ABANDONED_GROUP, "pass-1")]
    assert await due_in(storage) == GONE_MS - 1


async def test_a_consumer_that_comes_back_starts_as_a_new_group(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: at the earliest message that is still there. What no group consumes is kept for one."""
    await exchange.ask(append("t/a", b"1"))
    await settled(exchange, "t/a", "only")
    await exchange.ask(append("t/a", b"2", b"3"))
    await clock.advance_ms(GONE_MS)

    removed = await remove(storage)
    back = (await exchange.ask(reserve("t/a", group="only"))).slices

    assert (removed.groups, removed.messages) == (1, 0)
    assert [payloads(each.body) for each in back] == [[b"2", b"3"]]
    assert await due_in(storage) not in (0, NEVER)


async def test_polls_settlements_and_owners_count_as_uses(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: also a pull that gets nothing; what a reservation holds keeps its group."""
    await exchange.ask(append("t/settled", b"1"))
    (taken,) = (await exchange.ask(reserve("t/settled", visibility_ms=2 * EXPIRY_MS))).slices
    await exchange.ask(append("t/held", b"1"))
    await exchange.ask(reserve("t/held", visibility_ms=2 * EXPIRY_MS))
    for name in ("t/polled", "t/owned"):
        await exchange.ask(joined(name))
        await place(exchange, name, "default")
    await clock.advance_ms(GONE_MS - 1)
    await exchange.ask(settle(taken.receipt))
    assert (await exchange.ask(reserve("t/polled"))).slices == []
    owner = TakeOwnership(lmq_name="t/owned", group="default", client_id="ada")
    await exchange.ask(operation(take_ownership=owner))
    await clock.advance_ms(1)

    due = await due_in(storage)

    assert due is not NEVER
    assert due > 0
    assert await due_groups(storage) == []


async def test_a_use_is_written_now_and_then_and_not_with_every_pull(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14, O3: an empty pull changes nothing, until an eighth of the expiry has passed."""
    await exchange.ask(append("t/a", b"1"))
    await settled(exchange, "t/a")
    commits_before, began_ms = (await storage.info()).commits, clock.wall_ms()

    await exchange.ask(reserve("t/a"))
    unwritten = (await storage.info()).commits - commits_before
    used_ms = []
    for wait_ms in (EXPIRY_MS // 8 - 1, 1):
        await clock.advance_ms(wait_ms)
        await exchange.ask(reserve("t/a"))
        (group,) = await table(storage, SCAN_TABLE_NAME_GROUPS)
        used_ms.append(int(group["last_used"].timestamp() * 1000))

    assert unwritten == 0
    assert used_ms == [began_ms, clock.wall_ms()]


async def test_a_group_with_a_consumer_never_expires_and_counts_from_its_end(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: the consumer may wait for as long as it likes."""
    await exchange.ask(joined("t/a", "waits"))
    await place(exchange, "t/a", "waits")
    for _ in range(12):
        await clock.advance_ms(EXPIRY_MS // 2)
        assert await due_in(storage) != 0
    await exchange.ask(left("t/a", "waits"))
    await clock.advance_ms(EXPIRY_MS - 1)
    early = await due_in(storage)
    await clock.advance_ms(EXPIRY_MS // 4 + 1)

    assert early != 0
    assert await due_in(storage) == 0
    assert (await remove(storage)).groups == 1


async def test_the_groups_of_many_queues_are_joined_and_left_together(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: a queue that is not there is left out, and one that is not loaded is loaded."""
    names = ["t/a", "t/b"]
    for name in names:
        await exchange.ask(joined(name))
        await place(exchange, name, "waits")
    unload = Unmaterialize(lmq_name="t/b")
    await exchange.ask(operation(unmaterialize=unload))
    await exchange.ask(joins("waits", *names, "t/none"))
    await clock.advance_ms(GONE_MS)
    waiting = await due_groups(storage)

    together = LeaveGroup(lmq_names=[*names, "t/none"], group="waits")
    await exchange.ask(operation(leave_group=together))
    await clock.advance_ms(GONE_MS)
    gone = await due_groups(storage)

    assert waiting == []
    assert sorted(row["lmq_name"] for row in gone) == names


async def test_a_row_about_a_group_with_a_consumer_is_stale(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14, R9: whatever the plan says; its last use may have been noted long ago."""
    await exchange.ask(joined("t/a", "waits"))
    await place(exchange, "t/a", "waits")
    await clock.advance_ms(3 * EXPIRY_MS)
    rows = await table(storage, SCAN_TABLE_NAME_GROUPS)

    applied = await remove(storage, rows)

    assert [(row["group"], row["in_use"]) for row in rows] == [("waits", True)]
    assert (applied.groups, applied.stale) == (0, 1)
    assert await groups_of(storage, "t/a") == ["waits"]


async def test_a_consumer_that_joins_after_the_plan_keeps_its_group(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14, R9: storage checks again in the commit that removes."""
    await place(exchange, "t/joined", "g")
    await place(exchange, "t/polled", "g")
    await place(exchange, "t/raised", "g")
    await clock.advance_ms(GONE_MS)
    planned = await due_groups(storage)
    await exchange.ask(joined("t/joined", "g"))
    await exchange.ask(reserve("t/polled", group="g"))

    removed = await remove(storage, [row for row in planned if row["lmq_name"] != "t/raised"])
    await storage.update_topic("t", group_expiry_seconds=2 * EXPIRY_S)
    raised = await remove(storage, [row for row in planned if row["lmq_name"] == "t/raised"])

    assert len(planned) == 3
    assert (removed.groups, removed.stale) == (0, 2)
    assert (raised.groups, raised.stale) == (0, 1)


async def test_no_group_expires_until_clients_could_return_to_a_new_broker(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R14, E10: a consumer that was there until the broker ended is not forgotten at once."""
    async with storage.exchange() as before:
        await before.ask(joined("t/a", "g"))
        await place(before, "t/a", "g")
        for _ in range(4):
            await clock.advance_ms(EXPIRY_MS // 2)
            await due_in(storage)  # each pass notes that the consumer is there
    await clock.advance_ms(GONE_MS)
    away = await due_in(storage)

    async with storage.exchange(incarnation=8, broker_id="broker-b") as after:
        await clock.advance_ms(CLIENT_TIMEOUT_MS - 1)
        early, unknown = await due_in(storage), await due_groups(storage)
        await after.ask(joined("t/a", "g"))
        await clock.advance_ms(1)
        returned = await due_in(storage)
        await after.ask(left("t/a", "g"))
        gone = await due_in(storage)

    assert away not in (0, NEVER)
    assert early not in (0, NEVER)
    assert unknown == []
    assert returned not in (0, NEVER)
    assert gone not in (0, NEVER)


@pytest.mark.parametrize("taker", [{}, {"incarnation": 8, "broker_id": "broker-b"}])
async def test_groups_expire_also_where_a_claim_comes_before_the_old_link_has_ended(
    storage: RunningStorage, clock: ManualClock, taker: dict[str, Any]
) -> None:
    """R14, C2: a handover, or a broker that has lost its link before storage has noticed."""
    async with storage.exchange() as before:
        await before.ask(joined("t/a", "g"))
        await place(before, "t/a", "g")
        async with storage.exchange(**taker) as after:
            await after.ask(joined("t/a"))  # its consumer has left meanwhile
            await clock.advance_ms(GONE_MS)
            due = await due_groups(storage)

    assert [row["group"] for row in due] == ["g"]


async def test_no_group_expires_while_a_broker_that_claimed_is_not_connected(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R14: it has ended before its link was up, so that none of its clients could return."""
    async with storage.exchange() as before:
        await before.ask(joined("t/a", "g"))
        await place(before, "t/a", "g")
    await undriven(storage)

    await storage.claim(incarnation=8, broker_id="broker-b")
    await clock.advance_ms(GONE_MS)

    assert await due_groups(storage) == []
    assert await due_in(storage) not in (0, NEVER)


async def test_a_change_of_the_topic_starts_the_time_again(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: while groups did not expire, their uses were noted once an hour."""
    await place(exchange, "jobs/a", "g")
    await clock.advance_ms(10 * EXPIRY_MS)

    before = await due_in(storage)
    await storage.update_topic("jobs", group_expiry_seconds=EXPIRY_S)
    after = await due_in(storage)
    await clock.advance_ms(EXPIRY_MS)

    assert before is NEVER
    assert after == EXPIRY_MS
    assert await due_in(storage) == 0


async def test_settled_messages_of_a_topic_with_retention_fall_to_its_rules(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14, R2: completed messages that only the forgotten group had kept are due then."""
    await storage.create_topic(
        "kept",
        retention_enabled=True,
        completed_retention_seconds=1,
        group_expiry_seconds=EXPIRY_S,
    )
    await place(exchange, "kept/a", "forgotten")
    await exchange.ask(append("kept/a", b"1"))
    await settled(exchange, "kept/a", "used")
    await clock.advance_ms(EXPIRY_MS // 2)
    await exchange.ask(reserve("kept/a", group="used"))
    await clock.advance_ms(GONE_MS - EXPIRY_MS // 2)
    completed = NextDueRequest(types=[RETENTION_TYPE_COMPLETED])
    (before,) = (await storage.retention.NextDue(completed)).partitions

    removed = await remove(storage)
    (after,) = (await storage.retention.NextDue(completed)).partitions

    assert (removed.groups, removed.messages) == (1, 0)
    assert (await storage.queue("kept/a")).queue.messages == 1
    assert not before.due_types
    assert list(after.due_types) == [RETENTION_TYPE_COMPLETED]


async def test_what_a_group_kept_of_a_large_queue_is_dropped_in_later_commits(
    storage: RunningStorage,
    exchange: ExchangeClient,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R14, S2: no commit grows with the queue."""
    monkeypatch.setattr(erasures, "ERASED_AT_ONCE_MAX", 2)
    await place(exchange, "t/a", "forgotten")
    for _ in range(5):
        await exchange.ask(append("t/a", b"x"))
    await clock.advance_ms(GONE_MS)
    await settled(exchange, "t/a", "used")

    removed = await remove(storage)

    async def dropped() -> bool:
        return not (await storage.queue("t/a")).queue.messages

    assert (removed.groups, removed.messages) == (1, 0)
    await until(dropped)
    assert await groups_of(storage, "t/a") == ["used"]


async def test_the_last_use_and_its_index_outlive_a_restart(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R14: with groups in the row of their queue, and in rows of their own."""
    await place(exchange, "t/few", "g")
    await place(exchange, "t/many", *(f"g{n}" for n in range(6)))
    await clock.advance_ms(EXPIRY_MS // 2)
    await exchange.ask(reserve("t/many", group="g5"))
    await storage.restart()

    async with storage.exchange():
        await clock.advance_ms(GONE_MS - EXPIRY_MS // 2)
        due = await due_in(storage)
        removed = await remove(storage)

    assert due == 0
    assert removed.groups == 6
    assert await groups_of(storage, "t/many") == ["g5"]
    assert await groups_of(storage, "t/few") == []


async def test_nothing_due_reads_nothing_however_many_groups_there_are(
    storage: RunningStorage, exchange: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14, P3."""
    await exchange.ask_all(
        *(operation(place_group=PlaceGroup(lmq_name=f"t/{n}", group="g")) for n in range(200))
    )
    await due_in(storage)
    reads = count_reads(monkeypatch)
    commits_before = (await storage.info()).commits

    due = await due_in(storage)

    assert due is not NEVER
    assert not reads
    assert await due_groups(storage) == []
    assert (await storage.info()).commits == commits_before


async def test_a_row_without_a_group_is_refused(storage: RunningStorage) -> None:
    """S3."""
    with pytest.raises(errors.InvalidArgument):
        await apply(storage, RETENTION_TYPE_ABANDONED_GROUP, Planned(queue_id=1))
