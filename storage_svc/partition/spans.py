"""Spans of the writer: one for each operation that somebody traces, one for the commit they share.

A commit belongs to many traces at once, so it has one of its own that links to every operation in
it. Operations that nobody traces cost a look at their caller, and no span.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from storage_svc.operations.operation import Operation
from tidemark.telemetry import (
    context_from_traceparent,
    is_sampled,
    link_from_traceparent,
    messaging,
    span,
    tracer,
    tracing_enabled,
)

_tracer = tracer(__name__)


def commit(partition: int, callers: Sequence[str]) -> AbstractContextManager[Span | None]:
    """Around a commit; `callers` are the trace contexts of its operations, empty for most."""
    traced = list(filter(is_sampled, callers))
    # One that carries nothing but the work of clients who do not trace is nobody's to look at.
    if not tracing_enabled() or not traced:
        return nullcontext()
    return span(
        _tracer,
        "storage commit",
        context=Context(),
        links=map(link_from_traceparent, traced),
        attributes={
            "messaging.system": messaging.SYSTEM,
            "messaging.destination.partition.id": str(partition),
            "tidemark.commit.operations": len(callers),
        },
    )


def operation(
    partition: int, operation: Operation[Any], caller: str
) -> AbstractContextManager[Span | None]:
    """Around one operation, below the span of whoever asked for it."""
    if not is_sampled(caller):
        return nullcontext()
    attributes = {
        "messaging.system": messaging.SYSTEM,
        "messaging.destination.partition.id": str(partition),
    }
    lmq_name = getattr(operation, "lmq_name", "")
    if lmq_name:
        attributes["messaging.destination.name"] = messaging.topic_of(lmq_name)
    return span(
        _tracer,
        f"storage {type(operation).__name__.lower()}",
        context=context_from_traceparent(caller),
        attributes=attributes,
    )
