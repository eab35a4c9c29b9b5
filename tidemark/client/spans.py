"""Spans of the client, by OpenTelemetry's conventions for messaging.

A publish is a producer span whose context travels with the run; handling a delivery is a consumer
span that links to it. A settlement is a span of the trace that handled its messages, and links to
the publisher's. Without tracing they cost next to nothing. They contain no payload and no
header.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    set_span_in_context,
)

from tidemark.telemetry import messaging
from tidemark.telemetry.messaging import Messages, Step
from tidemark.telemetry.traces import (
    is_sampled,
    link_from_traceparent,
    span,
    tracer,
    tracing_enabled,
)

if TYPE_CHECKING:
    from tidemark.client.consume.delivery import DeliveryBatch
    from tidemark.client.transport.codec import Range

WHOLE_BATCH: Final = -1
"""Stands for all messages of a batch where one of them has an index."""

_LINKED_MAX: Final = 128
"""Handlers that a settlement links to: OpenTelemetry's default limit of links per span."""

_tracer = tracer(__name__)


def publish_span(lmq_name: str, messages: int) -> AbstractContextManager[Span]:
    """Around a publish; called only while tracing is on."""
    sent = Messages(lmq_name, messages)
    return span(
        _tracer,
        messaging.span_name(messaging.PUBLISH, sent),
        kind=SpanKind.PRODUCER,
        attributes=messaging.attributes_of(messaging.PUBLISH, sent),
    )


def process_span(
    batch: "DeliveryBatch", messages: int, index: int = WHOLE_BATCH
) -> AbstractContextManager[Span]:
    """Around the handling of messages; links to the span that published them."""
    handled = _messages(batch, messages)
    around = span(
        _tracer,
        messaging.span_name(messaging.PROCESS, handled),
        kind=SpanKind.CONSUMER,
        links=[link_from_traceparent(batch.traceparent)],
        attributes=messaging.attributes_of(messaging.PROCESS, handled),
    )
    return _remembered(around, batch, index) if tracing_enabled() else around


@contextmanager
def _remembered(
    around: AbstractContextManager[Span], batch: "DeliveryBatch", index: int
) -> Iterator[Span]:
    """Record the handling span in the batch, so that a later settlement can link to it."""
    with around as handling:
        context = handling.get_span_context()
        if context.is_valid and context.trace_flags.sampled:
            batch.handlers = batch.handlers or {}
            batch.handlers[index] = context
        yield handling


def begin_settle(
    batch: "DeliveryBatch", action: str, messages: int, ranges: "Sequence[Range]"
) -> Span | None:
    """A span from a settlement to its result. None if neither publisher nor handler is traced.

    It belongs to the handler's trace; where acks of several handlers are sent together, to that of
    the first, with links to the others and to the publisher.
    """
    handlers = _handlers(batch, ranges)
    if not (handlers or is_sampled(batch.traceparent)) or not tracing_enabled():
        return None
    settled, step = _messages(batch, messages), Step(action, "settle")
    publisher = link_from_traceparent(batch.traceparent)
    below = Context()
    if handlers:
        below = set_span_in_context(NonRecordingSpan(handlers[0]), below)
    return _tracer.start_span(
        messaging.span_name(step, settled),
        below,
        kind=SpanKind.CLIENT,
        links=[*([] if publisher is None else [publisher]), *map(Link, handlers[1:])],
        attributes=messaging.attributes_of(step, settled),
    )


def _handlers(batch: "DeliveryBatch", ranges: "Sequence[Range]") -> list[SpanContext]:
    """The spans that handled the messages of a settlement; no ranges mean the whole batch."""
    known = list((batch.handlers or {}).items())  # a copy: handlers may run in other threads
    concerned = (
        context
        for index, context in known
        if index == WHOLE_BATCH or not ranges or any(a <= index < b for a, b in ranges)
    )
    return list(islice(concerned, _LINKED_MAX))


def _messages(batch: "DeliveryBatch", count: int) -> Messages:
    return Messages(batch.lmq_name, count, batch.group, batch.partition, batch.attempt)
