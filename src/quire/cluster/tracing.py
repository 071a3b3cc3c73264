"""The trace of a request: its id in logs of all instances, and its stages as spans of OpenTelemetry.

The id is that of the client's `traceparent` header (W3C Trace Context), or the server's own request id. Spans are
exported if OTEL_EXPORTER_OTLP_ENDPOINT is set and the extra `trace` is installed.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from quire.extras import install_command

log = logging.getLogger("quire")

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


class TraceContext(NamedTuple):
    """A request's trace.

    trace_id    32 hexadecimal digits
    parent      the client's span, 16 hexadecimal digits; empty without one
    is_sampled  whether the client wants spans to be exported
    """

    trace_id: str
    parent: str = ""
    is_sampled: bool = True


CURRENT: ContextVar[TraceContext | None] = ContextVar("quire_trace", default=None)
"""The client's trace while one of its requests is answered."""


def read_traceparent(header: str | None) -> TraceContext | None:
    """Parses a `traceparent` header. None without one, or if it is malformed, as the standard demands."""
    found = None if header is None else _TRACEPARENT.fullmatch(header.strip())
    if found is None or (found[1] == "00" and found[5]):
        return None  # version 00 has four fields
    trace_id, parent, flags = found[2], found[3], int(found[4], 16)
    if not int(trace_id, 16) or not int(parent, 16):
        return None
    return TraceContext(trace_id, parent, bool(flags & 1))


def trace_of(request_id: str) -> TraceContext:
    """The client's trace, or one whose id is derived from the request's id."""
    current = CURRENT.get()
    if current is not None:
        return current
    found = _HEX.search(request_id)
    return TraceContext(uuid.uuid4().hex if found is None else found[0])


class TraceSpan(NamedTuple):
    """A stage of a request on an instance. Times are on the router's clock."""

    name: str
    begun: float
    ended: float
    instance: str


class Tracer:
    """Exports the spans of requests.

    processor  span processor of OpenTelemetry's SDK
    """

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Uses the ids of requests for traces of our own."""

            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id or int(super().generate_trace_id())

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "quire"}
        self._ids = Ids()
        self._provider = TracerProvider(id_generator=self._ids, resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire")

    def record(
        self,
        trace: TraceContext,
        whole: TraceSpan,
        stages: Sequence[TraceSpan],
        facts: Mapping[str, str | int],
        error: str = "",
    ) -> None:
        """Exports an ended request. whole: the request itself. facts: attributes. error: why it failed."""
        from opentelemetry import trace as api

        context = None
        if trace.parent:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if trace.is_sampled else api.TraceFlags.DEFAULT)
            parent = api.SpanContext(int(trace.trace_id, 16), int(trace.parent, 16), is_remote=True, trace_flags=flags)
            context = api.set_span_in_context(api.NonRecordingSpan(parent))
        offset = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        self._ids.trace_id = int(trace.trace_id, 16)
        root = self._tracer.start_span(
            whole.name, context, api.SpanKind.SERVER, dict(facts), start_time=nanoseconds(whole.begun)
        )
        if error:
            root.set_status(api.Status(api.StatusCode.ERROR, error))
        within = api.set_span_in_context(root)
        for each in stages:
            attributes = {"quire.instance": each.instance}
            span = self._tracer.start_span(each.name, within, attributes=attributes, start_time=nanoseconds(each.begun))
            span.end(nanoseconds(each.ended))
        root.end(nanoseconds(whole.ended))

    def close(self) -> None:
        """Exports the remaining spans. May take seconds if the collector does not answer."""
        self._provider.shutdown()


def tracer() -> Tracer | None:
    """The tracer that the environment asks for; None without one, or if the packages are missing."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("%s is set, and %s is not installed; %s", ENDPOINT, error.name, install_command("trace"))
        return None
    return Tracer(BatchSpanProcessor(OTLPSpanExporter()))
