"""The storage services as a reader calls them: blocking gRPC, one channel per use.

Calls are not repeated: Spark repeats a task that failed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import grpc

from pyspark_tidemark import messages

if TYPE_CHECKING:
    import pyarrow as pa

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # storage bounds the rows of a batch, not its bytes
    # Detects a peer that has vanished or hangs within 5 s: a scan has no deadline.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),
    # gRPC's own repeats have no limit: over a connection that has just ended, they would not end.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)
_CALL_TIMEOUT_S: Final = 60.0


class StorageError(RuntimeError):
    """A call to storage failed, or partitions are missing."""


class PartitionAddress(NamedTuple):
    """A partition and the address of the storage service that holds it."""

    partition: int
    address: str


class Described(NamedTuple):
    """A storage service: the number of partitions of its cluster, and those that it holds."""

    address: str
    partitions: int
    held: list[int]
    nodes: list[str] = []  # noqa: RUF012 - never changed
    """Addresses of all nodes of its cluster, where they share a store."""


class TableClient:
    """One storage service. Close it, or use it as a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def describe(self) -> Described:
        call: Any = self._channel.unary_unary(
            messages.DESCRIBE_STORAGE,
            request_serializer=messages.DescribeStorageRequest.SerializeToString,
            response_deserializer=messages.DescribeStorageResponse.FromString,
        )
        with self._explained():
            found = call(messages.DescribeStorageRequest(), timeout=_CALL_TIMEOUT_S)
        held = [each.partition for each in found.held]
        return Described(self._address, found.partitions, held, list(found.node_addresses))

    def scan(self, request: Any, timeout_s: float | None = None) -> "Iterator[pa.RecordBatch]":
        """The batches of one table of one partition, as they arrive; by default without limit."""
        call: Any = self._channel.unary_stream(
            messages.SCAN_TABLE,
            request_serializer=messages.ScanTableRequest.SerializeToString,
            response_deserializer=messages.ScanTableResponse.FromString,
        )
        import pyarrow as pa  # 40 MB, which a process that reads no table does not need

        with self._explained():
            for piece in call(request, timeout=timeout_s):
                with pa.ipc.open_stream(piece.arrow) as stream:
                    yield from stream

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, detail = error.code().name, error.details()
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                detail = f"{detail} Is this the address of a storage service, and of this version?"
            raise StorageError(f"storage at {self._address}: {code}: {detail}") from None


def addresses(option: str) -> list[str]:
    """The addresses of a comma-separated list."""
    found = [each.strip() for each in option.split(",") if each.strip()]
    if not found:
        raise ValueError("no storage address given")
    return found


def find_partitions(storage: str) -> list[PartitionAddress]:
    """The address of every partition of the cluster; raises StorageError if one is missing."""

    def describe(address: str) -> Described:
        with TableClient(address) as client:
            return client.describe()

    found, missing = locate(describe_all(addresses(storage), describe, StorageError))
    if missing or not found:
        raise StorageError(f"no storage service at {storage} holds partitions {missing}")
    return found


def describe_all(
    asked: Iterable[str], describe: Callable[[str], Described], fault: type[Exception]
) -> list[Described]:
    """The services at these addresses and those that they name.

    One that fails with a `fault` is left out if the others hold all partitions: on a store that
    nodes share, its partitions are elsewhere. Otherwise its fault is raised.
    """
    answers, faults = describe_answering(asked, describe, fault)
    if faults and (not answers or locate(answers)[1]):
        raise next(iter(faults.values()))
    return answers


def describe_answering(
    asked: Iterable[str], describe: Callable[[str], Described], fault: type[Exception]
) -> tuple[list[Described], dict[str, Exception]]:
    """The services at these addresses, and those that they name, which answer; the faults of the
    others, by address."""
    described: dict[str, Described] = {}
    faults: dict[str, Exception] = {}
    waiting = list(asked)
    while waiting:
        address = waiting.pop(0)
        if address in described or address in faults:
            continue
        try:
            found = described[address] = describe(address)
        except fault as error:
            faults[address] = error
            continue
        waiting += found.nodes
    # The answer through a load balancer is that of a node which has its own address.
    answers = [each for each in described.values() if not each.nodes or each.address in each.nodes]
    return answers, faults


def locate(described: Iterable[Described]) -> tuple[list[PartitionAddress], list[int]]:
    """The address of each partition that is held, in order, and the partitions that are not."""
    found: dict[int, PartitionAddress] = {}
    partitions = 0
    for service in described:
        partitions = max(partitions, service.partitions)
        for number in service.held:
            found.setdefault(number, PartitionAddress(number, service.address))
    missing = [number for number in range(partitions) if number not in found]
    return [found[number] for number in sorted(found)], missing
