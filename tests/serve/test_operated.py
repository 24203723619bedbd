"""A real server in operation: keys on every route, metrics, and log lines."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orca_jax.serve.__main__ import main
from tests.serve.running import MODEL, Server, running, wait_until

KEY, OTHER_KEY = "sk-operated-1", "sk-operated-2"
PAGE = "https://page.example"
OPEN = {"/live", "/health"}
DASHBOARD = Path(__file__).with_name("vllm_dashboard.promql")


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("access") / "keys"
    keys.write_text(f"# who\n{OTHER_KEY}\n")
    keys.chmod(0o600)
    access = ("--api-key", KEY, "--api-key-file", str(keys), "--allowed-origins", PAGE)
    with running(*access, "--log-format", "json", "--log-requests", api_key=KEY) as server:
        yield server
    said = "".join([*server.lines, *server.errors])
    assert KEY not in said and OTHER_KEY not in said, "a key is in the log"


def metrics(server: Server) -> dict[str, float]:
    """The value of each sample, by name with labels."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    return {
        sample.name
        + "".join(f"|{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def log(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(server.errors)]


def raw(server: Server, method: str, target: str) -> int:
    """Send a raw request line without a key; return the status."""
    address = httpx.URL(server.url)
    connection = http.client.HTTPConnection(address.host, address.port or 80, timeout=60)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def documented_routes(server: Server) -> list[tuple[str, str]]:
    """Pairs (method, path) of the OpenAPI document."""
    paths = server.http.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), re.sub(r"{.*?}", "x", path))
        for path, methods in paths.items()
        for method in methods
    ]


def test_every_route_needs_a_key(operated: Server) -> None:
    routes = documented_routes(operated)
    paths = {path for _, path in routes}
    assert paths >= OPEN | {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/metrics",
        "/ready",
        "/load",
    }
    tried = {
        *routes,
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "/docs"),
        ("OPTIONS", "*"),
    }
    tried |= {
        ("GET", "/playground/settings"),
        ("GET", "/playground/iterations"),
        ("POST", "/playground/burst"),
    }
    tried |= {
        (method, path) for method in ("HEAD", "OPTIONS", "PUT", "DELETE") for path in paths - OPEN
    }
    for method, path in sorted(tried):
        status = raw(operated, method, path)
        if path in OPEN:
            assert status == 200, path
        else:
            assert status == 401, f"{method} {path} is open"


@pytest.mark.parametrize(
    "target",
    [
        *(
            "//live",
            "/live/",
            "/LIVE",
            "/live/../metrics",
            "/live/..%2fmetrics",
            "/live;/metrics",
            "/./live",
            "/%2e/live",
        ),
        *(
            "/health/%2e%2e/v1/models",
            "/live%00",
            "/live%2f..%2fv1/models",
            "http://x/live",
            "/metrics?x=/live",
        ),
        *(
            "/metrics%20",
            "/Metrics",
            "//metrics",
            "/v1//models",
            "/metrics/",
            "/v1/models/../../live",
        ),
    ],
)
def test_no_spelling_is_a_way_in(operated: Server, target: str) -> None:
    assert raw(operated, "GET", target) == 401


def test_both_keys_are_good(operated: Server) -> None:
    for key, status in ((KEY, 200), (OTHER_KEY, 200), (KEY + "x", 401), ("none", 401)):
        answer = httpx.get(f"{operated.url}/v1/models", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["x-request-id"]


def test_page_gets_its_preflight_and_can_read_a_refusal(operated: Server) -> None:
    url, asked = (
        f"{operated.url}/v1/completions",
        {"origin": PAGE, "access-control-request-method": "POST"},
    )
    assert httpx.options(url, headers=asked).headers["access-control-allow-origin"] == PAGE
    assert (
        httpx.options(url, headers={**asked, "origin": "https://evil.example"}).status_code == 400
    )
    refused = httpx.post(url, headers={"origin": PAGE}, json={})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.conforms("GET /metrics")
def test_counters_equal_what_was_sent(operated: Server) -> None:
    before = metrics(operated)
    answers = [
        operated.complete("abc", max_tokens=4, ignore_eos=True, temperature=0) for _ in range(3)
    ]
    with operated.stream(["ab", "cd"], max_tokens=5, ignore_eos=True, temperature=0) as events:
        assert list(events)
    assert operated.complete("x", max_tokens=-2).status_code == 400
    usages = [answer.json()["usage"] for answer in answers]
    wait_until(lambda: metrics(operated)["orca_jax_num_requests_running"] == 0)
    after = metrics(operated)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    expected = {
        "prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages) + 4,
        "generation_tokens_total": 3 * 4 + 2 * 5,
        "request_success_total|finished_reason=length": 5,
        "request_success_total|finished_reason=error": 0,
        "time_to_first_token_seconds_count": 5,
        "e2e_request_latency_seconds_count": 5,
        "request_queue_time_seconds_count": 5,
        "inter_token_latency_seconds_count": 3 * 3 + 2 * 4,
        "http_requests_total|method=POST|route=/v1/completions|status=200": 4,
        "http_requests_total|method=POST|route=/v1/completions|status=400": 1,
        "compiles_while_serving_total": 0,
    }
    assert {name: grown[f"orca_jax_{name}"] for name in expected} == expected
    assert after["orca_jax_engine_state|state=ready"] == 1
    assert after[f"vllm:num_requests_waiting|engine=0|model_name={MODEL}"] == 0


@pytest.mark.conforms("GET /metrics")
def test_a_dashboard_of_vllm_is_not_empty(operated: Server) -> None:
    """Each metric has samples with the labels that are asked for, and what is asked for its growth has grown."""
    operated.complete("dashboard", cache_salt="dashboard", max_tokens=4, ignore_eos=True)
    queries = DASHBOARD.read_text(encoding="utf-8").splitlines()[1:]
    names = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    wait_until(
        lambda: any(
            name.startswith("vllm:prefix_cache_queries") and n
            for name, n in metrics(operated).items()
        )
    )
    found = metrics(operated)
    samples = {
        name: {key: n for key, n in found.items() if key.partition("|")[0] == name}
        for name in names
    }
    for query in queries:
        labels = set(re.findall(r"(\w+)=", query))
        labels.update(*(inside.split(", ") for inside in re.findall(r"by \((.*?)\)", query)))
        for name in re.findall(r"vllm:\w+", query):
            assert all(f"|{label}=" in key for key in samples[name] for label in labels), query
    grown = set(re.findall(r"(?:rate|increase)\((vllm:\w+)", "\n".join(queries)))
    empty = {name for name in names if not (any if name in grown else len)(samples[name].values())}
    assert empty <= {"vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"}, (
        "they have samples, of 0"
    )
    assert all(samples.values())


def test_engine_totals_follow(operated: Server) -> None:
    before = metrics(operated)
    # no other test computed it
    operated.complete("totals", cache_salt="totals", max_tokens=4, ignore_eos=True)

    def grown(name: str) -> float:
        return metrics(operated)[f"orca_jax_{name}"] - before[f"orca_jax_{name}"]

    wait_until(lambda: grown("iteration_tokens_total") >= 6 + 3)
    assert grown("iterations_total") >= 4
    assert metrics(operated)["orca_jax_kv_pages"] > 0
    wait_until(lambda: metrics(operated)["orca_jax_engine_heartbeat_age_seconds"] < 5)
    wait_until(lambda: metrics(operated)["orca_jax_kv_pages_used"] == 0)


def test_lines_of_a_request(operated: Server) -> None:
    headers = {"x-request-id": "mine-1"}
    body = {"model": MODEL, "prompt": "secret words", "max_tokens": 3, "ignore_eos": True}
    answer = operated.http.post("/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "mine-1"

    def lines() -> dict[str, dict[str, Any]]:
        return {line["event"]: line for line in log(operated) if line.get("request_id") == "mine-1"}

    wait_until(lambda: len(lines()) == 2)
    ended, answered = lines()["request ended"], lines()["answered"]
    assert (ended["finish_reason"], ended["completion_tokens"]) == ("length", 3)
    assert ended["endpoint"] == answered["route"] == "/v1/completions"
    assert ended["queue_ms"] >= 0 and 0 < ended["ttft_ms"] <= ended["duration_ms"]
    assert (answered["status"], answered["method"]) == (200, "POST")
    assert not any("secret words" in line for line in operated.errors)


def test_engines_log_looks_the_same(operated: Server) -> None:
    operated.http.get("/v1/models")
    wait_until(lambda: len(operated.errors) > 0)
    for line in log(operated):
        assert {"timestamp", "level", "logger", "event", "process"} <= set(line)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "holds no key"), ("a b\n", "printable ASCII"), (None, "cannot be read")],
)
def test_bad_key_file_ends_the_start(
    tmp_path: Path, content: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    assert main(["--model", MODEL, "--port", "0", "--api-key-file", str(keys)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: --api-key-file")
        and complaint in error
        and "Traceback" not in error
    )


@pytest.mark.chaos
def test_totals_go_on_when_the_engine_is_killed() -> None:
    with running("--restart-engine") as server:

        def read(name: str) -> float:
            return metrics(server)[f"orca_jax_{name}"]

        assert server.complete("abc", max_tokens=8, ignore_eos=True).status_code == 200
        wait_until(lambda: read("iterations_total") >= 8)
        iterations, generated = read("iterations_total"), read("generation_tokens_total")
        server.engine().kill()
        wait_until(
            lambda: server.health().status_code == 200 and read("engine_restarts_total") == 1
        )
        assert read("generation_tokens_total") == generated == 8
        assert server.complete("abc", max_tokens=8, ignore_eos=True).status_code == 200
        wait_until(lambda: read("iterations_total") >= iterations + 8)
        assert read("compiles_while_serving_total") == 0
