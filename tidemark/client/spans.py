"""Spans of the client, by OpenTelemetry's conventions for messaging.

A publish is a producer span whose context travels with the run; handling a delivery is a consumer
span that links to it. Where nobody traces, they cost next to nothing. No payload and no header goes
into any of them.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import Span, SpanKind

from tidemark.telemetry.traces import link_from_traceparent, span, tracer

if TYPE_CHECKING:
    from tidemark.client.delivery import DeliveryBatch

_SYSTEM: Final = "tidemark"
_tracer = tracer(__name__)


def publish_span(lmq_name: str, messages: int) -> AbstractContextManager[Span]:
    """Around a publish; only asked for while somebody traces."""
    return span(
        _tracer,
        f"send {_topic(lmq_name)}",
        kind=SpanKind.PRODUCER,
        attributes={
            "messaging.system": _SYSTEM,
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": lmq_name,
            "messaging.batch.message_count": messages,
        },
    )


def process_span(batch: "DeliveryBatch", messages: int) -> AbstractContextManager[Span]:
    """Around the handling of messages; links to the span that published them."""
    return span(
        _tracer,
        f"process {_topic(batch.lmq_name)}",
        kind=SpanKind.CONSUMER,
        links=[link_from_traceparent(batch.traceparent)],
        attributes={
            "messaging.system": _SYSTEM,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": batch.lmq_name,
            "messaging.consumer.group.name": batch.group,
            "messaging.batch.message_count": messages,
        },
    )


def _topic(lmq_name: str) -> str:
    """Span names have few values; there may be millions of lite queues."""
    return lmq_name.partition("/")[0]
