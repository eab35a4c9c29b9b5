"""Phase one: reads what is due in a partition, beside its writer (L2).

The only module that asks storage about due work. It reads a bounded page of every kind at a time
and never changes anything.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lifecycle_svc.planner import URGENT, Fact, FactKind
from tidemark.api.storage.v1.action_pb2 import Action
from tidemark.api.storage.v1.storage_pb2 import (
    ScanKind,
    ScanPartitionRequest,
    ScanPartitionResponse,
)
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub

Tokens = Mapping[FactKind, bytes]
"""Where to go on reading each kind; a kind that is missing has been read to its end."""

FROM_THE_START: Tokens = dict.fromkeys(FactKind, b"")

CLEARING_PAGE_MAX = 200
"""Facts of a page that nobody waits for: what is urgent is looked at again after each of them."""


@dataclass(slots=True)
class Reading:
    """One page of every kind that was asked for."""

    now_ms: int = 0
    owner_address: str = ""
    """The broker that drives the partition; "": none."""
    facts: list[Fact[Action]] = field(default_factory=list)
    next_tokens: dict[FactKind, bytes] = field(default_factory=dict)
    next_due_in_ms: dict[FactKind, int] = field(default_factory=dict)


def after(reading: Reading) -> Tokens:
    """Where to go on after a page: empty once all there was to clear up has been seen.

    What is urgent is read from the start every time, since all that was found of it is done.
    """
    left = {kind: token for kind, token in reading.next_tokens.items() if kind not in URGENT}
    return {**dict.fromkeys(URGENT, b""), **left} if left else {}


async def read(
    storage: StorageServiceStub, partition: int, tokens: Tokens, blocked: Iterable[str]
) -> Reading:
    """The next pages. Raises what storage answered to any of them."""
    requests = [
        ScanPartitionRequest(
            partition=partition,
            kind=ScanKind.Value(f"SCAN_KIND_{kind.value}"),
            page_size=0 if kind in URGENT else CLEARING_PAGE_MAX,
            page_token=token,
            except_destinations=blocked if kind is FactKind.OUTBOX else (),
        )
        for kind, token in tokens.items()
    ]
    pages = await asyncio.gather(*(storage.ScanPartition(each) for each in requests))
    return _joined(list(tokens), pages)


def _joined(kinds: Sequence[FactKind], pages: Sequence[ScanPartitionResponse]) -> Reading:
    reading = Reading()
    for kind, page in zip(kinds, pages, strict=True):
        reading.now_ms = max(reading.now_ms, page.partition_time_ms)
        reading.owner_address = page.owner_address
        reading.facts += [Fact(kind, fact.due_ms, fact.action) for fact in page.facts]
        if page.next_page_token:
            reading.next_tokens[kind] = page.next_page_token
        if page.HasField("next_due_in_ms"):
            reading.next_due_in_ms[kind] = page.next_due_in_ms
    return reading
