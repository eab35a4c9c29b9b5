"""The figures that partitions keep anyway, exported as metrics with the partition as attribute.

Names and reads them; counts nothing itself. A reading never touches an engine and never iterates
over queues. A partition that is reopening has no figures.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from storage_svc.partition.health import HealthState
from storage_svc.partition.partition import Partition
from storage_svc.partition.state import PartitionState
from tidemark.errors import TidemarkError
from tidemark.telemetry import observe
from tidemark.telemetry.metrics import Reading


def offer(partitions: Collection[Partition], clock_offset_ms: Callable[[], int]) -> None:
    """Offer the figures of these partitions, for as long as the process lives."""

    def of_partition(
        name: str,
        description: str,
        read: Callable[[Partition], float],
        unit: str = "",
        kind: Literal["gauge", "counter"] = "gauge",
    ) -> None:
        def readings() -> Iterator[Reading]:
            for partition in list(partitions):  # some may be opened or closed meanwhile
                yield read(partition), {"partition": partition.number}

        observe(kind, name, description, readings, unit=unit)

    def of_state(
        kind: Literal["gauge", "counter"],
        name: str,
        description: str,
        read: Callable[[PartitionState], float],
        unit: str = "",
    ) -> None:
        def readings() -> Iterator[Reading]:
            for partition in list(partitions):
                try:
                    yield read(partition.state), {"partition": partition.number}
                except TidemarkError:
                    continue

        observe(kind, name, description, readings, unit=unit)

    observe(
        "gauge",
        "tidemark.storage.clock_offset",
        "How far the clock of this node is ahead of that of the servers of its engine",
        lambda: [(clock_offset_ms() / 1000, {})],
        unit="s",
    )
    of_partition(
        "tidemark.storage.partition_serving",
        "1 while the partition serves, 0 while it starts or is faulty",
        lambda partition: int(partition.health.state is HealthState.SERVING),
    )
    of_partition(
        "tidemark.storage.reservations",
        "Deadlines that are running, nack delays included",
        lambda partition: partition.reservations,
    )
    of_partition(
        "tidemark.storage.expiry_overdue",
        "How long the earliest deadline is past",
        lambda partition: partition.overdue_ms / 1000,
        unit="s",
    )
    of_partition(
        "tidemark.storage.disk_free",
        "Room on the disk of the partition",
        lambda partition: partition.disk.free_bytes,
        unit="By",
    )
    of_state(
        "gauge",
        "tidemark.storage.messages",
        "Messages that are stored, without scheduled ones",
        lambda state: state.counters.messages,
    )
    of_state(
        "gauge",
        "tidemark.storage.message_size",
        "Size of the stored messages",
        lambda state: state.counters.body_bytes,
        unit="By",
    )
    of_state("gauge", "tidemark.storage.queues", "Queues", lambda state: state.counters.queues)
    of_state(
        "gauge",
        "tidemark.storage.paused_queues",
        "Queues that are paused themselves",
        lambda state: state.counters.paused_queues,
    )
    of_state(
        "gauge",
        "tidemark.storage.paused_topics",
        "Paused topics, in the view of each partition",
        lambda state: state.topics.paused,
    )
    of_state(
        "gauge",
        "tidemark.storage.materialized_queues",
        "Queues that are loaded",
        lambda state: len(state.handles),
    )
    of_state(
        "gauge",
        "tidemark.storage.erasures",
        "Purges and removals of large queues whose rows are still being erased",
        lambda state: len(state.erasures),
    )
    of_state(
        "counter",
        "tidemark.storage.published_messages",
        "Messages that were appended to queues, in total",
        lambda state: state.counters.published,
    )
    of_state(
        "counter",
        "tidemark.storage.delivered_messages",
        "Messages that were handed out, in total",
        lambda state: state.counters.delivered,
    )
    of_state(
        "counter",
        "tidemark.storage.acked_messages",
        "Messages that were acknowledged, in total",
        lambda state: state.counters.acked,
    )
    of_partition(
        "tidemark.storage.commits",
        "Commits since the process started",
        lambda partition: partition.commits,
        kind="counter",
    )
