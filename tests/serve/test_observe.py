"""Metrics, request ids and log lines, against a played engine and a clock that the test moves."""

import asyncio
import dataclasses
import logging
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.engine import EngineStats
from orca_jax.request import RequestMetrics, RequestUpdate
from orca_jax.serve.access import Access
from orca_jax.serve.config import ServerConfig
from orca_jax.serve.metrics import END_REASONS, ENGINE_STATES, Distribution
from orca_jax.serve.observe import Observer
from orca_jax.serve.request_context import RequestContext
from orca_jax.serve.wire import Heartbeat
from orca_jax.step import ExecutorStats
from tests.serve.asgi import bearer, call, http_scope

STATS = EngineStats(
    iterations=0,
    scheduled_requests=0,
    scheduled_tokens=0,
    schedule_seconds=0.0,
    update_seconds=0.0,
    waiting=0,
    running=0,
    in_flight=0,
    preemptions=0,
    cache_queries=0,
    cache_hits=0,
    num_pages=100,
    free_pages=100,
    reserved_slots=0,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class PlayedClient:
    state: str = "ready"
    running: int = 0
    waiting: int = 0


def samples(observer: Observer) -> dict[str, float]:
    """What a scrape reads: `name{label=value}` -> value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(observer.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, f"{key} is published twice"
            found[key] = sample.value
    return found


def tokens(*ids: int, metrics: RequestMetrics | None = None) -> RequestUpdate:
    return RequestUpdate("r0", ids, "stop" if metrics else None, metrics=metrics)


def beat(phase: Any = "serving", executor: dict[str, Any] | None = None, **engine: Any) -> Heartbeat:
    if phase != "serving":
        return Heartbeat(phase, 1.5)
    return Heartbeat(phase, 0.0, dataclasses.replace(STATS, **engine), ExecutorStats(**executor or {}))


# Requests of the engine.


def test_times_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    observer = Observer(ServerConfig(), clock=clock)
    record = observer.begin("req_a", "/v1/completions", 7)
    clock.now += 0.3
    record.take(tokens(1))
    clock.now += 0.012
    record.take(tokens(2))
    clock.now += 0.04
    record.take(tokens(3, 4, metrics=RequestMetrics(arrival=5.0, first_scheduled=5.2, first_token=5.3, finished=5.4)))
    with caplog.at_level(logging.INFO):
        record.end("stop")
    (line,) = caplog.records
    shown = {name: getattr(line, name) for name in ("request_id", "endpoint", "finish_reason")}
    assert shown == {"request_id": "req_a", "endpoint": "/v1/completions", "finish_reason": "stop"}
    figures = [line.prompt_tokens, line.completion_tokens, line.queue_ms, line.ttft_ms, line.duration_ms]
    assert figures == pytest.approx([7, 4, 200, 300, 352])
    assert line.tokens_per_s == pytest.approx(3 / 0.052, rel=1e-3)
    found = samples(observer)
    gaps = "orca_jax_inter_token_latency_seconds"
    assert found[f"{gaps}_count"] == 3
    assert found[f"{gaps}_sum"] == pytest.approx(0.052)
    assert [found[f"{gaps}_bucket{{le={le}}}"] for le in ("0.01", "0.015", "0.02", "0.03", "+Inf")] == [0, 1, 3, 3, 3]
    for name, value in (("time_to_first_token", 0.3), ("e2e_request_latency", 0.352), ("request_queue_time", 0.2)):
        assert found[f"orca_jax_{name}_seconds_count"] == 1
        assert found[f"orca_jax_{name}_seconds_sum"] == pytest.approx(value)
    assert (found["orca_jax_prompt_tokens_total"], found["orca_jax_generation_tokens_total"]) == (7, 4)


def test_line_of_a_choice_has_the_calls_id(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has the `x-request-id` of an answer finds all its lines."""
    observer = Observer(ServerConfig())
    with caplog.at_level(logging.INFO):
        with structlog.contextvars.bound_contextvars(request_id="call"):
            records = [observer.begin(name, "/v1/completions", 1) for name in ("call", "call-0")]
        for record in records:
            record.end("abort")  # later, and perhaps in another task
    assert [(line.request_id, getattr(line, "choice_id", None)) for line in caplog.records] == [
        ("call", None),
        ("call", "call-0"),
    ]


@pytest.mark.parametrize("reason", END_REASONS)
def test_ends_count_once(reason: str) -> None:
    observer = Observer(ServerConfig())
    record = observer.begin("req_a", "/v1/completions", 7)
    record.end(reason)
    record.end("stop")
    found = samples(observer)
    ended = {key: value for key, value in found.items() if key.startswith("orca_jax_request_success_total")}
    assert len(ended) == len(END_REASONS), "a reason that has not occurred is 0, not absent"
    assert {key for key, value in ended.items() if value} == {
        f"orca_jax_request_success_total{{finished_reason={reason}}}"
    }
    complete = reason in ("stop", "length", "tool_calls")
    assert found["orca_jax_e2e_request_latency_seconds_count"] == complete
    assert found["orca_jax_prompt_tokens_total"] == 0, "it never got a token"


def test_unknown_reason_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="no reason to end"):
        Observer(ServerConfig()).begin("a", "/v1/completions", 1).end("whatever the client says")


def test_log_line_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer(ServerConfig(log_requests=False))
    with caplog.at_level(logging.INFO):
        observer.begin("req_a", "/v1/completions", 7).end("stop")
    assert not caplog.records
    assert samples(observer)["orca_jax_request_success_total{finished_reason=stop}"] == 1


def test_updates_without_tokens_are_no_tokens() -> None:
    observer = Observer(ServerConfig())
    record = observer.begin("a", "/v1/completions", 7)
    record.take(RequestUpdate("r0", ()))
    record.take(RequestUpdate("r0", (), "error", "no finite logits"))
    record.end("error")
    found = samples(observer)
    assert (found["orca_jax_generation_tokens_total"], found["orca_jax_time_to_first_token_seconds_count"]) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 4)), max_size=30))
def test_distribution_counts_as_prometheus_defines(values: list[tuple[float, int]]) -> None:
    class Family:
        def add_metric(self, labels: Any, buckets: list[tuple[str, float]], sum_value: float) -> None:
            self.buckets, self.sum = buckets, sum_value

    distribution, family = Distribution((0.5, 1, 10)), Family()
    for value, times in values:
        distribution.observe(value, times)
    distribution.add_to(family, ())  # type: ignore[arg-type]
    for bound, count in family.buckets:
        assert count == sum(times for value, times in values if value <= float(bound))
    assert family.sum == pytest.approx(sum(value * times for value, times in values))


# The engine, by its heartbeats.


def test_heartbeats() -> None:
    observer = Observer(ServerConfig())
    engine = {"running": 3, "waiting": 2, "free_pages": 75, "preemptions": 4, "iterations": 10}
    engine |= {"cache_queries": 50, "cache_hits": 20}
    seconds = {"schedule_seconds": 0.1, "update_seconds": 0.2}
    executor = {
        **{"tokens": 50, "padding_tokens": 6, "compiles": 8, "compiles_while_serving": 1, "launches": 11},
        **{"pack_seconds": 0.3, "dispatch_seconds": 9.0, "wait_seconds": 2.0},
    }
    observer.heartbeat(beat(executor=executor, **engine, **seconds))
    found = samples(observer)
    expected = {
        **{"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25},
        **{"kv_pages_used": 25, "kv_pages": 100, "num_preemptions_total": 4, "iterations_total": 10},
        **{"prefix_cache_queries_total": 50, "prefix_cache_hits_total": 20},
        **{"iteration_tokens_total": 50, "padding_tokens_total": 6, "compiles_total": 8, "launches_total": 11},
        **{"compiles_while_serving_total": 1, "host_seconds_per_iteration": 0.06, "engine_restarts_total": 0},
        **{"engine_seconds_total{part=dispatch}": 9.0, "engine_seconds_total{part=wait}": 2.0},
        "engine_state{state=ready}": 1,
    }
    assert {name: found[f"orca_jax_{name}"] for name in expected} == pytest.approx(expected)


def test_gateway_finds_its_names() -> None:
    observer = Observer(ServerConfig(served_model_name=("m", "alias")))
    observer.heartbeat(beat(running=3, waiting=2, free_pages=50))
    found = samples(observer)
    named = {key: value for key, value in found.items() if key.startswith("vllm:")}
    assert named == {
        "vllm:num_requests_running{model_name=m}": 3,
        "vllm:num_requests_waiting{model_name=m}": 2,
        "vllm:kv_cache_usage_perc{model_name=m}": 0.5,
    }


def test_client_knows_better_than_an_old_heartbeat() -> None:
    clock, client = Clock(), PlayedClient()
    observer = Observer(ServerConfig(), clock=clock)
    observer.follow(client)
    observer.heartbeat(beat(running=1, waiting=1, free_pages=50))
    client.running, client.waiting, client.state = 5, 6, "hung"
    clock.now += 4
    found = samples(observer)
    assert (found["orca_jax_num_requests_running"], found["vllm:num_requests_waiting{model_name=demo}"]) == (5, 6)
    assert found["orca_jax_engine_heartbeat_age_seconds"] == 4
    states = {state: found[f"orca_jax_engine_state{{state={state}}}"] for state in ENGINE_STATES}
    assert [state for state, value in states.items() if value] == ["hung"]
    client.state = "dead"
    assert samples(observer)["orca_jax_kv_pages_used"] == 0


def test_totals_go_on_over_restarts() -> None:
    observer = Observer(ServerConfig())
    for message in (
        beat("loading"),
        beat("compiling"),
        beat(iterations=10, preemptions=1),
        beat(iterations=15, preemptions=1),
        beat("loading"),
        beat("compiling"),
        beat(iterations=20, preemptions=2),
        beat(iterations=3, preemptions=2),  # a new engine whose first heartbeats were lost
    ):
        observer.heartbeat(message)
    found = samples(observer)
    assert found["orca_jax_iterations_total"] == 15 + 20 + 3
    assert found["orca_jax_num_preemptions_total"] == 1 + 2 + 2
    assert found["orca_jax_engine_restarts_total"] == 2


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(0, 9), max_size=20))
def test_totals_never_fall(steps: list[int | None]) -> None:
    """None: the engine died and another one starts."""
    observer, total, before, expected = Observer(ServerConfig()), 0, 0.0, 0
    for step in steps:
        if step is None:
            total = 0
            observer.heartbeat(beat("loading"))
        else:
            total, expected = total + step, expected + step
            observer.heartbeat(beat(iterations=total, executor={"tokens": total}))
        (sample,) = observer.metrics.engine.iterations.family().samples
        now = sample.value
        assert before <= now == expected
        before = now


# HTTP calls.


def application(observer: Observer) -> ASGIApp:
    async def item(request: Request) -> Response:
        return PlainTextResponse(request.scope["state"]["request_id"])

    async def crash(request: Request) -> Response:
        raise RuntimeError("the secret of the house")

    async def log(request: Request) -> Response:
        logging.getLogger("orca_jax.test").info("within")
        return PlainTextResponse("logged")

    return RequestContext(
        Starlette(
            routes=[
                Route("/items/{name:path}", item),
                Route("/crash", crash),
                Route("/log", log),
                Route("/live", item),
                *observer.routes(),
            ]
        ),
        observer,
    )


@pytest.mark.parametrize("sent", ["a", "req_1.2-3", "x" * 128, "0"])
def test_clients_id_is_kept(sent: str) -> None:
    answer = call(application(Observer(ServerConfig())), "/items/1", headers=[(b"x-request-id", sent.encode())])
    assert answer.header("x-request-id") == answer.body.decode() == sent


@pytest.mark.parametrize(
    "sent", [b"", b"x" * 129, b"a b", b"a\nlevel=error", b"\xff", b"a;b", b"<script>", b"a\r\nset-cookie: x"]
)
def test_odd_id_is_replaced(sent: bytes) -> None:
    answer = call(application(Observer(ServerConfig())), "/items/1", headers=[(b"x-request-id", sent)])
    made = answer.header("x-request-id")
    assert made is not None and made.startswith("req_") and made == answer.body.decode()


def test_ids_differ() -> None:
    app = application(Observer(ServerConfig()))
    ids = {call(app, path).header("x-request-id") for path in ("/items/1", "/items/1", "/nowhere", "/crash")}
    assert len(ids) == 4 and None not in ids


def test_crash_is_answered_and_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer(ServerConfig())

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret of the house")

    for app in (RequestContext(crash, observer), application(observer)):
        caplog.clear()
        answer = call(app, "/crash", headers=[(b"x-request-id", b"mine")])
        assert (answer.status, answer.header("x-request-id")) == (500, "mine")
        assert b"secret" not in answer.body
        assert [record.message for record in caplog.records if record.exc_info] == ["a call crashed"]
    answer = call(RequestContext(crash, observer), "/crash")
    assert answer.error == {
        "message": "an internal error occurred",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


def test_crash_after_the_answer_began() -> None:
    observer = Observer(ServerConfig())

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"inner")]})
        raise RuntimeError

    answer = call(RequestContext(crash, observer), "/x")
    assert (answer.status, answer.body) == (200, b""), "there is only one answer, left incomplete"
    assert answer.header("x-request-id") != "inner"
    assert samples(observer)["orca_jax_http_requests_open"] == 0


def test_calls_are_counted_by_route() -> None:
    observer = Observer(ServerConfig())
    app = application(observer)
    for target in ("/items/a", "/items/b/c", "/items/%0a", "/nowhere", "/other?x=1", "/live", "/crash"):
        call(app, target)
    call(app, "/items/a", "POST")
    call(app, "/items/a", "BREW")
    call(RequestContext(Access(app, ("key",)), observer), "/items/a")
    counted = {
        key.removeprefix("orca_jax_http_requests_total"): value
        for key, value in samples(observer).items()
        if key.startswith("orca_jax_http_requests_total")
    }
    assert counted == {
        "{method=GET,route=/items/{name:path},status=200}": 3,
        "{method=GET,route=none,status=404}": 2,
        "{method=GET,route=/live,status=200}": 1,
        "{method=GET,route=/crash,status=500}": 1,
        "{method=POST,route=/items/{name:path},status=405}": 1,
        "{method=other,route=/items/{name:path},status=405}": 1,
        "{method=GET,route=none,status=401}": 1,
    }


def test_hung_up_call_is_counted() -> None:
    observer = Observer(ServerConfig())

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        task = asyncio.create_task(RequestContext(forever, observer)(http_scope("/x"), _never, _drop))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert samples(observer)["orca_jax_http_requests_open"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    found = samples(observer)
    assert found["orca_jax_http_requests_total{method=GET,route=none,status=499}"] == 1
    assert found["orca_jax_http_requests_open"] == 0


async def _never() -> Any:
    await asyncio.Event().wait()


async def _drop(message: Any) -> None:
    return None


def test_probes_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    app = application(Observer(ServerConfig()))
    with caplog.at_level(logging.INFO):
        for target in ("/live", "/metrics", "/items/x"):
            call(app, target)
    assert [record.route for record in caplog.records] == ["/items/{name:path}"]


@pytest.mark.conforms("GET /metrics")
def test_metrics_route() -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application(Observer(ServerConfig())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get("/metrics")

    answer = asyncio.run(run())
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"vllm:num_requests_running", "orca_jax_compiles_while_serving", "process_resident_memory_bytes"} <= names


def test_keys_stay_out_of_metrics_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer(ServerConfig(api_key=("hunter2",)))
    app = RequestContext(Access(application(observer), ("hunter2",)), observer)
    with caplog.at_level(logging.DEBUG):
        for key in ("hunter2", "hunter2x"):
            for target in ("/items/hunter", "/crash", "/nowhere", "/metrics"):
                answer = call(app, target, headers=bearer(key))
                assert b"hunter2" not in answer.body
    assert b"hunter2" not in observer.render()
    assert "hunter2" not in caplog.text + str([vars(record) for record in caplog.records])
