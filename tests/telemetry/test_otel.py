"""Spans, in memory and over HTTP to a collector of the test."""

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from orca_jax.serve.request_context import RequestContext
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.serve.telemetry.otel import start_tracing, trace_to
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import RequestMetrics, RequestUpdate
from tests.serve.asgi import Pairs, call
from tests.serve.running import MODEL, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTINUED = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"vendor=1")]
CONFIG = ServerConfig(served_model_name=("m",))


class Traced:
    """An observer with spans in memory, and an application that runs one request of the engine."""

    def __init__(self, reason: str = "stop") -> None:
        self.exporter = InMemorySpanExporter()
        self.observer = ServerObserver(CONFIG, trace_to(SimpleSpanProcessor(self.exporter), "m"))
        self.reason = reason

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self.observer.begin(scope["state"]["request_id"], scope["path"], 7)
        if self.reason != "timeout":
            times = RequestMetrics(arrival=1.0, first_scheduled=1.5, first_token=2.0, finished=2.0)
            record.take_update(RequestUpdate("r0", (1, 2), "stop", metrics=times))
        record.end(self.reason)
        record.end("abort")
        await PlainTextResponse("done")(scope, receive, send)

    def call(
        self, path: str = "/v1/chat/completions", headers: Pairs | None = None
    ) -> ReadableSpan:
        """Make one call; return its span."""
        self.exporter.clear()
        sent = [*(headers or []), (b"x-request-id", b"req_1")]
        assert call(RequestContext(self.app, self.observer), path, "POST", sent).status == 200
        (span,) = self.exporter.get_finished_spans()
        return span


def test_span_says_what_became_of_a_request() -> None:
    span = Traced().call()
    assert (span.name, span.kind) == ("chat m", SpanKind.SERVER)
    found = dict(span.attributes or {})
    assert found.pop("gen_ai.latency.e2e") >= found.pop("gen_ai.latency.time_to_first_token") >= 0  # type: ignore[operator]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "orca_jax",
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "req_1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.5,
    }
    assert span.status.status_code == StatusCode.UNSET


def test_failed_request() -> None:
    span = Traced("timeout").call("/v1/completions")
    attributes = dict(span.attributes or {})
    assert span.name == "text_completion m"
    assert span.status.status_code == StatusCode.ERROR and attributes["error.type"] == "timeout"
    assert not {"gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token"} & set(
        attributes
    )


def test_callers_trace_is_continued() -> None:
    traced = Traced()
    span = traced.call(headers=CONTINUED)
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context.trace_state.get("vendor") == "1"
    alone = traced.call()
    assert alone.parent is None and alone.context.trace_id != span.context.trace_id


@pytest.mark.parametrize(
    "value", [b"", b"00", b"nonsense", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff" * 50]
)
def test_odd_traceparent_begins_a_trace(value: bytes) -> None:
    assert Traced().call(headers=[(b"traceparent", value)]).parent is None


def test_caller_may_decline() -> None:
    traced = Traced()
    unsampled = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode())]
    assert call(RequestContext(traced.app, traced.observer), "/x", "POST", unsampled).status == 200
    assert not traced.exporter.get_finished_spans()


def test_off_by_default() -> None:
    assert start_tracing(ServerConfig()) is None


def test_off_loads_nothing() -> None:
    program = (
        "import sys, orca_jax.serve.request_context as context, orca_jax.serve.telemetry.otel as tracing\n"
        "from orca_jax.server_config import ServerConfig\n"
        "context.ServerObserver(ServerConfig(), tracing.start_tracing(ServerConfig())).begin('a', 'b', 1).end('stop')\n"
        "print(sum(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "localhost:4318",
        "grpc://localhost:4317",
        "http://",
        "/v1/traces",
        "http://[x",
        "http://x:99999",
    ],
)
def test_endpoint_must_be_a_url(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match="must be a URL such as http://localhost:4318/v1/traces"
    ) as raised:
        start_tracing(ServerConfig(otlp_traces_endpoint=endpoint))
    assert raised.value.param == "otlp_traces_endpoint"


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'orca-jax\[otel\]'"):
        start_tracing(ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces"))


class Collector(http.server.ThreadingHTTPServer):
    """A collector that keeps the spans it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_collector_has_every_span_after_close(collector: Collector) -> None:
    tracing = start_tracing(
        ServerConfig(served_model_name=("m",), otlp_traces_endpoint=collector.endpoint)
    )
    assert tracing is not None
    observer = ServerObserver(CONFIG, tracing)
    for number in range(3):
        observer.begin(f"req_{number}", "/v1/completions", 7).end("stop")
    tracing.close()
    spans = [
        (dict((pair.key, pair.value.string_value) for pair in sent.resource.attributes), span)
        for request in collector.received
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]
    assert [resource["service.name"] for resource, _ in spans] == ["orca-jax"] * 3
    ids = [
        pair.value.string_value
        for _, span in spans
        for pair in span.attributes
        if pair.key == "gen_ai.request.id"
    ]
    assert sorted(ids) == ["req_0", "req_1", "req_2"]


def test_server_sends_its_spans_before_it_ends(collector: Collector) -> None:
    with running("--otlp-traces-endpoint", collector.endpoint) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {
            "model": MODEL,
            "prompt": ["ab", "cd"],
            "max_tokens": 3,
            "ignore_eos": True,
            "stream": True,
        }
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    spans = [
        span
        for request in collector.received
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]
    assert [span.trace_id.hex() for span in spans] == [TRACE] * 2
    for span in spans:
        found = {pair.key: pair.value for pair in span.attributes}
        assert found["gen_ai.usage.output_tokens"].int_value == 3
        assert found["gen_ai.latency.time_in_queue"].double_value >= 0


class StuckExporter(InMemorySpanExporter):
    """A collector that blocks until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def shutdown(self) -> None:
        self.let_go.wait(60)


def test_stuck_collector_does_not_hold_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = StuckExporter()
    tracing = trace_to(SimpleSpanProcessor(exporter), "m")
    monkeypatch.setattr("orca_jax.serve.telemetry.otel.CLOSE_SECONDS", 0.1)
    start = time.monotonic()
    tracing.close()
    assert time.monotonic() - start < 30
    assert "they are lost" in caplog.text
    exporter.let_go.set()
