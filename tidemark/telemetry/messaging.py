"""Spans of the steps in the life of a message, by OpenTelemetry's conventions for messaging.

Client, broker and storage share these names, so that their spans form one trace. A span names the
topic of a queue, never the lite queue: there may be millions of those. Spans contain no payload and
no header.
"""

from typing import Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from tidemark.telemetry.traces import (
    context_from_traceparent,
    draw,
    is_sampled,
    link_from_traceparent,
    note_failure,
    tracing_enabled,
)

SYSTEM: Final = "tidemark"


class Step(NamedTuple):
    """One operation on messages: its name, and the convention's name for its type."""

    name: str
    type: str


PUBLISH: Final = Step("publish", "send")
DELIVER: Final = Step("deliver", "receive")
PROCESS: Final = Step("process", "process")
EXPIRE: Final = Step("expire", "settle")
DEAD_LETTER: Final = Step("dead_letter", "settle")


class Messages(NamedTuple):
    """Messages of one queue that one step handles together."""

    lmq_name: str
    total: int
    group: str = ""
    partition: int | None = None
    attempt: int | None = None
    """How often they failed before; None if they were not handed out."""


def topic_of(lmq_name: str) -> str:
    return lmq_name.partition("/")[0]


def span_name(step: Step, messages: Messages) -> str:
    return f"{step.name} {topic_of(messages.lmq_name)}"


def attributes_of(step: Step, messages: Messages) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": step.name,
        "messaging.operation.type": step.type,
        "messaging.destination.name": topic_of(messages.lmq_name),
        "messaging.batch.message_count": messages.total,
    }
    if messages.group:
        attributes["messaging.consumer.group.name"] = messages.group
    if messages.partition is not None:
        attributes["messaging.destination.partition.id"] = str(messages.partition)
    if messages.attempt is not None:
        attributes["tidemark.attempt_count"] = messages.attempt
    return attributes


def begin(
    tracer: Tracer,
    step: Step,
    messages: Messages,
    publisher: str,
    *,
    kind: SpanKind = SpanKind.SERVER,
) -> Span | None:
    """A span of a service for messages of one run; the caller ends it.

    Its parent is the current span, with a link to the publisher's; without a current span, its
    parent is the publisher's. None if the publisher is not traced, which is the usual case.
    """
    if not is_sampled(publisher) or not tracing_enabled():
        return None
    below: Context | None = context_from_traceparent(publisher)
    links: list[Link] = []
    if trace.get_current_span().get_span_context().trace_flags.sampled:
        below = None
        links += filter(None, [link_from_traceparent(publisher)])
    return tracer.start_span(
        span_name(step, messages),
        below,
        kind,
        attributes=attributes_of(step, messages),
        links=links,
    )


def begin_publish(tracer: Tracer, messages: Messages, publisher: str) -> Span | None:
    """The broker's span for a run; it starts a trace if the publisher does not trace.

    A publisher that traces has decided whether to sample, and so has a traced call. Otherwise the
    broker draws, and most runs get no span.
    """
    if publisher:
        return begin(tracer, PUBLISH, messages, publisher)
    call = trace.get_current_span().get_span_context()
    drawn = None if call.is_valid else draw()
    if drawn is None and not call.trace_flags.sampled:
        return None
    name, attributes = span_name(PUBLISH, messages), attributes_of(PUBLISH, messages)
    return tracer.start_span(name, drawn, SpanKind.SERVER, attributes)


def end(span: Span | None, error: str = "") -> None:
    """End a span of `begin`; `error` is the reason if the step failed."""
    if span is None:
        return
    if error:
        note_failure(span, error)
    span.end()


def moment(tracer: Tracer, step: Step, messages: Messages, publisher: str) -> None:
    """A span without duration, for a step of messages in the middle of other work."""
    end(begin(tracer, step, messages, publisher, kind=SpanKind.INTERNAL))
