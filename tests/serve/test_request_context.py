"""Request ids, metrics and log lines of HTTP calls."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.serve.access import Access
from orca_jax.serve.health import metrics_route
from orca_jax.serve.request_context import RequestContext
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from tests.serve.asgi import bearer, call, http_scope
from tests.serve.played import Stage, on_stage, saying
from tests.telemetry.test_observer import samples


def application(observer: ServerObserver) -> ASGIApp:
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
                metrics_route(observer),
            ]
        ),
        observer,
    )


@pytest.mark.parametrize("sent", ["a", "req_1.2-3", "x" * 128, "0"])
def test_clients_id_is_kept(sent: str) -> None:
    answer = call(
        application(ServerObserver(ServerConfig())),
        "/items/1",
        headers=[(b"x-request-id", sent.encode())],
    )
    assert answer.header("x-request-id") == answer.body.decode() == sent


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"x" * 129,
        b"a b",
        b"a\nlevel=error",
        b"\xff",
        b"a;b",
        b"<script>",
        b"a\r\nset-cookie: x",
    ],
)
def test_odd_id_is_replaced(sent: bytes) -> None:
    answer = call(
        application(ServerObserver(ServerConfig())), "/items/1", headers=[(b"x-request-id", sent)]
    )
    made = answer.header("x-request-id")
    assert made is not None and made.startswith("req_") and made == answer.body.decode()


def test_no_answer_is_sniffed() -> None:
    """Answers, streams, files, metrics and refusals say that browsers must not guess their type."""

    async def act(stage: Stage) -> None:
        asked = [
            ("GET", path)
            for path in ("/live", "/health", "/v1/models", "/metrics", "/openapi.json", "/nowhere")
        ]
        asked += [
            ("GET", "/"),
            ("GET", "/playground/chart.js"),
            ("DELETE", "/live"),
            ("OPTIONS", "/v1/completions"),
        ]
        asked += [("POST", "/v1/completions"), ("POST", "/tokenize")]
        async with stage.http() as http:
            for method, path in asked:
                for body in (
                    ({"prompt": "x", "stream": True}, {"prompt": []})
                    if method == "POST"
                    else (None,)
                ):
                    answer = await http.request(method, path, json=body)
                    assert answer.headers.get_list("x-content-type-options") == ["nosniff"], (
                        method,
                        path,
                    )
            foreign = await http.get("/live", headers={"host": "evil.example"})
            assert (
                foreign.status_code == 403
                and foreign.headers["x-content-type-options"] == "nosniff"
            )

    on_stage(saying("x"), act)


def test_ids_differ() -> None:
    app = application(ServerObserver(ServerConfig()))
    ids = {
        call(app, path).header("x-request-id")
        for path in ("/items/1", "/items/1", "/nowhere", "/crash")
    }
    assert len(ids) == 4 and None not in ids


def test_crash_is_answered_and_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    observer = ServerObserver(ServerConfig())

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret of the house")

    for app in (RequestContext(crash, observer), application(observer)):
        caplog.clear()
        answer = call(app, "/crash", headers=[(b"x-request-id", b"mine")])
        assert (answer.status, answer.header("x-request-id")) == (500, "mine")
        assert b"secret" not in answer.body
        assert [record.message for record in caplog.records if record.exc_info] == [
            "a call crashed"
        ]
    answer = call(RequestContext(crash, observer), "/crash")
    assert answer.error == {
        "message": "an internal error occurred",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


def test_crash_after_the_answer_began() -> None:
    observer = ServerObserver(ServerConfig())

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"inner")]}
        )
        raise RuntimeError

    answer = call(RequestContext(crash, observer), "/x")
    assert (answer.status, answer.body) == (200, b""), "there is only one answer, left incomplete"
    assert answer.header("x-request-id") != "inner"
    assert samples(observer)["orca_jax_http_requests_open"] == 0


def test_calls_are_counted_by_route() -> None:
    observer = ServerObserver(ServerConfig())
    app = application(observer)
    for target in (
        "/items/a",
        "/items/b/c",
        "/items/%0a",
        "/nowhere",
        "/other?x=1",
        "/live",
        "/crash",
    ):
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
    observer = ServerObserver(ServerConfig())

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        task = asyncio.create_task(
            RequestContext(forever, observer)(http_scope("/x"), _never, _drop)
        )  # type: ignore[arg-type]
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
    app = application(ServerObserver(ServerConfig()))
    with caplog.at_level(logging.INFO):
        for target in ("/live", "/metrics", "/items/x"):
            call(app, target)
    assert [record.route for record in caplog.records] == ["/items/{name:path}"]


@pytest.mark.conforms("GET /metrics")
def test_metrics_route() -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application(ServerObserver(ServerConfig())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get("/metrics")

    answer = asyncio.run(run())
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {
        "vllm:num_requests_running",
        "orca_jax_compiles_while_serving",
        "process_resident_memory_bytes",
    } <= names


def test_keys_stay_out_of_metrics_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    observer = ServerObserver(ServerConfig(api_key=("hunter2",)))
    app = RequestContext(Access(application(observer), ("hunter2",)), observer)
    with caplog.at_level(logging.DEBUG):
        for key in ("hunter2", "hunter2x"):
            for target in ("/items/hunter", "/crash", "/nowhere", "/metrics"):
                answer = call(app, target, headers=bearer(key))
                assert b"hunter2" not in answer.body
    assert b"hunter2" not in observer.render()
    assert "hunter2" not in caplog.text + str([vars(record) for record in caplog.records])
