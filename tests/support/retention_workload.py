"""Queues as retention meets them, and the exact state that it must leave behind.

Fills storage at random: topics with each limit and with none, queues with one message or several
runs, groups that have settled some of them, and live reservations. The model applies R1, R2, R5 and
the deletion of settled messages to runs, which storage deletes as a whole. A run of which a live
reservation holds a message stays.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.exchange_client import ExchangeClient, append, apply_topic, reserve, settle
from tests.support.storage_client import RunningStorage
from tidemark.api.storage.v1.exchange_pb2 import SETTLE_ACTION_ACK, SETTLE_ACTION_NACK, Operation
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_OUTBOX, ConfirmPartitionTimeRequest
from tidemark.clock import ManualClock
from tidemark.names import partition_of, topic_of

PARTITIONS: Final = 2
DAY_S: Final = 86_400
HALF_DAY_S: Final = DAY_S // 2
AGES_S: Final = (3 * DAY_S, DAY_S, 0)
"""Ages of the messages when the passes begin, far from all limits: the passes may take minutes."""

TOPICS: Final[dict[str, dict[str, Any]]] = {
    "unlimited": {},
    "kept": {"retention_enabled": True},
    "expired": {"retention_enabled": True, "retention_seconds": 2 * DAY_S},
    "soon": {"retention_enabled": True, "retention_seconds": HALF_DAY_S},
    "completed": {"retention_enabled": True, "completed_retention_seconds": HALF_DAY_S},
    "both": {
        "retention_enabled": True,
        "retention_seconds": 2 * DAY_S,
        "completed_retention_seconds": HALF_DAY_S,
    },
    "waiting": {"max_wait_time_seconds": HALF_DAY_S},
    "waiting-kept": {"retention_enabled": True, "max_wait_time_seconds": 2 * DAY_S},
    "waiting-completed": {
        "retention_enabled": True,
        "max_wait_time_seconds": 2 * DAY_S,
        "completed_retention_seconds": HALF_DAY_S,
    },
}

EXPIRED, COMPLETED, EVICTED = "expired", "completed", "max_wait_time_eviction"

_GROUPS: Final = ("a", "b")
_SINGLE_SHARE: Final = 0.6
"""The share of queues that get one message and no more, as most do."""

_RUN_MESSAGES_MAX: Final = 5
_HELD_MS: Final = 12 * 3_600_000
_FRAME: Final = 200


@dataclass(slots=True)
class QueueModel:
    """One queue: everything that was published to it, settled and reserved."""

    lmq_name: str
    groups_from: int
    """The first stage at which its groups take messages."""
    groups: dict[str, set[int]]
    """The offsets that each group has settled."""
    single: bool
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Stored runs by first offset: messages and the age in seconds."""
    held: set[int] = field(default_factory=set)
    """Offsets under live reservations."""
    next_offset: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        return TOPICS[topic_of(self.lmq_name)]

    def published(self, messages: int, age_s: int) -> None:
        self.runs[self.next_offset] = messages, age_s
        self.next_offset += messages

    def drop_settled(self) -> None:
        """Without `retention_enabled`, settled runs are deleted at once (R2)."""
        if self.settings.get("retention_enabled"):
            return
        for first, (messages, _) in list(self.runs.items()):
            if not self._waiting(range(first, first + messages)):
                del self.runs[first]

    def _waiting(self, offsets: range) -> set[int]:
        """Offsets that some group has not settled; all without groups."""
        if not self.groups:
            return set(offsets)
        return {each for each in offsets if not all(each in done for done in self.groups.values())}

    def apply_rules(self) -> Counter[str]:
        """Bring the queue to the state after retention. Removed messages by type."""
        removed: Counter[str] = Counter()
        for first, (messages, age_s) in list(self.runs.items()):
            offsets = range(first, first + messages)
            if self.held.intersection(offsets):
                continue
            waiting = self._waiting(offsets)
            if self._is_due("retention_seconds", age_s):
                removed[EXPIRED] += messages
                del self.runs[first]
                continue
            if waiting and self._is_due("max_wait_time_seconds", age_s):
                removed[EVICTED] += len(waiting)
                for done in self.groups.values():
                    done.update(offsets)
                if len(waiting) == messages:
                    del self.runs[first]
                    continue
                waiting = set()
            if not waiting and self._is_due("completed_retention_seconds", age_s):
                removed[COMPLETED] += messages
                del self.runs[first]
        self.drop_settled()
        return removed

    def _is_due(self, limit: str, age_s: int) -> bool:
        limit_s = self.settings.get(limit, 0)
        return bool(0 < limit_s <= age_s)

    @property
    def stored(self) -> set[int]:
        return {
            offset
            for first, (messages, _) in self.runs.items()
            for offset in range(first, first + messages)
        }


async def fill(
    storage: RunningStorage,
    clock: ManualClock,
    queues: int,
    rng: random.Random,
    names: Sequence[str] = tuple(TOPICS),
) -> list[QueueModel]:
    """Publish to queues of these topics, settle and reserve, in stages.

    The clock is at the time of the passes afterwards.
    """
    topics = [await storage.create_topic(name, **settings) for name, settings in TOPICS.items()]
    models = [_new_queue(f"{rng.choice(names)}/{n}", rng) for n in range(queues)]
    for stage, age_s in enumerate(AGES_S):
        async with _exchanges(storage) as exchanges:
            for topic in topics:
                await apply_topic(exchanges[1], topic)
            ask = _Frames(exchanges)
            await _publish(ask, models, stage, rng)
            await _settle(ask, models, stage, rng)
        next_age_s = AGES_S[stage + 1] if stage + 1 < len(AGES_S) else age_s
        await _later(storage, clock, age_s - next_age_s)
    return models


async def take_for_new_groups(
    storage: RunningStorage, models: Sequence[QueueModel], rng: random.Random
) -> None:
    """A group more for every other queue: it takes from the start, and settles or returns it."""
    joined = [model for model in models if model.next_offset and rng.random() < 0.5]
    for model in joined:
        model.groups["late"] = set()
    async with _exchanges(storage) as exchanges:
        await _take(_Frames(exchanges), [(model, "late") for model in joined], rng)
    for model in joined:
        model.drop_settled()


async def _later(storage: RunningStorage, clock: ManualClock, seconds: int) -> None:
    """Set the wall clock forward, and confirm it: to advance would wake all sleepers of days."""
    clock.set_wall_ms(clock.wall_ms() + 1000 * seconds)
    for partition in range(PARTITIONS):
        await storage.due(SCAN_KIND_OUTBOX, partition)  # it looks at its clock
        confirm = ConfirmPartitionTimeRequest(partition=partition)
        await storage.storage.ConfirmPartitionTime(confirm)


def _new_queue(lmq_name: str, rng: random.Random) -> QueueModel:
    groups = _GROUPS[: rng.randrange(len(_GROUPS) + 1)]
    return QueueModel(
        lmq_name,
        groups_from=rng.randrange(len(AGES_S)),
        groups={name: set() for name in groups},
        single=rng.random() < _SINGLE_SHARE,
    )


async def _publish(
    ask: "_Frames", models: Sequence[QueueModel], stage: int, rng: random.Random
) -> None:
    operations: list[tuple[str, Operation]] = []
    for model in models:
        if model.single:
            sizes = [1] if stage == 0 else []
        else:
            sizes = [rng.randrange(1, _RUN_MESSAGES_MAX + 1) for _ in range(rng.randrange(3))]
        for messages in sizes:
            first = model.next_offset
            payloads = [b"%d" % offset for offset in range(first, first + messages)]
            operations.append((model.lmq_name, append(model.lmq_name, *payloads)))
            model.published(messages, AGES_S[stage])
    await ask.all(operations)


async def _settle(
    ask: "_Frames", models: Sequence[QueueModel], stage: int, rng: random.Random
) -> None:
    """Groups take some messages, and settle or return them. In the last stage they also keep some.

    All groups of a queue take theirs before any of it is settled: a later group would not get
    messages that are gone.
    """
    taking = [
        (model, group)
        for model in models
        if model.groups_from <= stage and model.next_offset
        for group in model.groups
    ]
    await _take(ask, taking, rng, keep=stage == len(AGES_S) - 1)
    for model in models:
        if model.groups_from <= stage:
            model.drop_settled()


async def _take(
    ask: "_Frames",
    taking: Sequence[tuple[QueueModel, str]],
    rng: random.Random,
    *,
    keep: bool = False,
) -> None:
    """Reserve some messages for groups, and settle or return them; with `keep`, some stay held."""
    results = await ask.all(
        [
            (
                model.lmq_name,
                reserve(
                    model.lmq_name,
                    rng.randrange(1, 2 * _RUN_MESSAGES_MAX),
                    group=group,
                    visibility_ms=_HELD_MS,
                ),
            )
            for model, group in taking
        ]
    )
    operations: list[tuple[str, Operation]] = []
    for (model, group), result in zip(taking, results, strict=True):
        for taken in result.slices:
            offsets = range(taken.first_offset, taken.first_offset + taken.count)
            choice = rng.choice(("ack", "ack", "ack", "nack", "keep", "ack some"))
            acked = 0
            if choice == "nack":
                operations.append((model.lmq_name, settle(taken.receipt, SETTLE_ACTION_NACK)))
                continue
            if choice == "ack some" and keep:
                acked = rng.randrange(1, taken.count + 1)
            elif choice != "keep" or not keep:
                acked = taken.count
            if acked:
                ack = settle(taken.receipt, SETTLE_ACTION_ACK, (0, acked))
                operations.append((model.lmq_name, ack))
            model.groups[group].update(offsets[:acked])
            model.held.update(offsets[acked:])
    await ask.all(operations)


class _Frames:
    """Operations in frames, each to the partition of its queue."""

    def __init__(self, exchanges: Sequence[ExchangeClient]) -> None:
        self._exchanges = exchanges

    async def all(self, operations: Sequence[tuple[str, Operation]]) -> list[Any]:
        """The results in the order of the operations."""
        results: list[Any] = [None] * len(operations)
        for partition, exchange in enumerate(self._exchanges):
            places = [
                place
                for place, (name, _) in enumerate(operations)
                if partition_of(name, PARTITIONS) == partition
            ]
            for start in range(0, len(places), _FRAME):
                some = places[start : start + _FRAME]
                found = await exchange.ask_all(*(operations[place][1] for place in some))
                for place, result in zip(some, found, strict=True):
                    if isinstance(result, Exception):
                        raise result
                    results[place] = result
        return results


@asynccontextmanager
async def _exchanges(storage: RunningStorage) -> AsyncIterator[list[ExchangeClient]]:
    async with AsyncExitStack() as opened:
        yield [
            await opened.enter_async_context(storage.exchange(partition))
            for partition in range(PARTITIONS)
        ]
