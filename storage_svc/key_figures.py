"""The key figures of a storage process: counts over its partitions (R12)."""

from collections.abc import Collection, Sequence

from storage_svc.operations.system_metrics import Measurement, RecordMetrics
from storage_svc.partition.partition import Partition
from tidemark.errors import Unavailable
from tidemark.system_metrics.aggregates import Aggregate
from tidemark.system_metrics.sampler import Sampler


def sampler(partitions: Collection[Partition]) -> Sampler:
    """Samples these partitions and stores into the first of them."""

    async def store(aggregates: Sequence[Aggregate]) -> None:
        if not partitions:
            raise Unavailable("this node holds no partition yet")
        home = min(partitions, key=lambda partition: partition.number)
        instance = f"storage-{home.number}"
        rows = (
            Measurement(
                instance, each.name, each.samples, each.least, each.most, each.mean, each.last
            )
            for each in aggregates
        )
        await home.call(RecordMetrics(tuple(rows)))

    return Sampler(lambda: figures(partitions), store)


def figures(partitions: Collection[Partition]) -> dict[str, float]:
    """As they are now, over all partitions; one that is not open holds nothing."""
    opened = [partition for partition in partitions if partition.is_open]
    return {
        "partitions.open": len(opened),
        "commits": sum(partition.commits for partition in partitions),
        "reservations": sum(partition.reservations for partition in opened),
        "queues": sum(partition.state.counters.queues for partition in opened),
        "queues.materialized": sum(len(partition.state.handles) for partition in opened),
    }
