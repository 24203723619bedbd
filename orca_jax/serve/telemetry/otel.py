"""OpenTelemetry: a span for every request of the engine, as part of the caller's trace.

The module can be imported without the `otel` extra; only `start_tracing` with an endpoint needs it.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

EXPORT_SECONDS = 5  # for one batch, retries included
CLOSE_SECONDS = 5  # for the remaining spans when the server ends
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

logger = logging.getLogger(__name__)


class RequestEnd(NamedTuple):
    """The end of a request. Times are seconds, None for a stage that the request did not reach."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    queued: float | None
    first_token: float | None
    duration: float


class Tracing:
    """Makes spans and exports them. Owns `provider`."""

    def __init__(self, provider: "TracerProvider", model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("orca_jax")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @contextlib.contextmanager
    def continued(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Make spans of this block and task part of the trace named by `traceparent` in the ASGI `headers`."""
        from opentelemetry import context

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        token = context.attach(self._propagator.extract(carrier, context.Context()))
        try:
            yield
        finally:
            context.detach(token)

    def begin(self, request_id: str, endpoint: str) -> "Span":
        """Begin a span for one request of the engine."""
        from opentelemetry.trace import SpanKind

        operation = OPERATIONS.get(endpoint, endpoint)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "orca_jax",
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": request_id,
        }
        return self._tracer.start_span(
            f"{operation} {self._model}", kind=SpanKind.SERVER, attributes=attributes
        )

    def end(self, span: "Span", request: RequestEnd) -> None:
        """End a span. The attributes of times have vLLM's names; OpenTelemetry does not define all of them."""
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("gen_ai.usage.input_tokens", request.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", request.completion_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [request.reason])
        span.set_attribute("gen_ai.latency.e2e", request.duration)
        if request.queued is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", request.queued)
        if request.first_token is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", request.first_token)
        if request.reason in ("error", "timeout"):
            span.set_attribute("error.type", request.reason)
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Export the remaining spans; give up after `CLOSE_SECONDS`. Blocks."""
        # Without the thread the SDK would try each batch of a full queue for EXPORT_SECONDS.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="last spans")
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning(
                "the OpenTelemetry collector did not accept the last spans within %d s; they are lost",
                CLOSE_SECONDS,
            )


def start_tracing(config: ServerConfig) -> Tracing | None:
    """Export spans to `--otlp-traces-endpoint`; return None without this setting.

    Raises:
        ConfigError: the endpoint is not a URL, or the extra is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    param = "otlp_traces_endpoint"
    if not _is_http_url(endpoint):
        message = f"--otlp-traces-endpoint must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r}"
        raise ConfigError(message, param=param)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'orca-jax[otel]'"
        raise ConfigError(message, param=param) from None
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
    return trace_to(BatchSpanProcessor(exporter), config.names[0])


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False  # invalid brackets or port


def trace_to(processor: "SpanProcessor", model: str) -> Tracing:
    """Export spans to a processor of the SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(
        resource=Resource.create({"service.name": "orca-jax"}), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    return Tracing(provider, model)
