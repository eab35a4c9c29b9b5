"""A real storage process under load, killed with `kill -9` at random moments, again and again.

What the client sends is what the model believes; what was not answered when the process died is
sent again, as a broker would, and must be neither lost nor done twice. Then every queue is emptied
and compared: S2, S11, V4, V6 and V8 at once.

`--long` makes it fifty rounds instead of a few.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    outcome_of,
    payloads,
    reserve,
    settle,
)
from tests.support.storage_client import StorageClient, storage_process
from tidemark import errors
from tidemark.api.broker.v1.topic_pb2 import RETRY_PLACE_FIRST
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_NACK,
    SETTLE_ACTION_RELEASE,
    Operation,
    SettleAction,
)
from tidemark.clock import SystemClock
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

ROUNDS, ROUNDS_LONG = 4, 50
SEED = 20_261_116
PARTITIONS = 2
QUEUES = 12
KEYS = ("", "a", "b")
FRAMES_IN_FLIGHT = 8
CONSUMERS = 3
VISIBILITY_MS = 12 * 60 * 60 * 1000

Lane = tuple[str, str]
"""lmq_name and fairness key."""


class Unanswered:
    """Operations that were sent, in order, until they are answered with success."""

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self._last = 0
        self.answered = 0

    async def send(self, exchange: ExchangeClient, *operations: Operation) -> None:
        """Send one frame and wait for its answers; raises why there are none."""
        numbers = []
        for each in operations:
            self._last += 1
            self._operations[self._last] = each
            numbers.append(self._last)
        for number, result in zip(numbers, await exchange.send(*operations), strict=True):
            outcome = outcome_of(await result)
            assert not isinstance(outcome, errors.TidemarkError), outcome
            del self._operations[number]
            self.answered += 1

    async def send_again(self, exchange: ExchangeClient) -> int:
        again = list(self._operations.values())
        self._operations.clear()
        await self.send(exchange, *again)
        return len(again)


class Client:
    """Everything that happens to one partition, and what must be true of it."""

    def __init__(self, partition: int, rng: random.Random) -> None:
        self.partition = partition
        self.queues = [f"jobs/{partition}-{number}" for number in range(QUEUES)]
        self.publishes = Unanswered()
        self.settles = Unanswered()
        self.sent: dict[Lane, int] = {}  # messages, numbered from 0
        self.deliveries: Counter[bytes] = Counter()  # that arrived here
        self.attempts: Counter[bytes] = Counter()
        self.acked: set[bytes] = set()
        self.in_hand: dict[bytes, bytes] = {}  # message -> receipt
        self._fresh: dict[Lane, int] = {}  # last message that was handed out for the first time
        self._sequence = 0
        self._rng = rng

    # --- load ----------------------------------------------------------------------------------

    async def publish(self, exchange: ExchangeClient) -> None:
        """One frame of a few runs."""
        operations = []
        for _ in range(self._rng.randrange(1, 5)):
            lane = (self._rng.choice(self.queues), self._rng.choice(KEYS))
            first = self.sent.get(lane, 0)
            self.sent[lane] = first + self._rng.randrange(1, 20)
            self._sequence += 1
            operations.append(
                append(
                    lane[0],
                    *(message(lane, number) for number in range(first, self.sent[lane])),
                    fairness_key=lane[1],
                    producer_id=f"producer-{self.partition}",
                    sequence=self._sequence,
                )
            )
        await self.publishes.send(exchange, *operations)

    async def consume(self, exchange: ExchangeClient, queues: list[str]) -> None:
        """Take from a queue and end what came in one of the ways there are."""
        lmq_name = self._rng.choice(queues)
        asked = reserve(lmq_name, self._rng.randrange(1, 40), visibility_ms=VISIBILITY_MS)
        try:
            slices = (await exchange.ask(asked)).slices
        except errors.QueueNotFound:
            return  # nothing was published there yet
        settlements = []
        for each in slices:
            self.take(lmq_name, each)
            settlements += self.end(each)
        await self.settles.send(exchange, *settlements)

    def take(self, lmq_name: str, slice_: Any) -> list[bytes]:
        """Check what was handed out against everything that is known of it."""
        messages = payloads(slice_.body)
        lane = (lmq_name, slice_.fairness_key)
        assert len(messages) == slice_.count
        for each in messages:
            assert each not in self.acked, f"{each!r} was settled and came back"
            assert each not in self.in_hand, f"{each!r} is handed out twice"
            seen = self.deliveries[each]
            assert slice_.delivery_count > seen, f"{each!r} came {seen} times before"
            assert slice_.attempt_count == self.attempts[each], each
            self.in_hand[each] = slice_.receipt
            self.deliveries[each] += 1
        numbers = [number_of(lane, each) for each in messages]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if slice_.delivery_count == 1:
            assert numbers[0] > self._fresh.get(lane, -1), f"{lane} is out of order"
            self._fresh[lane] = numbers[-1]
        return messages

    def end(self, slice_: Any) -> list[Operation]:
        """Some of it done, some failed, some given back, some kept in hand."""
        settlements = []
        at = 0
        messages = payloads(slice_.body)
        actions = (SETTLE_ACTION_ACK, SETTLE_ACTION_NACK, SETTLE_ACTION_RELEASE, None)
        while at < len(messages):
            end = self._rng.randrange(at + 1, len(messages) + 1)
            action = self._rng.choices(actions, (70, 15, 10, 5))[0]
            if action is not None:
                settlements.append(settle(slice_.receipt, action, (at, end)))
                self._believe(action, messages[at:end])
            at = end
        return settlements

    def _believe(self, action: SettleAction.ValueType, messages: list[bytes]) -> None:
        for each in messages:
            del self.in_hand[each]
            if action == SETTLE_ACTION_ACK:
                self.acked.add(each)
            elif action == SETTLE_ACTION_NACK:
                self.attempts[each] += 1

    # --- after a crash -------------------------------------------------------------------------

    async def check(self, exchange: ExchangeClient) -> None:
        """Empty every queue: all that must be there is, in order, and nothing else."""
        expected = {
            message(lane, number) for lane, sent in self.sent.items() for number in range(sent)
        }
        expected -= self.acked | set(self.in_hand)
        arrived: set[bytes] = set()
        slices = []
        last: dict[Lane, int] = {}
        for lmq_name in {lane[0] for lane in self.sent}:
            while found := (await exchange.ask(self._everything(lmq_name))).slices:
                for each in found:
                    lane = (lmq_name, each.fairness_key)
                    messages = self.take(lmq_name, each)
                    assert number_of(lane, messages[0]) > last.get(lane, -1), "out of order"
                    last[lane] = number_of(lane, messages[-1])
                    arrived.update(messages)
                    slices.append(each)
        missing = sorted(expected - arrived)
        assert not missing, f"{len(missing)} messages are lost, such as {missing[:3]}"
        assert arrived == expected
        settlements = [operation for each in slices for operation in self.end(each)]
        await self.settles.send(exchange, *settlements)

    @staticmethod
    def _everything(lmq_name: str) -> Operation:
        return reserve(lmq_name, 10_000, visibility_ms=VISIBILITY_MS)


def message(lane: Lane, number: int) -> bytes:
    return f"{lane[0]}|{lane[1]}|{number}".encode()


def number_of(lane: Lane, data: bytes) -> int:
    lmq_name, key, number = data.decode().split("|")
    assert (lmq_name, key) == lane, f"{data!r} came out of {lane}"
    return int(number)


async def until_ended(exchange: ExchangeClient, step: Callable[[], Awaitable[None]]) -> None:
    """Repeat a step until the process dies under it."""
    with suppress(errors.ServiceError):
        while not exchange.ended.done():
            await step()


async def load(client: Client, exchange: ExchangeClient) -> None:
    """Publishers and consumers, each with a frame in flight, until the process is killed."""
    publishers = [lambda: client.publish(exchange)] * (FRAMES_IN_FLIGHT - CONSUMERS)
    async with asyncio.TaskGroup() as tasks:
        for step in publishers:
            tasks.create_task(until_ended(exchange, step))
        for number in range(CONSUMERS):
            queues = client.queues[number::CONSUMERS]

            async def consume(queues: list[str] = queues) -> None:
                await client.consume(exchange, queues)

            tasks.create_task(until_ended(exchange, consume))


async def kill_in_the_middle(
    process: ServiceProcess, clients: list[Client], rng: random.Random
) -> None:
    """After a random amount of work, at a random moment of whatever is going on then."""
    clock = SystemClock()
    wanted = sum(client.publishes.answered for client in clients) + rng.randrange(1, 400)
    while sum(client.publishes.answered for client in clients) < wanted:
        await clock.sleep_ms(1)
    await clock.sleep_ms(rng.randrange(10))
    await process.kill()


async def start_round(
    storage: StorageClient, clients: list[Client], running: AsyncExitStack
) -> list[ExchangeClient]:
    """Claim, finish what was not answered, report what is held, compare."""
    exchanges = []
    topic = await storage.create_topic("jobs", retry_place=RETRY_PLACE_FIRST)
    for client in clients:
        claimed = await storage.claim(client.partition)
        bound = storage.bound(client.partition, claimed.broker_epoch)
        exchange = await running.enter_async_context(bound)
        await apply_topic(exchange, topic)
        await client.publishes.send_again(exchange)
        await client.settles.send_again(exchange)
        held = set(client.in_hand.values())
        await storage.report_held(claimed.broker_epoch, held, client.partition)
        await client.check(exchange)
        exchanges.append(exchange)
    return exchanges


@pytest.mark.timeout(1800)
async def test_kill_9_at_random_moments_loses_nothing_that_was_answered(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """S2, S11, V4, V6, V8."""
    rounds = ROUNDS_LONG if request.config.getoption("--long") else ROUNDS
    rng = random.Random(SEED)
    clients = [Client(partition, rng) for partition in range(PARTITIONS)]
    process = storage_process(
        tmp_path / "data",
        tmp_path / "storage.log",
        partitions=str(PARTITIONS),
        storage_disk_free_bytes_min="0",
    )
    try:
        for _ in range(rounds):
            await process.start()
            await process.wait_healthy()
            async with AsyncExitStack() as running:
                channel = await running.enter_async_context(open_channel(process.address))
                exchanges = await start_round(StorageClient(channel), clients, running)
                async with asyncio.TaskGroup() as tasks:
                    for client, exchange in zip(clients, exchanges, strict=True):
                        tasks.create_task(load(client, exchange))
                    tasks.create_task(kill_in_the_middle(process, clients, rng))
        await process.start()
        await process.wait_healthy()
        async with AsyncExitStack() as running:
            channel = await running.enter_async_context(open_channel(process.address))
            await start_round(StorageClient(channel), clients, running)
        exit_code = await process.stop()
    finally:
        if process.running:
            await process.kill()

    assert exit_code == 0
    delivered = sum(len(client.acked) for client in clients)
    assert delivered > 100 * ROUNDS


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
async def test_a_service_that_is_asked_to_stop_ends_its_exchanges_at_once(
    tmp_path: Path, which: signal.Signals, usual_hangups: None
) -> None:
    """S5: with SHUTTING_DOWN, long before its grace is over."""
    process = storage_process(
        tmp_path / "data",
        tmp_path / "storage.log",
        partitions="1",
        shutdown_grace_ms="600000",
    )
    try:
        await process.start()
        await process.wait_healthy()
        async with open_channel(process.address) as channel:
            storage = StorageClient(channel)
            async with storage.exchange() as exchange:
                await exchange.healths.get()

                process.signal(which)

                assert await SystemClock().wait_for(process.wait(), 60_000) == 0
                assert isinstance(await exchange.ended, errors.ShuttingDown)
    finally:
        if process.running:
            await process.kill()
