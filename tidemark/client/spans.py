"""Spans of the client, by OpenTelemetry's conventions for messaging.

A publish is a producer span whose context travels with the run; handling a delivery is a consumer
span that links to it, and so is settling it. Where nobody traces, they cost next to nothing. No
payload and no header goes into any of them.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

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

_tracer = tracer(__name__)


def publish_span(lmq_name: str, messages: int) -> AbstractContextManager[Span]:
    """Around a publish; only asked for while somebody traces."""
    sent = Messages(lmq_name, messages)
    return span(
        _tracer,
        messaging.span_name(messaging.PUBLISH, sent),
        kind=SpanKind.PRODUCER,
        attributes=messaging.attributes_of(messaging.PUBLISH, sent),
    )


def process_span(batch: "DeliveryBatch", messages: int) -> AbstractContextManager[Span]:
    """Around the handling of messages; links to the span that published them."""
    handled = _messages(batch, messages)
    return span(
        _tracer,
        messaging.span_name(messaging.PROCESS, handled),
        kind=SpanKind.CONSUMER,
        links=[link_from_traceparent(batch.traceparent)],
        attributes=messaging.attributes_of(messaging.PROCESS, handled),
    )


def begin_settle(batch: "DeliveryBatch", action: str, messages: int) -> Span | None:
    """From a settlement to its answer; links to the publisher. None if that is not traced.

    In a trace of its own: acks of several handlers may travel together.
    """
    if not is_sampled(batch.traceparent) or not tracing_enabled():
        return None
    settled, step = _messages(batch, messages), Step(action, "settle")
    link = link_from_traceparent(batch.traceparent)
    return _tracer.start_span(
        messaging.span_name(step, settled),
        Context(),
        kind=SpanKind.CLIENT,
        links=[] if link is None else [link],
        attributes=messaging.attributes_of(step, settled),
    )


def _messages(batch: "DeliveryBatch", count: int) -> Messages:
    return Messages(batch.lmq_name, count, batch.group, batch.partition, batch.attempt)
