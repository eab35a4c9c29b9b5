"""The storage client of the driver and the executors: blocking gRPC, one channel per use.

It has the calls that only the jobs make; tables are read by `pyspark_tidemark`.
Spark runs Python in its own threads, so there is no event loop to share. Every failure is a
`TidemarkError`; calls are not repeated, because a failed pass is run again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import grpc

from pyspark_tidemark.storage import (
    Described,
    PartitionAddress,
    addresses,
    describe_all,
    describe_answering,
    locate,
)
from tidemark.api.storage.v1 import retention_pb2, storage_pb2
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.errors import FormatNotSupported, PartitionNotFound, Unavailable
from tidemark.limits import PAGE_SIZE_MAX
from tidemark.rpc import from_rpc_error
from tidemark.rpc.channel import OPTIONS
from tidemark.rpc.topic_codec import topic_from_proto
from tidemark.telemetry.traces import Metadata, inject
from tidemark.topics import Topic

FORMAT_VERSION: Final = 9
"""The format of stored data that rules and plans are written for."""

PendingApply = Callable[[], retention_pb2.ApplyRetentionResponse]
"""A call in progress; calling it waits for the response."""

_CALL_TIMEOUT_S: Final = 60.0
_HOME: Final = 0
"""The home partition of topics."""


class StorageClient:
    """One storage service. Close it, or use it as a context manager."""

    def __init__(self, address: str, traceparent: str = "") -> None:
        """Calls belong to the trace of `traceparent`, or else to the current one."""
        self._traceparent = traceparent
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        # The generated types only allow asynchronous channels.
        self._storage: Any = StorageServiceStub(self._channel)  # type: ignore[arg-type]
        self._retention: Any = RetentionServiceStub(self._channel)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def describe(self) -> storage_pb2.DescribeStorageResponse:
        request = storage_pb2.DescribeStorageRequest()
        described: storage_pb2.DescribeStorageResponse = self._call(
            self._storage.DescribeStorage, request
        )
        return described

    def topics(self) -> Iterator[Topic]:
        """All topics, from their home partition."""
        request = storage_pb2.ListTopicsRequest(partition=_HOME, page_size=PAGE_SIZE_MAX)
        while True:
            page = self._call(self._storage.ListTopics, request)
            yield from map(topic_from_proto, page.topics)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def apply(self, request: retention_pb2.ApplyRetentionRequest) -> PendingApply:
        """Start a call; the result waits for its response."""
        begun = self._retention.ApplyRetention.future(
            request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata()
        )

        def wait() -> retention_pb2.ApplyRetentionResponse:
            with _revived():
                applied: retention_pb2.ApplyRetentionResponse = begun.result()
                return applied

        return wait

    def pass_rows(self, pass_id: str) -> tuple[int, int]:
        """Planned rows of a pass as reported to this service, and those that it has applied."""
        request = retention_pb2.GetPassProgressRequest(pass_id=pass_id)
        found = self._call(self._retention.GetPassProgress, request)
        return found.planned_rows, found.rows

    def next_due(self, request: retention_pb2.NextDueRequest) -> retention_pb2.NextDueResponse:
        """When rules can next apply in the partitions of this service."""
        answer: retention_pb2.NextDueResponse = self._call(self._retention.NextDue, request)
        return answer

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        with _revived():
            return method(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata())

    def _metadata(self) -> Metadata:
        if self._traceparent:
            return [("traceparent", self._traceparent)]
        return inject()


def find_partitions(storage: str) -> list[PartitionAddress]:
    """The address of every partition of the cluster; raises if one is missing."""
    return located(storage, describe_all(addresses(storage), _describe, Unavailable))


def find_nodes(storage: Iterable[str]) -> list[str]:
    """The addresses of the storage nodes that answer, the holder of the lowest partition first.

    Raises if none answers, or the jobs do not support the format of one.
    """
    described, faults = describe_answering(storage, _describe, Unavailable)
    if not described:
        raise next(iter(faults.values()))
    # Those without partitions come last.
    described.sort(key=lambda each: (not each.held, min(each.held, default=0), each.address))
    return [each.address for each in described]


def _describe(address: str) -> Described:
    with StorageClient(address) as client:
        return describe_service(client, address)


def describe_service(client: StorageClient, address: str) -> Described:
    """The partitions that a storage service holds; raises if the jobs do not support its format."""
    described = client.describe()
    if described.format_version != FORMAT_VERSION:
        raise FormatNotSupported(
            f"storage at {address} has format {described.format_version}, "
            f"these jobs support {FORMAT_VERSION}"
        )
    held = [each.partition for each in described.held]
    return Described(address, described.partitions, held, list(described.node_addresses))


def located(storage: str, services: Iterable[Described]) -> list[PartitionAddress]:
    """The address of every partition of the services; raises if a partition is missing."""
    found, missing = locate(services)
    if missing or not found:
        raise PartitionNotFound(f"no storage service at {storage} holds partitions {missing}")
    return found


def find_topics(cluster: Iterable[PartitionAddress]) -> list[Topic]:
    """All topics of the cluster; raises if their home partition is away."""
    home = next((each for each in cluster if each.partition == _HOME), None)
    if home is None:
        raise PartitionNotFound(f"no storage service holds partition {_HOME}, which has the topics")
    with StorageClient(home.address) as client:
        return list(client.topics())


@contextmanager
def _revived() -> Iterator[None]:
    """Raise TidemarkErrors for blocking calls; their errors have the same parts as asyncio's."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None  # type: ignore[arg-type]
