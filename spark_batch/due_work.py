"""Due work: the partitions in which a pass has something to do, as storage answers it (P3).

Needs no Spark. Calls the storage services at the same time, over one channel each.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from pyspark_tidemark.storage import Described, PartitionAddress, describe_answering, locate
from spark_batch.storage_client import StorageClient, describe_service
from tidemark.api.storage.v1.retention_pb2 import (
    NextDueRequest,
    PartitionDue,
    RetentionType,
    ScanTableName,
)
from tidemark.errors import Unavailable
from tidemark.settings import RetentionSettings

DAY_MS: Final = 86_400_000
_CHANNELS_MAX: Final = 16
_TYPE_PREFIX: Final = "RETENTION_TYPE_"
_TABLE_PREFIX: Final = "SCAN_TABLE_NAME_"

_Answer = tuple[Described, list[PartitionDue]]


@dataclass(frozen=True, slots=True)
class DueWork:
    """The due work that storage found for the rules of a pass."""

    cluster: tuple[PartitionAddress, ...]
    """All partitions, without those of nodes that are away."""
    by_type: Mapping[str, tuple[PartitionAddress, ...]]
    """The partitions in which each retention type is due, without types that are due in none."""
    by_table: Mapping[str, tuple[PartitionAddress, ...]]
    """The same for old records, by their table."""
    due_in_ms: int | None
    """Time until something is due: 0 if it is; None if nothing that is stored will be."""
    failed: Mapping[int, str]
    """Partitions that could not answer, each with its error."""

    def of(self, *types: str) -> list[PartitionAddress]:
        """The partitions in which any of the types is due, in order."""
        return sorted({each for kind in types for each in self.by_type.get(kind, ())})


def find_due_work(settings: RetentionSettings, types: Iterable[str]) -> DueWork:
    """Ask storage for due work of retention types; raises if no storage service answers."""
    request = NextDueRequest(
        types=[RetentionType.Value(_TYPE_PREFIX + each.upper()) for each in types],
        inactive_queue_age_ms=DAY_MS * settings.partition_cleanup_days,
        old_records_age_ms=DAY_MS * settings.metrics_retention_days,
    )
    answers, away = _ask_all(settings.storage_addresses, request)
    cluster, missing = locate(described for described, _ in answers)
    held_by = {each.partition: each for each in cluster}
    by_type: dict[str, list[PartitionAddress]] = {}
    by_table: dict[str, list[PartitionAddress]] = {}
    due_in_ms: int | None = None
    failed = dict.fromkeys(missing, f"no storage service holds it {away}".rstrip())
    for described, found in answers:
        for each in found:
            target = held_by[each.partition]
            if target.address != described.address:
                continue  # it moved between two answers, and the other service answers for it
            if each.error:
                failed[each.partition] = each.error
                continue
            for kind in each.due_types:
                name = RetentionType.Name(kind).removeprefix(_TYPE_PREFIX).lower()
                by_type.setdefault(name, []).append(target)
            for table in each.due_tables:
                name = ScanTableName.Name(table).removeprefix(_TABLE_PREFIX).lower()
                by_table.setdefault(name, []).append(target)
            if each.HasField("due_in_ms") and (due_in_ms is None or each.due_in_ms < due_in_ms):
                due_in_ms = each.due_in_ms
    return DueWork(
        tuple(cluster),
        {kind: tuple(targets) for kind, targets in by_type.items()},
        {table: tuple(targets) for table, targets in by_table.items()},
        due_in_ms,
        failed,
    )


def _ask_all(services: Sequence[str], request: NextDueRequest) -> tuple[list[_Answer], str]:
    """The services at these addresses, all at once, and then those that they name; and which of
    them are away, with the reason."""
    with ThreadPoolExecutor(min(len(services), _CHANNELS_MAX)) as threads:
        asked = zip(services, threads.map(partial(_ask, request=request), services), strict=True)
        outcomes = dict(asked)

    def describe(address: str) -> Described:
        if address not in outcomes:
            outcomes[address] = _ask(address, request)
        outcome = outcomes[address]
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome[0]

    described, faults = describe_answering(services, describe, Unavailable)
    if not described:
        raise next(iter(faults.values()))
    answers = [outcomes[each.address] for each in described]
    away = "; ".join(f"({address}: {fault})" for address, fault in faults.items())
    return [each for each in answers if isinstance(each, tuple)], away


def _ask(address: str, request: NextDueRequest) -> _Answer | Unavailable:
    try:
        with StorageClient(address) as client:
            return describe_service(client, address), list(client.next_due(request).partitions)
    except Unavailable as error:
        return error
