"""Spans of the writer: one for each operation that is traced, one for the commit they share.

The span of an operation lasts until the operation is durable, and links to the commit that made it
so. A commit belongs to many traces at once, so it has its own trace, which links to every caller; a
commit that writes nothing has no span. An operation that is not traced costs one check of its
caller.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from storage_svc.operations.operation import Operation
from tidemark.errors import TidemarkError
from tidemark.telemetry import (
    context_from_traceparent,
    is_sampled,
    link_from_traceparent,
    messaging,
    span,
    tracer,
    tracing_enabled,
)
from tidemark.telemetry.traces import current, note_failure, reason_of

_tracer = tracer(__name__)


class CommitSpans:
    """The spans of one commit; around everything from the first operation to the answers."""

    __slots__ = ("_callers", "_open", "_operations", "_partition")

    def __init__(self, partition: int, operations: int, callers: Sequence[str]) -> None:
        """`callers` are the trace contexts of those operations that are traced."""
        self._partition = partition
        self._operations = operations
        self._callers = callers
        self._open: list[Span] = []

    def __enter__(self) -> "CommitSpans":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._open:
            if error is not None:
                note_failure(each, reason_of(error))
            each.end()

    @contextmanager
    def operation(self, operation: Operation[Any], caller: str) -> Iterator[Span | None]:
        """Around one operation, below the span of its caller; the span lasts until the end."""
        if not is_sampled(caller):
            yield None
            return
        attributes = self._attributes()
        lmq_name = getattr(operation, "lmq_name", "")
        if lmq_name:
            attributes["messaging.destination.name"] = messaging.topic_of(lmq_name)
        started = _tracer.start_span(
            f"storage {type(operation).__name__.lower()}",
            context_from_traceparent(caller),
            attributes=attributes,
        )
        self._open.append(started)
        with current(started, end=False):
            yield started

    def commit(self) -> AbstractContextManager[object]:
        """Around the write that makes the operations durable."""
        # A commit without any traced operation would be a trace that nothing refers to.
        if not self._callers or not tracing_enabled():
            return nullcontext()
        return self._commit()

    @contextmanager
    def _commit(self) -> Iterator[None]:
        with span(
            _tracer,
            "storage commit",
            context=Context(),
            links=map(link_from_traceparent, self._callers),
            attributes={**self._attributes(), "tidemark.commit.operations": self._operations},
        ) as committing:
            for each in self._open:
                each.add_link(committing.get_span_context())
            yield

    def _attributes(self) -> dict[str, str]:
        return {
            "messaging.system": messaging.SYSTEM,
            "messaging.destination.partition.id": str(self._partition),
        }


def refused(traced: Span | None, result: object) -> None:
    """Note on the span of an operation that it was refused, if it was."""
    if traced is not None and isinstance(result, TidemarkError):
        note_failure(traced, result.reason)
