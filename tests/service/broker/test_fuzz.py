"""Random frames, valid and invalid, to a real broker: it neither dies nor leaks (S3).

The seeds are fixed, so that what is sent is the same every time; what meets what is not.
"""

import asyncio
from random import Random
from typing import Any

import grpc
import pytest

import tidemark
from broker_svc import app
from broker_svc.components import BrokerComponents
from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    LocalBroker,
    in_time,
    run_of,
    until,
)
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import (
    Ack,
    DeadLetter,
    Delivery,
    DeliveryArray,
    Extend,
    Nack,
    PublishRun,
    Release,
    RunArray,
    Settlement,
)
from tidemark.bodies import body_of
from tidemark.client.transport.codec import Action, Target, settlement_of
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.names import partition_of

pytestmark = pytest.mark.slow

SHORT_MS = 1_500
LONG_MS = 60_000
STREAMS = 6
NAMES = [
    *(f"orders/{number}" for number in range(8)),
    *(f"owned/{number}" for number in range(4)),
    "orders",
    "nowhere/x",
    "orders/\x00",
    "/",
    "",
]
GROUPS = ["", "mail", "audit", "\n", "g" * 200]
MODES: list[Any] = [0, 1, 1, 1, 2, 3, 4, 77]
NUMBERS = [0, 1, 2, 3, 10, 50, 1000, 2**32 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[BrokerComponents]:
    """The inside of every broker that is started."""
    built: list[BrokerComponents] = []
    build = app.build_components

    def remember(*args: Any) -> Any:
        parts = build(*args)
        built.append(parts[0])
        return parts

    monkeypatch.setattr(app, "build_components", remember)
    return built


class Fuzzer:
    """Makes frames; what it has seen of the broker flows back into them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tags = [1]
        self.receipts = [b"", b"not a receipt", bytes(27)]
        self.publishers = [0, 4711]
        self.delivered = 0

    def saw(self, deliveries: list[Delivery]) -> None:
        for each in deliveries:
            self.delivered += 1
            if each.delivery_tag:
                self.tags.append(each.delivery_tag)
            self.receipts.append(each.receipt)
        del self.tags[:-50], self.receipts[:-50]

    def saw_array(self, array: DeliveryArray) -> None:
        self.delivered += len(array.delivery_tags)
        self.tags += array.delivery_tags
        self.receipts += array.receipts
        del self.tags[:-50], self.receipts[:-50]

    def number(self) -> int:
        return self.random.choice(NUMBERS)

    def some(self, most: int) -> range:
        """Nothing, most of the time."""
        return range(self.random.choice([0, 0, 1, self.random.randint(0, most)]))

    def run(self) -> PublishRun:
        choose, chance = self.random.choice, self.random.random
        payloads = [self.random.randbytes(choose([0, 1, 100])) for _ in self.some(5)] or [b"1"]
        run = run_of(choose(NAMES), *payloads, request_id=self.random.randint(0, 2**64 - 1))
        if chance() < 0.1:
            run.count = self.number() % 2**32
        if chance() < 0.2:
            run.fairness_key = choose(["gold", "\n", "k" * 200])
        if chance() < 0.1:
            run.delay_ms = self.number()
        if chance() < 0.1:
            run.ttl_ms = self.number()
        if chance() < 0.2:
            run.sequence = self.random.randint(1, 20)
        if chance() < 0.1:
            run.partition = choose([0, 1, 2, 2**32 - 1])
        if chance() < 0.1:
            run.publisher_id = choose(self.publishers)
        if chance() < 0.05:
            run.traceparent = "x" * choose([10, 1000])
        return run

    def run_array(self) -> RunArray:
        """Columns of one length, nearly always, of runs of which some are refused."""
        choose = self.random.choice
        array = RunArray()
        for _ in self.some(20):
            body = body_of(
                [self.random.randbytes(choose([0, 1, 100])) for _ in range(choose([1, 3]))]
            )
            name = choose(NAMES)
            array.lmq_names.append(name)
            array.bodies.append(choose([body, body, body, b"", self.random.randbytes(10)]))
            at_home = partition_of(name, 2)
            array.runs.extend(
                (
                    self.random.randint(0, 2**64 - 1),
                    choose([1, 1, 3, self.number() % 2**32, 2**64 - 1]),
                    choose([0, 0, self.random.randint(1, 20), 2**64 - 1]),
                    choose([at_home, at_home, 0, 2**32 - 1, 2**64 - 1]),
                )
            )
        if self.random.random() < 0.005:
            array.runs.extend([1] * choose([1, 4]))
        return array

    def settlement(self) -> Settlement:
        choose = self.random.choice
        target: Target = choose(self.tags) if choose([True, False]) else choose(self.receipts)
        actions: list[Action] = [
            Ack(),
            Ack(),
            Nack(delay_ms=choose([0, 0, 10, 2**63])),
            Release(),
            DeadLetter(reason="fuzz"),
            Extend(visibility_ms=self.number()),
        ]
        ranges = [(self.random.randint(0, 3), self.random.randint(0, 5)) for _ in self.some(3)]
        settlement = settlement_of(target, choose(actions), ranges, self.random.randint(0, 3))
        if self.random.random() < 0.1:
            settlement.ClearField(choose(["target", "action"]))
        return settlement

    def sync(self) -> subscription_pb2.SubscriptionSync:
        choose = self.random.choice
        sync = subscription_pb2.SubscriptionSync(
            request_id=self.number(),
            mode=choose(MODES),
            consumer_id=choose([1, 1, 2, 3, 4711]),
            group=choose(GROUPS),
        )
        for _ in self.some(6):
            entry = sync.entries.add(lmq_name=choose(NAMES), epoch=choose([0, 1, 2, 2**64 - 1]))
            match choose(["", "", "", "earliest", "latest", "last", "offset"]):
                case "":
                    pass
                case "earliest" | "latest" as position:
                    setattr(entry.start, position, True)
                case position:
                    setattr(entry.start, position, self.number())
        return sync

    def frame(self) -> broker_pb2.SessionRequest:
        choose = self.random.choice
        frame = broker_pb2.SessionRequest(
            runs=[self.run() for _ in self.some(10)],
            settlements=[self.settlement() for _ in self.some(10)],
            syncs=[self.sync() for _ in self.some(3)],
            destroy_publishers=[choose(self.publishers) for _ in self.some(1)],
        )
        frame.run_arrays.extend(self.run_array() for _ in self.some(2))
        for _ in self.some(2):
            tags = [choose([choose(self.tags), self.number()]) for _ in self.some(20)]
            frame.acks.add(request_id=self.number(), delivery_tags=tags)
        for _ in self.some(2):
            renewal = frame.renewals.add(
                request_id=self.number(),
                delivery_tags=[choose(self.tags) for _ in self.some(20)],
                visibility_ms=choose([0, 0, 50, 1000, 2**63]),
            )
            for _ in self.some(3):
                given_messages = self.number() % 2**32
                renewal.receipts.add(receipt=choose(self.receipts), given_messages=given_messages)
        for _ in self.some(2):
            frame.hand_outs.add(
                consumer_id=choose([1, 2, 3, 4711]),
                messages=self.number(),
                deliveries=self.number(),
                first_attempts=self.number(),
                urgent=choose([True, False]),
                number=self.number(),
            )
        for _ in self.some(1):
            frame.open_publishers.add(request_id=self.number(), lmq_name=choose(NAMES))
        for _ in self.some(2):
            frame.open_consumers.add(
                consumer_id=choose([0, 1, 2, 3]),
                group=choose(GROUPS),
                credit=self.number(),
                visibility_ms=choose([0, 0, 50, 1000, 2**63]),
                reports_hand_outs=choose([True, False]),
                takes_arrays=choose([True, False]),
            )
        for _ in self.some(3):
            frame.credits.add(
                consumer_id=choose([1, 2, 3, 4711]),
                messages=self.number(),
                close=self.random.random() < 0.1,
            )
        if self.random.random() < 0.1:
            held = frame.heartbeat.held.add(group=choose(GROUPS))
            for _ in self.some(5):
                held.entries.add(lmq_name=choose(NAMES), epoch=self.number())
        if self.random.random() < 0.005:
            frame.hello.client_id = "again"
        return frame

    # --- clients -------------------------------------------------------------------------------

    async def stream(self, api: BrokerServiceStub) -> None:
        """One session, from a hello to an end of some kind."""
        call = api.Session()
        client_id = self.random.choice(["ada", "bob", "eve", "\x00"])
        hello = broker_pb2.Hello(
            client_id=client_id, producer_id=self.random.choice(["", "p", "\n"])
        )
        reading = asyncio.create_task(self.read(call))
        try:
            await call.write(broker_pb2.SessionRequest(hello=hello))
            for _ in range(self.random.randint(1, 60)):
                await call.write(self.frame())
            if self.random.random() < 0.5:
                await call.done_writing()
                await in_time(reading)
        except (TidemarkError, asyncio.InvalidStateError, grpc.aio.UsageError):
            pass  # the broker has ended it
        finally:
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def read(self, call: Any) -> None:
        async for frame in call:
            self.saw(list(frame.deliveries))
            for array in frame.delivery_arrays:
                self.saw_array(array)
            self.publishers += [each.publisher_id for each in frame.publishers]
            del self.publishers[:-20]

    async def unary(self, local: LocalBroker, api: BrokerServiceStub) -> None:
        """One call of a client that does not stay."""
        choose = self.random.choice
        client_id = choose(["ada", "una", ""])
        try:
            match choose(["publish", "pull", "settle", "heartbeat", "delete", "purge"]):
                case "publish":
                    runs = [self.run() for _ in self.some(5)]
                    await api.Publish(broker_pb2.PublishRequest(client_id=client_id, runs=runs))
                case "pull":
                    request = broker_pb2.PullRequest(
                        client_id=client_id,
                        group=choose(GROUPS),
                        lmq_name=choose(NAMES),
                        wait_ms=choose([0, 20]),
                        max_messages=choose([0, 1, 100_000]),
                    )
                    self.saw(list((await api.Pull(request)).deliveries))
                case "settle":
                    settlements = [self.settlement() for _ in self.some(5)]
                    await api.Settle(
                        broker_pb2.SettleRequest(client_id=client_id, settlements=settlements)
                    )
                case "heartbeat":
                    await api.Heartbeat(broker_pb2.HeartbeatRequest(client_id=client_id))
                case "delete":
                    request_ = topic_pb2.DeleteQueueRequest(lmq_name=choose(NAMES))
                    await local.topics.DeleteQueue(request_)
                case "purge":
                    await local.topics.PurgeQueue(
                        topic_pb2.PurgeQueueRequest(lmq_name=choose(NAMES))
                    )
        except TidemarkError as error:
            if error.reason == "INTERNAL":
                raise


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_frames_neither_kill_the_broker_nor_leave_anything_behind(
    start: StartBroker,
    built: list[BrokerComponents],
    seed: int,
    pytestconfig: pytest.Config,
) -> None:
    """S3, I3, I4."""
    clock = SystemClock()
    local = await start(
        client_timeout_ms=1000,
        unary_publisher_idle_timeout_ms=500,
        topic={"visibility_timeout_ms": 60_000, "partitions": 2},
    )
    await local.create_topic("owned", subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
    (components,) = built
    fuzzer = Fuzzer(seed)
    until_ms = clock.monotonic_ms() + (LONG_MS if pytestconfig.getoption("--long") else SHORT_MS)

    async def streams() -> None:
        api = BrokerServiceStub(await local.channel())
        while clock.monotonic_ms() < until_ms or not fuzzer.delivered:
            await fuzzer.stream(api)

    async def calls() -> None:
        api = BrokerServiceStub(await local.channel())
        while clock.monotonic_ms() < until_ms:
            await fuzzer.unary(local, api)

    await asyncio.gather(*(streams() for _ in range(STREAMS)), calls())

    def left() -> dict[str, int]:
        return {
            "leases": components.leases.active,
            "deliveries": len(components.directory),
            "publishers": len(components.publishers),
            "feeds": len(components.dispatcher),
            "subscriptions": len(components.subscriptions),
            "held": sum(queue.deliveries for queue in components.tracking),
            "settling": sum(queue.pending_settlements for queue in components.tracking),
            "asked": sum(link.waiting for link in components.links.values()),
        }

    async def nothing_is_left() -> bool:
        return not any(left().values())

    try:
        await until(nothing_is_left)
    except TimeoutError:
        pytest.fail(f"seed {seed} leaves {left()}")
    assert fuzzer.delivered > 0
    listed = await local.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders"))
    assert {queue.inflight for queue in listed.queues} <= {0}

    # By a client that stays alive by itself: a second of silence is enough to be gone here.
    async with tidemark.connect(local.address, client_id="good") as client:
        await (await client.publisher("orders/good")).publish(b"as if nothing had been")
        async with client.subscribe(["orders/good"], group="good") as deliveries:
            delivery = await in_time(anext(deliveries))
    assert delivery.payload == b"as if nothing had been"
