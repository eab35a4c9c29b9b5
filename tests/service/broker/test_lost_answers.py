"""Operations whose answers were lost, commits of unknown outcome."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeAlias

import pytest
from grpc import StatusCode

from storage_svc.engines.engine import Table
from tests.service.broker.conftest import Gated, StartBroker
from tests.service.broker.test_partitions import sweep
from tests.service.broker.test_run_arrays import RunResult, plain, publish
from tests.service.broker.test_run_arrays import reason_of as reason_of_run
from tests.support.faulty_engine import Fault
from tests.support.gated_storage import GatedLink, gated_storage
from tests.support.local_broker import (
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    until,
    with_faulty_disks,
)
from tests.support.session import Session
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Nack
from tidemark.api.storage.v1.storage_pb2 import GetQueueRequest
from tidemark.bodies import body_of
from tidemark.client.transport.codec import Action, Range, settlement_of
from tidemark.client.transport.frames import PlainRun
from tidemark.clock import ManualClock
from tidemark.errors import PartitionFaulty, TidemarkError, Unavailable

Held: TypeAlias = tuple[Session, int]


async def test_what_was_reserved_with_an_answer_that_was_lost_is_released(
    gated: Gated,
) -> None:
    """V8: no client has had it, so no attempt is counted."""
    local, gates = gated
    link = gates.links[0]
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe("orders/x", "orders/held")
    await session.publish("orders/held", [b"held"])
    (held,) = await take(consumer, 1)

    link.answers.close()
    publishing = session.submit(run_of("orders/x", b"lost"))
    await in_time(link.answers.until_held())  # it is stored, and reserved in the same commit
    await link.break_now()
    link.answers.let_go()

    (delivery,) = await take(consumer, 1)
    assert reason_of(await publishing) == "UNAVAILABLE"
    assert payloads_of([delivery]) == [b"lost"]
    assert (delivery.attempt_count, delivery.delivery_count) == (0, 2)
    assert (await session.settle(held.delivery_tag, Ack())).messages == 1


async def test_a_delivery_that_expired_in_a_commit_of_unknown_outcome_is_held_no_longer(
    start: StartBroker, clock: ManualClock
) -> None:
    """S2, I4: the broker missed the expiry, and the tag would keep the queue from going idle."""
    topic = {"visibility_timeout_ms": 1000, "idle_after_ms": 1000}
    local = await start(clock, partitions=1, topic=topic)
    (disk,) = await with_faulty_disks(local)
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    receipt = await session.publish("orders/x", [b"1"])
    await take(consumer, 1)
    session.destroy_publisher(receipt.publisher_id)
    await consumer.unsubscribe("orders/x")

    disk.next_commit = Fault.AFTER_WRITING

    async def is_unloaded() -> bool:
        await clock.advance_ms(200)
        request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name="orders/x")
        try:
            evicted = await local.topics.TryEvictInactiveQueue(request)
        except TidemarkError:  # the link is not up yet
            return False
        return evicted.outcome in (
            topic_pb2.EVICTION_OUTCOME_EVICTED,
            topic_pb2.EVICTION_OUTCOME_NOT_MATERIALIZED,
        )

    await until(is_unloaded)
    assert session.ended is None


async def test_what_was_reserved_in_a_commit_of_unknown_outcome_is_released(
    start: StartBroker, clock: ManualClock
) -> None:
    """S2, V8: no client holds it, and no consumer waits for its visibility timeout."""
    local = await start(clock, partitions=1)
    (disk,) = await with_faulty_disks(local)
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe("orders/x")

    # The first reserve of the consumer makes the group in a commit of its own, now or later.
    disk.is_meant = lambda batch: any(table is Table.RUN_HEADERS for table, *_ in batch.operations)
    disk.next_commit = Fault.AFTER_WRITING
    publishing = session.submit(run_of("orders/x", b"1"))  # reserved in the same commit
    assert reason_of(await in_time(publishing)) == "COMMIT_OUTCOME_UNKNOWN"
    taking = asyncio.create_task(take(consumer, 1))

    async def is_taken() -> bool:
        await clock.advance_ms(10)
        return taking.done()

    await until(is_taken)
    (delivery,) = await taking
    assert (delivery.attempt_count, delivery.delivery_count) == (0, 2)


async def test_a_pull_from_a_partition_that_fails_is_not_answered_as_if_it_were_empty(
    start: StartBroker,
) -> None:
    """C4, S3: neither by the reserve whose commit fails, nor by those while it is not open."""
    local = await start(partitions=1)
    (disk,) = await with_faulty_disks(local)
    await local.publish(run_of("orders/x", b"1"))
    disk.next_openings += [OSError("no such device")] * 10_000
    disk.is_meant = lambda batch: any(table is Table.DEADLINES for table, *_ in batch.operations)
    disk.next_commit = Fault.BEFORE_WRITING

    for _ in range(2):
        with pytest.raises(TidemarkError) as refused:
            await in_time(local.pull("orders/x"))
        assert refused.value.code is StatusCode.UNAVAILABLE

    disk.next_openings.clear()

    async def is_delivered() -> bool:
        with suppress(Unavailable, PartitionFaulty):  # the link is not up yet
            return payloads_of(await local.pull("orders/x")) == [b"1"]
        return False

    await until(is_delivered)


async def settled_unheard(gated: Gated, payloads: Sequence[bytes], ranges: Sequence[Range]) -> Held:
    """A session, and the tag of a delivery that it settled without getting an answer."""
    local, gates = gated
    link = gates.links[0]
    session = await local.session()
    consumer = session.open_consumer(credit=len(payloads))
    await consumer.subscribe("orders/x")
    await session.publish("orders/x", payloads)
    (held,) = await take(consumer, len(payloads))
    link.answers.close()
    settling = asyncio.create_task(session.settle(held.delivery_tag, Ack(), ranges))
    await in_time(link.answers.until_held())  # it is on disk
    await link.break_now()
    link.answers.let_go()
    with pytest.raises(Unavailable):
        await settling
    return session, held.delivery_tag


@pytest.mark.parametrize("ranges", [[], [(0, 1), (1, 2)]], ids=["whole", "by ranges"])
async def test_a_settlement_that_is_repeated_after_its_answer_was_lost_ends_the_delivery(
    gated: Gated, ranges: list[Range]
) -> None:
    """V6, I4: its tag would keep the queue from going idle for as long as the client stays."""
    session, tag = await settled_unheard(gated, [b"1", b"2"], ranges)

    assert await repeated(session, tag, Ack(), ranges) == ""
    assert await repeated(session, tag, Ack(), ranges) == "UNKNOWN_DELIVERY_TAG"


@pytest.mark.parametrize("ranges", [[], [(0, 1)]], ids=["whole", "by ranges"])
async def test_another_settlement_after_an_answer_was_lost_ends_the_delivery(
    gated: Gated, ranges: list[Range]
) -> None:
    """V6, I4."""
    session, tag = await settled_unheard(gated, [b"1"], ())

    assert await repeated(session, tag, Nack(), ranges) == "ALREADY_SETTLED"
    assert await repeated(session, tag, Nack(), ranges) == "UNKNOWN_DELIVERY_TAG"


async def repeated(session: Session, tag: int, action: Action, ranges: Sequence[Range] = ()) -> str:
    """Settle once the link is up again; returns the reason of a refusal."""
    reason = ""

    async def is_answered() -> bool:
        nonlocal reason
        reason = reason_of(await session.submit_settlement(settlement_of(tag, action, ranges)))
        return reason != "UNAVAILABLE"

    await until(is_answered)
    return reason


class TwoFrames(NamedTuple):
    """Two runs of a queue in partition 0, which a broker behind gates sends in two frames."""

    local: LocalBroker
    session: Session
    link: GatedLink
    both: Sequence[PlainRun]
    elsewhere: Sequence[PlainRun]
    """Runs for the other partitions."""

    async def publish_first(self) -> "asyncio.Task[list[RunResult]]":
        """Publish both; only the first one passes, and no answer does."""
        requests = self.link.requests
        requests.close()
        self.link.answers.close()
        # A partition has its share of a frame, as others leave: the second one is in the next.
        publishing = asyncio.create_task(publish(self.session, [*self.both, *self.elsewhere]))
        await in_time(requests.until_held())
        requests.let_go()
        requests.close()
        return publishing

    async def first_offsets(self, publishing: "asyncio.Task[list[RunResult]]") -> list[int]:
        """Let the second one pass, then the answers; repeat as a client does."""
        await in_time(self.link.requests.until_held())
        self.link.requests.let_go()
        await publish(self.session, self.elsewhere)  # behind it on the same stream
        self.link.answers.let_go()
        results = await in_time(publishing)
        while any(map(reason_of_run, results)):
            results = await publish(self.session, self.both)
        return [
            each[1] if isinstance(each, tuple) else each.receipt.first_offset
            for each in results[:2]
        ]


@asynccontextmanager
async def two_frames(local: LocalBroker) -> AsyncIterator[TwoFrames]:
    await local.stop_broker()
    async with gated_storage(local.storage_address, local.partitions) as gates:
        await local.start_broker(gates.address)
        session = await local.session()
        queue, *others = [local.names_in(each, 1)[0] for each in range(local.partitions)]
        small, large = body_of([b"x"]), body_of([bytes(900_000)] * 2)
        elsewhere = [plain(each, small, partition=at) for at, each in enumerate(others, 1)]
        await publish(session, [plain(queue, small, partition=0), *elsewhere])
        both = [plain(queue, large, count=2, sequence=each, partition=0) for each in (1, 2)]
        yield TwoFrames(local, session, gates.links[0], both, elsewhere)
        await local.stop_broker()


async def test_runs_of_a_frame_keep_their_order_over_a_commit_that_failed(
    start: StartBroker,
) -> None:
    """S2: the second one is on its way when the partition opens again, and must not be stored
    before the first one, which is repeated."""
    local = await start(partitions=6)
    (disk,) = await with_faulty_disks(local)
    async with two_frames(local) as frames:
        disk.only, disk.next_commit = 0, Fault.BEFORE_WRITING
        publishing = await frames.publish_first()

        async def is_open_again() -> bool:
            request = GetQueueRequest(partition=0, lmq_name=frames.both[0][0])
            with suppress(PartitionFaulty):
                await local.storage.GetQueue(request)
                return disk.next_commit is None
            return False

        await until(is_open_again)
        assert await frames.first_offsets(publishing) == [1, 3]


async def test_runs_of_a_frame_keep_their_order_over_a_fault_that_passes(
    start: StartBroker,
) -> None:
    """S2, L4: the first one is refused, which the client repeats; the partition serves when the
    second one arrives, and the broker has heard of nothing."""
    local = await start(partitions=6)
    async with two_frames(local) as frames:
        answers = frames.link.answers
        answers.close()
        before = answers.arrived
        await sweep(local, 0, succeeded=False)
        await in_time(answers.until_arrived(before + 1))  # the fault, which the broker must not see
        publishing = await frames.publish_first()
        await in_time(answers.until_arrived(before + 2))
        await sweep(local, 0, succeeded=True)

        assert await frames.first_offsets(publishing) == [1, 3]
