"""The cost of the index of ages for a commit: partitions with and without it, in this process.

Measures the CPU time of the thread that applies, encodes and writes a frame: a fraction of the time
of a publish, so that it has no bar, and shows a microsecond that `publishing` cannot.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext

from bench import retention_single
from bench.age_index.variants import (
    CONTROL,
    FRAME,
    INDEXED,
    PLAIN,
    PublishFrame,
    compare,
    without_index,
)
from bench.harness.benchmark import Bench
from bench.harness.bodies import random_body
from bench.harness.partition import ask, open_partition
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from tidemark.topics import Topic

_SAME_QUEUES = 4 * FRAME


async def measure_in_storage(bench: Bench) -> None:
    """Frames of first messages, and of further ones."""
    rounds, turns = 2 * bench.rounds, bench.size(full=60, quick=10)
    bench.settings |= {"index_storage_rounds": rounds, "index_storage_turns": turns}
    body = random_body(bench.random, 1)
    number = itertools.count()

    def new_queues() -> list[str]:
        return [f"{retention_single.TOPIC}/{next(number)}" for _ in range(FRAME)]

    def same_queues() -> list[str]:
        first = next(number) * FRAME % _SAME_QUEUES
        return [f"{retention_single.TOPIC}/same-{first + at}" for at in range(FRAME)]

    async with (
        open_partition(bench.directory / "indexed") as indexed,
        open_partition(bench.directory / "plain") as plain,
        open_partition(bench.directory / "control") as control,
    ):
        partitions = {INDEXED: indexed, PLAIN: plain, CONTROL: control}
        for partition in partitions.values():
            topic = Topic(retention_single.TOPIC, retention_single.YOUNG)
            await ask(partition, [PutTopic(topic, create=True)])
        for shape, names in (("first message", new_queues), ("another message", same_queues)):
            publish = _publish(partitions, names, body)
            await compare(bench, f"in storage, {shape}", publish, rounds=rounds, turns=turns)


def _publish(
    partitions: dict[str, Partition], names: Callable[[], list[str]], body: bytes
) -> PublishFrame:
    async def publish(variant: str) -> float:
        frame = [Append(name, 1, body) for name in names()]
        with nullcontext() if variant == INDEXED else without_index():
            before_ns = time.thread_time_ns()
            await ask(partitions[variant], frame)
            taken_ns = time.thread_time_ns() - before_ns
        return taken_ns / 1e3 / FRAME

    return publish
