"""Traces for OpenTelemetry: a span for each call, and in it those of each text's queue, prefill and
decode.

The libraries are an extra, so they are imported when tracing is asked for. The spans of texts are
made by a thread of their own: it costs the engine one put into a queue.

Source: W3C Trace Context (`traceparent`); the semantic conventions of OpenTelemetry for RPC and for
generative AI.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpt.errors import ServerError
from serve.observing import FAILED, LEFT, Call, Observer, TextEnd

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = (
    "--otlp-traces-endpoint needs what is not installed; pip install 'antiphon[tracing]', or leave "
    "it out"
)
MAX_QUEUED = 10_000
LAST_SECONDS = 5.0
"""What spans get that are not yet sent when the server ends."""

SERVICE = "serve.v1.GenerationService"


def tracing_of(endpoint: str | None) -> Tracing | None:
    """Tracing to a collector, or None if nobody asked for it.

    Args:
        endpoint: URL of a collector that takes OTLP over HTTP, `http://HOST:4318/v1/traces`; None:
            what OpenTelemetry's own environment variables say, if the extra is installed.

    Raises:
        ServerError: a collector is given, but the extra is not installed; or it is no URL.
    """
    if endpoint is None and not any(map(os.environ.get, ENDPOINT_VARIABLES)):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ServerError(
            f"--otlp-traces-endpoint is {endpoint!r}, but must be a URL, as "
            "http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if endpoint is None:  # the variables may be meant for others
            log.debug("no traces: antiphon[tracing] is not installed")
            return None
        raise ServerError(MISSING) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "antiphon")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


class Tracing(Observer):
    """Makes spans of what it is told.

    Args:
        provider: where they go; the sampler is its own (`OTEL_TRACES_SAMPLER`).
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("antiphon")
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._waiting: queue.Queue[TextEnd | None] = queue.Queue(MAX_QUEUED)
        # `time.monotonic` is what the engine goes by; spans want the clock on the wall.
        self._zero_ns = time.time_ns() - time.monotonic_ns()
        self._thread = threading.Thread(target=self._make, name="antiphon-traces", daemon=True)
        self._thread.start()

    def begin(self, call: Call, metadata: Mapping[str, str]) -> None:
        """Open the span of a call, under that of its caller if it has told one."""
        span = self._tracer.start_span(
            f"{SERVICE}/{call.method}",
            context=self._propagator.extract(metadata),
            kind=self._trace.SpanKind.SERVER,
            start_time=self._ns(call.started),
            attributes={
                "rpc.system": "grpc",
                "rpc.service": SERVICE,
                "rpc.method": call.method,
                "antiphon.request_id": call.request_id,
            },
        )
        call.parent = span

    def end(self, call: Call, code: int, name: str) -> None:
        """Close it.

        Args:
            code, name: the call's gRPC status.
        """
        span = call.parent
        span.set_attribute("rpc.grpc.status_code", code)
        # As the conventions have it for servers: what the caller did wrong is no error here.
        if name in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"):
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, name))
        span.end()

    def ended(self, end: TextEnd) -> None:
        if end.call is not None and end.call.parent is not None:
            try:
                self._waiting.put_nowait(end)
            except queue.Full:
                log.debug("no room for the spans of a text")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Send what there is, for that long at most."""

        def finish() -> None:
            self._waiting.put(None)
            self._thread.join()
            self._provider.shutdown()

        ending = threading.Thread(target=finish, name="antiphon-traces-end", daemon=True)
        ending.start()
        ending.join(seconds)

    def flush(self) -> None:
        """Wait until spans are made of all that was told."""
        self._waiting.join()

    def _make(self) -> None:
        while True:
            end = self._waiting.get()
            try:
                if end is None:
                    return
                self._spans(end)
            except Exception:  # one text without spans, and the next has some
                log.exception("no spans could be made of a text")
            finally:
                self._waiting.task_done()

    def _spans(self, end: TextEnd) -> None:
        assert end.call is not None
        context = self._trace.set_span_in_context(end.call.parent)
        about: dict[str, Any] = {
            "gen_ai.request.model": end.model,
            "gen_ai.response.id": end.request_id,
            "antiphon.choice": end.choice,
        }
        over = {"gen_ai.response.finish_reasons": (end.reason,)}
        until = end.started or end.ended
        self._span("queue", context, end.arrived, until, about | ({} if end.started else over))
        if not end.started:
            return
        prompt = {
            "gen_ai.usage.input_tokens": end.prompt_tokens,
            "antiphon.cached_tokens": end.cached_tokens,
        }
        until = end.first_token or end.ended
        last = not end.first_token
        self._span("prefill", context, end.started, until, about | prompt | (over if last else {}))
        if end.first_token:
            made = {"gen_ai.usage.output_tokens": end.completion_tokens}
            self._span("decode", context, end.first_token, end.ended, about | made | over)

    def _span(
        self, name: str, context: Any, start: float, end: float, attributes: dict[str, Any]
    ) -> None:
        span = self._tracer.start_span(
            name, context=context, start_time=self._ns(start), attributes=attributes
        )
        reasons = attributes.get("gen_ai.response.finish_reasons", ())
        if FAILED in reasons:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        elif LEFT in reasons:
            span.add_event("the caller left", timestamp=self._ns(end))
        span.end(self._ns(end))

    def _ns(self, monotonic: float) -> int:
        return self._zero_ns + int(monotonic * 1e9)
