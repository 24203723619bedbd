"""Rows sent to a server: ours says what the engine in the process says; others fail in every way."""

import json
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orca_jax.batch import remote
from orca_jax.batch.run import run_batch
from orca_jax.values.errors import ConfigError, EngineError
from tests.batch.world import MODEL, run, settings, write
from tests.serve.running import running

Play = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes] | None]
"""(how often this body came before, the body) -> status, headers, body; None: hang up."""

OK = json.dumps(
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, indent=1
).encode()


@contextmanager
def playing(play: Play) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that answers as `play` says; its URL, and the headers of what came."""
    seen: dict[bytes, int] = {}
    headers: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers.append(
                {"path": self.path, **{name.lower(): value for name, value in self.headers.items()}}
            )
            count = seen[body] = seen.get(body, -1) + 1
            answer = play(count, json.loads(body))
            if answer is None:
                self.close_connection = True
                return
            status, fields, text = answer
            self.send_response(status)
            for name, value in {**fields, "content-length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *details: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", headers
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)


def prompts(*texts: str) -> list[bytes]:
    return [json.dumps({"custom_id": text, "prompt": text}).encode() for text in texts]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without what no two answers have in common, and without hits, which depend on the order of the answers."""
    row["response"]["request_id"] = None
    body = row["response"]["body"]
    for name in ("id", "created"):
        body.pop(name, None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return row


def test_a_body_means_the_same_to_engine_and_server(tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 7, "seed": 3}
    chat = {**common, "messages": [{"role": "user", "content": "hi"}]}
    bodies = [
        ("completions", {**common, "prompt": "sea", "logprobs": 2, "echo": True, "n": 2}),
        (
            "completions",
            {**common, "prompt": "sea", "structured_outputs": {"choice": ["left", "right"]}},
        ),
        ("completions", {**common, "prompt": "sea", "stop": ["a", "e"]}),
        (
            "completions",
            {**common, "prompt": "sea", "max_tokens": 10**6, "truncate_prompt_tokens": -1},
        ),
        ("completions", {**common, "prompt": "sea", "top_k": "many"}),
        ("chat/completions", {**chat, "top_logprobs": 1, "logprobs": True}),
        ("chat/completions", {**chat, "messages": [{"role": "nobody", "content": "hi"}]}),
        ("chat/completions", {**chat, "model": "other"}),
    ]
    lines = [
        json.dumps(
            {"custom_id": str(i), "method": "POST", "url": f"/v1/{url}", "body": body}
        ).encode()
        for i, (url, body) in enumerate(bodies)
    ]
    source = write(tmp_path / "in.jsonl", lines)
    with running() as server:
        over_http = run(source, tmp_path / "http.jsonl", "--base-url", f"{server.url}/v1/")
    in_process = run(source, tmp_path / "here.jsonl")
    assert [row["response"]["status_code"] for row in in_process] == [
        200,
        200,
        200,
        400,
        400,
        200,
        400,
        404,
    ]
    assert list(map(plain, over_http)) == list(map(plain, in_process))


def test_what_passes_is_tried_again_and_all_else_is_a_row(tmp_path: Path) -> None:
    def play(count: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes] | None:
        match body["prompt"], count:
            case "busy", 0:
                return 429, {"retry-after": "0"}, b"{}"
            case "broken", 0:
                return 500, {}, b"not JSON"
            case "cut", 0:
                return None
            case "wrong", _:
                return 422, {}, b'{"detail": "no such field"}'
            case "hopeless", _:
                return 500, {"x-should-retry": "false"}, b'{"error": {"code": "generation_failed"}}'
            case "down", _:
                return 503, {}, b"<html>"
        return 200, {"x-request-id": f"r-{body['prompt']}-{count}"}, OK

    names = ("fine", "busy", "broken", "cut", "wrong", "hopeless", "down")
    source, output = write(tmp_path / "in.jsonl", prompts(*names)), tmp_path / "out.jsonl"
    (tmp_path / "key").write_text("secret\n")
    with playing(play) as (url, headers):
        flags = ("--base-url", url, "--max-retries", "2", "--api-key-file", str(tmp_path / "key"))
        result = run_batch(settings(source, output, *flags)).result
    rows = {
        row["custom_id"]: row["response"]
        for row in map(json.loads, output.read_bytes().splitlines())
    }
    assert {name: row["status_code"] for name, row in rows.items()} == {
        **{"fine": 200, "busy": 200, "broken": 200, "cut": 200},
        **{"wrong": 422, "hopeless": 500, "down": 503},
    }
    assert [rows[name]["request_id"] for name in names[:4]] == [
        "r-fine-0",
        "r-busy-1",
        "r-broken-1",
        "r-cut-1",
    ]
    assert rows["down"]["body"]["error"]["code"] == "no_json"
    assert result["errors"] == {"422": 1, "500 generation_failed": 1, "503 no_json": 1}
    assert (result["retries"], result["completion_tokens"]) == (5, 8)
    assert {(one["authorization"], one["path"]) for one in headers} == {
        ("Bearer secret", "/v1/completions")
    }


def test_a_row_that_kills_connections_does_not_end_the_run(tmp_path: Path) -> None:
    """With two connections, "second" is sent only after the answer to "first" has arrived."""
    is_first_answered = threading.Event()

    def play(count: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes] | None:
        if body["prompt"] == "poison":
            assert is_first_answered.wait(60)
            return None
        if body["prompt"] == "second":
            is_first_answered.set()
        return 200, {}, OK

    with playing(play) as (url, _):
        source = write(tmp_path / "in.jsonl", prompts("poison", "first", "second"))
        flags = ("--base-url", url, "--max-retries", "1", "--concurrency", "2")
        rows = run(source, tmp_path / "out.jsonl", *flags)
    assert [row["response"]["status_code"] for row in rows] == [503, 200, 200]
    assert rows[0]["response"]["body"]["error"]["code"] == "connection_lost"


def test_connections_beyond_the_limit_of_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would end with a server that does not answer."""
    source, output = write(tmp_path / "in.jsonl", prompts("1")), tmp_path / "out.jsonl"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(
        ConfigError, match=r"must be at most \d+, since the limit of open files is 1024"
    ) as error:
        run(source, output, "--base-url", "http://localhost:1", "--concurrency", "1020")
    assert error.value.param == "concurrency" and not output.exists()


def test_a_key_that_is_refused_ends_the_run(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("1", "2")), tmp_path / "out.jsonl"
    (tmp_path / "key").write_text("secret\n")
    with (
        playing(lambda count, body: (401, {}, b'{"error":\n "who?"}')) as (url, _),
        pytest.raises(ConfigError, match=r'the server answered 401: \{"error": "who') as error,
    ):
        run(source, output, "--base-url", url, "--api-key-file", str(tmp_path / "key"))
    assert error.value.param == "api_key_file" and not output.exists()


def test_a_server_that_is_gone_ends_the_run_which_goes_on_later(tmp_path: Path) -> None:
    is_gone = True

    def play(count: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes] | None:
        return None if is_gone and body["prompt"] == "3" else (200, {}, OK)

    source, output = (
        write(tmp_path / "in.jsonl", prompts("1", "2", "3", "4")),
        tmp_path / "out.jsonl",
    )
    with playing(play) as (url, _):
        flags = ("--base-url", url, "--max-retries", "1", "--concurrency", "1")
        with pytest.raises(EngineError, match="does not answer"):
            run(source, output, *flags)
        assert output.read_bytes().count(b"\n") == 2
        is_gone = False
        assert [row["custom_id"] for row in run(source, output, *flags)] == ["1", "2", "3", "4"]
