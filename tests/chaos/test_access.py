"""Listening sockets, keys on every route, and isolation of tenants from each other and from the host."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.world import LONG, SEEDED, Watch, check_error, connect, read_answer, wait_calm
from tests.serve.running import MODEL, Server, running, spawn, wait_until

KEYS = ("sk-first-key-of-two", "sk-second-key-of-two")
OPEN = {("GET", "/live"), ("GET", "/health"), ("HEAD", "/live"), ("HEAD", "/health"), ("HEAD", "/")}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
MORE_PATHS = (
    "/", "/v1", "/v1/", "/v1/models", f"/v1/models/{MODEL}", "/v1/completions", "/v1/chat/completions", "/tokenize",
    "/detokenize", "/version", "/load", "/metrics", "/ready", "/health_generate", "/openapi.json", "/docs", "/redoc",
    "/v1/responses", "/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/v1/responses/compact",
    "/v1/embeddings", "/debug", "/shutdown", "/favicon.ico", "/static/x",
)  # fmt: skip
DISGUISES = (
    "/health/", "/health/../v1/models", "//health", "/Health", "/health%2f..%2fv1%2fmodels", "/v1/models/",
    "//v1/models", "/v1/%6dodels", "/health;/v1/models", "/health/x", "/live/../metrics", "/./metrics",
    "/health%00", "/live.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one key from the command line and one from a file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS[1] + "\n")
    path.chmod(0o600)
    flags = ("--api-key", KEYS[0], "--api-key-file", str(path), "--max-num-seqs", "4")
    with running(*flags, "--no-playground") as server:  # its files are open
        yield server
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        wait_calm(server)
    assert not any(key in line for line in (*server.lines, *server.errors) for key in KEYS), (
        "keys never are in logs"
    )


def routes(server: Server) -> set[tuple[str, str]]:
    """Every method on every route: published routes, other existing ones, and missing ones."""
    document = server.http.get("/openapi.json", headers={"authorization": f"Bearer {KEYS[0]}"})
    assert document.status_code == 200
    published = {
        path.replace("{model}", MODEL).replace("{id}", MODEL) for path in document.json()["paths"]
    }
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= published
    return {(method, path) for path in {*published, *MORE_PATHS} for method in METHODS}


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer wrong", f"Bearer x{KEYS[0]}", f"Bearer {KEYS[0][1:]}",
        f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[1]} {KEYS[0]}", f"Bearer ,{KEYS[1]}",
        f"Bearer {KEYS[0].upper()}",
        "Bearer *", "Bearer \xe4\xff", "Bearer " + "x" * 10_000,
    ],
    ids=lambda header: str(header)[:14],
)  # fmt: skip
def test_no_route_opens_without_a_key(locked: Server, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    with httpx.Client(base_url=locked.url, timeout=20) as client:
        for method, path in sorted(routes(locked) - OPEN):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path, response.status_code)
            if path == "/v1/systemone" and method != "HEAD":
                detail = response.json()["detail"]
                assert detail["error_type"] == "authentication_error" and detail["message"]
            elif method != "HEAD":
                code = None if path.startswith("/v1/messages") else "invalid_api_key"
                assert check_error(response, 401)["code"] == code


def test_disguised_paths_are_closed(locked: Server) -> None:
    for method in ("GET", "POST"):
        for path in DISGUISES:
            with connect(locked) as connection:
                connection.sendall(
                    f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
                )
                status, body = read_answer(connection)
                assert status in (400, 401), (method, path, status, body[:100])


@pytest.mark.parametrize(
    "extra",
    [{"x-key": KEYS[0]}, {"cookie": f"key={KEYS[0]}"}, {"x-forwarded-for": "127.0.0.1"}],
)
def test_keys_count_in_headers_of_keys_only(locked: Server, extra: dict[str, str]) -> None:
    check_error(locked.http.get(f"/v1/models?api_key={KEYS[0]}", headers=extra), 401)


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_an_authorization_header_comes_before_the_other_ones(locked: Server, name: str) -> None:
    assert locked.http.get("/v1/models", headers={name: KEYS[0]}).status_code == 200
    check_error(locked.http.get("/v1/models", headers={name: "wrong"}), 401)
    both = {"authorization": "Bearer wrong", name: KEYS[0]}
    check_error(locked.http.get("/v1/models", headers=both), 401)


def test_two_authorization_headers(locked: Server) -> None:
    for pair in ((KEYS[0], "wrong"), ("wrong", KEYS[0])):
        headers = [("authorization", f"Bearer {key}") for key in pair]
        check_error(locked.http.get("/v1/models", headers=headers), 401)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_every_route(locked: Server, key: str) -> None:
    for method, path in sorted(routes(locked)):
        response = locked.http.request(method, path, headers={"authorization": f"Bearer {key}"})
        assert response.status_code != 401, (method, path)


def test_stored_responses_stay_with_their_key(locked: Server) -> None:
    """Another key reads, continues and deletes none of them, by none of their ids."""
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    secret = "a secret of the first key"
    for number in range(50):
        body = {"model": MODEL, "input": f"{secret} {number}", "max_output_tokens": 8}
        made = locked.http.post("/v1/responses", json=body, headers=mine).json()
        name, items = made["id"], [{"id": item["id"]} for item in made["output"]]
        items += locked.http.get(f"/v1/responses/{name}/input_items", headers=mine).json()["data"]
        refused = [
            locked.http.get(f"/v1/responses/{name}{end}", headers=other)
            for end in ("", "/input_items")
        ]
        refused.append(locked.http.delete(f"/v1/responses/{name}", headers=other))
        for fields in (
            {"previous_response_id": name},
            *({"input": [{"id": item["id"]}]} for item in items),
        ):
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                refused.append(locked.http.post(path, json={"input": "x", **fields}, headers=other))
        assert len(refused) == 9
        for answer in refused:
            check_error(answer, 400, 404)
            assert secret not in answer.text and (name in answer.text or "msg_" in answer.text)
        assert locked.http.get(f"/v1/responses/{name}", headers=mine).json() == made


def test_probes_need_no_key_and_tell_little(locked: Server) -> None:
    for path in ("/live", "/health"):
        response = locked.http.get(path)
        assert (
            response.status_code == 200
            and len(response.content) < 300
            and MODEL not in response.text
        )


def test_a_refused_call_costs_no_body(locked: Server) -> None:
    """Thirty megabytes without a key are refused before they are read and parsed."""
    start = time.monotonic()
    for _ in range(5):
        with contextlib.suppress(httpx.TransportError):  # closed while the test was still writing
            check_error(locked.http.post("/v1/completions", content=b"[" * 30_000_000), 401)
    assert time.monotonic() - start < 10


def test_only_the_http_port_listens(server: Server) -> None:
    """Unix sockets, if any, are in directories closed to other users."""
    family = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    listening = [
        c
        for process in family
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    datagrams = [
        c
        for process in family
        for c in process.net_connections("inet")
        if c.type.name == "SOCK_DGRAM"
    ]
    assert {(c.laddr.ip, c.laddr.port) for c in listening} == {
        ("127.0.0.1", server.http.base_url.port)
    }
    assert datagrams == []
    paths = [
        Path(c.laddr) for process in family for c in process.net_connections("unix") if c.laddr
    ]
    for path in paths:
        if path.exists():
            assert path.parent.stat().st_mode & 0o077 == 0, path


def test_a_unix_socket_is_its_owners(tmp_path: Path) -> None:
    """No TCP port is open, and other users cannot connect."""
    path = tmp_path / "s"
    process = spawn("--model", MODEL, "--uds", str(path))
    try:
        wait_until(path.exists, 20)
        assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
        listening = [
            c
            for c in psutil.Process(process.pid).net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert listening == []
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://here"
        ) as client:
            wait_until(lambda: client.get("/health").status_code == 200, 20)
            assert (
                client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code
                == 200
            )
        process.terminate()
        assert process.wait(15) == 0 and not path.exists()
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_salts_keep_tenants_apart(server: Server, watch: Watch) -> None:
    """Answers are equal, and the count of cached tokens does not reveal the prompt of another tenant."""
    prompt = "the same long prompt " * 200
    answers = []
    for salt in ("one", "one", "two", None):
        fields = {} if salt is None else {"cache_salt": salt}
        answers.append(server.complete(prompt, max_tokens=8, **SEEDED, **fields).json())
    details = [answer["usage"].pop("prompt_tokens_details", {}) for answer in answers]
    assert [each.get("cached_tokens", 0) > 0 for each in details] == [False, True, False, False], (
        "a prefix is shared within a salt only"
    )
    assert (
        len(
            {json.dumps([answer["choices"], answer["usage"]], sort_keys=True) for answer in answers}
        )
        == 1
    )


def test_errors_tell_nothing_of_the_machine(server: Server, watch: Watch) -> None:
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../x"):
        response = server.http.get(path)
        assert (
            response.status_code == 404
            and "orca" not in response.text
            and "root:" not in response.text
        )
    check_error(server.complete("x", model="/etc/passwd" * 10), 404)
    check_error(server.complete("x", **{**LONG, "max_tokens": "/etc"}), 400)
