"""Traces: spans, and the W3C trace context that carries them between processes.

Uses only OpenTelemetry's API, so that a program that embeds the client sees our spans in its own
traces. A run carries its context as a string, the `traceparent`; calls carry it as metadata. Text
from the wire that is not a valid context is ignored, never an error. `export` sets the sampling
ratio of traces that begin here; the draw happens here, so that an unsampled trace costs no span.
"""

import asyncio
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Self

from opentelemetry import trace
from opentelemetry.context import Context, attach, create_key
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
)
from opentelemetry.util.types import AttributeValue

from tidemark import __version__
from tidemark.errors import TidemarkError

Metadata = Sequence[tuple[str, str | bytes]]

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_TRACESTATE_CHARACTERS_MAX: Final = 512
_SAMPLED: Final = frozenset("13579bdf")
"""Last digits of a traceparent with the sampled flag set."""
_NO_SPAN: Final = nullcontext(INVALID_SPAN)
_NOT_KNOWN: Final = object()

NOT_SAMPLED: Final = f"00-{'f' * 32}-{'f' * 16}-00"
"""The traceparent of publishes in a trace that is not sampled. The same for all, so that such runs
can be batched together."""

_DRAWN: Final = create_key("tidemark-drawn")
_DRAWN_CONTEXT: Final = Context({_DRAWN: True})
_drawn_share = 0.0

_ROUTINE: Final = frozenset({"NOT_OWNER", "TOPIC_VERSION_MISMATCH", "CANCELLED"})
"""Reasons that are no failure: the caller is redirected, asks again, or has cancelled."""


def tracer(name: str) -> Tracer:
    """The tracer of a module, `tracer(__name__)`. May be created before telemetry is set up."""
    return trace.get_tracer(name, __version__)


def tracing_enabled() -> bool:
    """Whether spans are recorded at all: whether the process has a provider."""
    # As long as there is none, `get_tracer_provider` looks into the environment with each call,
    # which costs a publish that is alone some microseconds in client and broker.
    provider = getattr(trace, "_TRACER_PROVIDER", _NOT_KNOWN)
    if provider is _NOT_KNOWN:  # another version of OpenTelemetry
        provider = trace.get_tracer_provider()
    return provider is not None and not isinstance(provider, ProxyTracerProvider)


def span(
    tracer: Tracer,
    name: str,
    *,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Iterable[Link | None] = (),
    attributes: Mapping[str, AttributeValue] | None = None,
) -> AbstractContextManager[Span]:
    """A span that is current in the `with` block; it costs next to nothing without tracing.

    With a `context` the block passes it on even then, so that a service that does not trace does
    not break the traces of other services. An exception marks the span with its reason or type; its
    text, which may quote a payload or name a queue, is left out.
    """
    if context is None and not tracing_enabled():
        return _NO_SPAN
    return _started(tracer, name, context, kind, list(links), attributes)


@contextmanager
def _started(
    tracer: Tracer,
    name: str,
    context: Context | None,
    kind: SpanKind,
    links: list[Link | None],
    attributes: Mapping[str, AttributeValue] | None,
) -> Iterator[Span]:
    known = [link for link in links if link is not None]
    with current(tracer.start_span(name, context, kind, attributes, known), end=True) as started:
        yield started


@contextmanager
def current(started: Span, *, end: bool) -> Iterator[Span]:
    """Make a span current in the `with` block, and mark it if the block raises."""
    with trace.use_span(started, end, record_exception=False, set_status_on_exception=False):
        try:
            yield started
        except BaseException as error:
            note_failure(started, reason_of(error))
            raise


class LateSpan:
    """The span of work that may not exist: its trace starts with `begin`, or never.

    Looking for work is not traced; otherwise an idle cluster would trace itself (O3).
    """

    def __init__(
        self, tracer: Tracer, name: str, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._attributes = attributes
        self._begun = ExitStack()
        self._span: Span | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if exc_info[1] is not None:
            self.failed(exc_info[1])
        self._begun.close()

    def begin(self) -> None:
        """There is work to do: start the span. Further calls do nothing."""
        if self._span is None:
            begun = span(self._tracer, self._name, context=Context(), attributes=self._attributes)
            self._span = self._begun.enter_context(begun)

    def failed(self, error: BaseException) -> None:
        """Record a failure; begins a span if no work was found before it."""
        self.begin()
        assert self._span is not None
        note_failure(self._span, reason_of(error))

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self._span is not None:
            self._span.set_attribute(key, value)


def note_failure(span: Span, reason: str) -> None:
    """Mark a span as failed; a routine refusal is only an attribute."""
    if reason in _ROUTINE:
        span.set_attribute("tidemark.reason", reason)
        return
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR))


def reason_of(error: BaseException) -> str:
    """The reason under which a failure is counted and searched."""
    if isinstance(error, TidemarkError):
        return error.reason
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def current_traceparent() -> str:
    """The current trace context as a run carries it; empty unless the trace is recorded.

    So runs of unrecorded traces are equal, and can be batched together.
    """
    span = trace.get_current_span()
    return "" if span is trace.INVALID_SPAN else traceparent_of(span)


def traceparent_of(span: Span) -> str:
    """The context of a span, as `current_traceparent` gives it."""
    context = span.get_span_context()
    return _traceparent(context) if context.is_valid and context.trace_flags.sampled else ""


def published_traceparent() -> str:
    """The current trace context as a publisher sends it, including a decision not to sample.

    Empty if there is no trace: then the broker draws.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return _traceparent(context) if context.trace_flags.sampled else NOT_SAMPLED


def draw_share(share: float) -> None:
    """Set the share of traces beginning here that is sampled. Called by `export`."""
    global _drawn_share
    _drawn_share = share


def draw() -> Context | None:
    """The context in which to begin a sampled trace, or None to begin none.

    Costs a fraction of a microsecond; a span that is started and dropped costs twenty.
    """
    return _DRAWN_CONTEXT if random.random() < _drawn_share else None


def is_drawn(context: Context | None) -> bool:
    """Whether a context comes from `draw`: its trace is sampled without another draw."""
    return context is not None and _DRAWN in context


def is_sampled(traceparent: str) -> bool:
    """Whether the trace is recorded: otherwise a span is not worth its cost."""
    return traceparent[-1:] in _SAMPLED


def is_in_trace_of(traceparent: str) -> bool:
    """Whether the current span belongs to that trace and is recorded."""
    current = current_traceparent()
    return bool(current) and current[:35] == traceparent[:35]


def leave_trace() -> None:
    """Detach this task from its trace: its work belongs to many traces."""
    attach(Context())


def context_from_traceparent(traceparent: str) -> Context:
    """A context to start spans in; without a valid traceparent they start a new trace."""
    return _context(_span_context(traceparent, TraceState()))


def link_from_traceparent(traceparent: str) -> Link | None:
    """A link to the span that published a run, for work that handles many runs at once."""
    span_context = _span_context(traceparent, TraceState())
    return None if span_context is None else Link(span_context)


def inject(metadata: Metadata = ()) -> Metadata:
    """gRPC metadata with the current trace context added, if there is one."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return metadata
    others = [item for item in metadata if item[0] not in ("traceparent", "tracestate")]
    others.append(("traceparent", _traceparent(context)))
    if context.trace_state:
        others.append(("tracestate", context.trace_state.to_header()))
    return others


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The trace context of a call, from its gRPC metadata."""
    traceparent = tracestate = ""
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str):
            traceparent = value
        elif key == "tracestate" and isinstance(value, str):
            tracestate = value
    if not traceparent:
        return Context()
    if tracestate and len(tracestate) <= _TRACESTATE_CHARACTERS_MAX:
        state = TraceState.from_header([tracestate])
    else:
        state = TraceState()
    return _context(_span_context(traceparent, state))


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _span_context(traceparent: str, state: TraceState) -> SpanContext | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    context = SpanContext(
        trace_id=int(match[1], 16),
        span_id=int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
        trace_state=state,
    )
    return context if context.is_valid else None


def _context(span_context: SpanContext | None) -> Context:
    if span_context is None:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(span_context), Context())
