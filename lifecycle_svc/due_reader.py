"""Phase one of a sweep: reads due work from a partition, beside its writer (L2).

The only module that scans storage for due work. Each read returns at most one page per kind and
changes nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lifecycle_svc.planner import URGENT, Fact, FactKind
from tidemark.api.storage.v1.action_pb2 import Action
from tidemark.api.storage.v1.storage_pb2 import (
    ScanKind,
    ScanPartitionRequest,
    ScanPartitionResponse,
)
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub

PageTokens = Mapping[FactKind, bytes]
"""Where to resume each kind. A kind that is absent has been read to its end."""

FROM_THE_START: PageTokens = dict.fromkeys(FactKind, b"")

HOUSEKEEPING_PAGE_MAX = 200
"""Page size of non-urgent kinds. Urgent work is read again after each of these pages."""


@dataclass(slots=True)
class DuePage:
    """One page of each kind that was requested."""

    now_ms: int = 0
    broker_address: str = ""
    """The broker that holds the partition; empty if none does."""
    facts: list[Fact[Action]] = field(default_factory=list)
    next_tokens: dict[FactKind, bytes] = field(default_factory=dict)
    next_due_in_ms: dict[FactKind, int] = field(default_factory=dict)
    outbox_partitions: list[int] = field(default_factory=list)
    """Partitions that outbox entries wait for."""


def tokens_after(page: DuePage) -> PageTokens:
    """Where to resume after a page; empty once all housekeeping work has been read.

    Urgent kinds always restart: everything found of them so far has been acted on.
    """
    left = {kind: token for kind, token in page.next_tokens.items() if kind not in URGENT}
    return {**dict.fromkeys(URGENT, b""), **left} if left else {}


async def read_due(storage: StorageServiceStub, partition: int, tokens: PageTokens) -> DuePage:
    """Read the next page of each kind. Raises the error of any of the scans."""
    requests = [
        ScanPartitionRequest(
            partition=partition,
            kind=ScanKind.Value(f"SCAN_KIND_{kind.value}"),
            page_size=0 if kind in URGENT else HOUSEKEEPING_PAGE_MAX,
            page_token=token,
        )
        for kind, token in tokens.items()
    ]
    responses = await asyncio.gather(*(storage.ScanPartition(each) for each in requests))
    return _merge(list(tokens), responses)


def _merge(kinds: Sequence[FactKind], responses: Sequence[ScanPartitionResponse]) -> DuePage:
    page = DuePage()
    for kind, response in zip(kinds, responses, strict=True):
        page.now_ms = max(page.now_ms, response.partition_time_ms)
        page.broker_address = response.broker_address
        page.outbox_partitions += response.outbox_partitions
        page.facts += [Fact(kind, fact.due_ms, fact.action) for fact in response.facts]
        if response.next_page_token:
            page.next_tokens[kind] = response.next_page_token
        if response.HasField("next_due_in_ms"):
            page.next_due_in_ms[kind] = response.next_due_in_ms
    return page
