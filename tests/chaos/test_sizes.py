"""Bodies and grammars of excessive size or depth: refused early, by name, without delay for other calls."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.world import Watch, check_error, connect, head, post_raw, read_answer
from tests.serve.running import MODEL, Server

MIB = 2**20


TOO_MUCH: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 10**9}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 10**9}, "best_of"),
    ({"max_tokens": 10**20}, "max_tokens"),
    ({"max_tokens": 10**9, "truncate_prompt_tokens": -1}, "max_tokens"),
    ({"logit_bias": {f"key {i}": 1 for i in range(10**5)}}, "logit_bias"),
    ({"prompt": ["x"] * 10**5}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 1024, "n": 128}, None),
    ({"prompt": [1] * 10**6}, "prompt"),
    ({"prompt": "x" * 10**7}, "prompt"),
    ({"stop": ["x"] * 10**5}, "stop"),
    ({"stop": "x" * 10**6}, "stop"),
    ({"bad_words": ["x"] * 10**5}, "bad_words"),
    ({"bad_words": ["x" * 10**6]}, "bad_words"),
    ({"stop_token_ids": [1] * 10**6}, "stop_token_ids"),
    (
        {"logit_bias": {str(i): 1 for i in range(257)} | {str(i): 1 for i in range(10**5)}},
        "logit_bias",
    ),
    ({"logprobs": 10**9}, "logprobs"),
    ({"prompt_logprobs": 10**9}, "prompt_logprobs"),
    ({"user": "x" * 10**7}, "user"),
    ({"request_id": "x" * 10**6}, "request_id"),
    ({"cache_salt": "x" * 10**7}, "cache_salt"),
    ({"x" * 10**6: 1}, None),
    ({f"unknown{i}": 1 for i in range(10**5)}, None),
]


@pytest.mark.parametrize("number", range(len(TOO_MUCH)))
def test_too_much_of_a_field(server: Server, watch: Watch, number: int) -> None:
    fields, param = TOO_MUCH[number]
    response = server.complete(**{"prompt": "x", **fields})
    error = check_error(response)
    assert param is None or (error["param"] or "").startswith(param), error
    assert len(response.content) < 4096, "an error does not repeat what was sent"


def test_what_the_store_collects_stalls_no_other_call(server: Server, watch: Watch) -> None:
    """Thousands of items of a large response, and a conversation of thousands of turns; also both at once."""
    roles = [role for _ in range(2000) for role in ("user", "assistant")]
    talk = [
        {"role": role, "content": "x" * 3000, "id": f"m{number}"}
        for number, role in enumerate(roles)
    ]
    references = [{"type": "item_reference", "id": f"m{number}"} for number in range(len(talk))]
    body = {"model": MODEL, "max_output_tokens": 2, "truncation": "auto"}
    made = server.http.post(
        "/v1/responses", json={**body, "input": [*talk, {"role": "user", "content": "x"}]}
    )
    assert made.status_code == 200, made.text
    name = made.json()["id"]
    for fields in (
        {"input": [*references, {"role": "user", "content": "x"}]},
        {"input": "x", "previous_response_id": name},
        {"input": [*references, {"role": "user", "content": "x"}], "previous_response_id": name},
    ):
        answer = server.http.post("/v1/responses", json={**body, **fields})
        assert answer.status_code == 200, answer.text
    twice = [references[0], references[0]]
    check_error(server.http.post("/v1/responses", json={**body, "input": twice}), 400)


NO_JSON = [
    b"[" * 10**5,
    b"[" * 10**5 + b"]" * 10**5,
    b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    b'{"model": "preset:toy", "prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    b'{"model": "preset:toy", "prompt": "x", "logit_bias": '
    + b'{"a":' * 10**5
    + b"1"
    + b"}" * 10**5
    + b"}",
    b'{"model": "preset:toy", "prompt": "x", "user": ' + b"9" * 10**6 + b"}",
    b'{"model": "preset:toy", "prompt": "\\ud800"}',
    b'{"model": "preset:toy", "prompt": "\xff\xfe"}',
    b"\x00" * 1000,
    b"",
    b"null",
]


@pytest.mark.parametrize("number", range(len(NO_JSON)))
def test_json_that_is_none(server: Server, watch: Watch, number: int) -> None:
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        check_error(post_raw(server, NO_JSON[number], path))


@pytest.mark.parametrize("announced", [True, False])
def test_fifty_megabytes(server: Server, watch: Watch, announced: bool) -> None:
    """An announced large body is refused unread; a chunked one is refused at the limit, and the rest is discarded."""
    before = psutil.Process(server.process.pid).memory_info().rss
    with connect(server) as connection:
        length = (
            {"content_length": str(50 * MIB)} if announced else {"transfer_encoding": "chunked"}
        )
        connection.sendall(head(content_type="application/json", **length) + b"\r\n")
        sent = 0
        with contextlib.suppress(OSError):  # the server did not read the rest
            while sent < 50 * MIB:
                connection.sendall(
                    b" " * MIB if announced else b"100000\r\n" + b" " * MIB + b"\r\n"
                )
                sent += MIB
        status, body = 413, b""
        with contextlib.suppress(
            OSError, ValueError
        ):  # the reset arrived before the answer, since bytes were still in transit
            status, body = read_answer(connection)
    assert status == 413 and (not body or json.loads(body)["error"]["code"])
    assert psutil.Process(server.process.pid).memory_info().rss - before < 100 * MIB


def test_two_hundred_megabytes_of_headers(server: Server, watch: Watch) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    sent = 0
    with connect(server) as connection:
        try:
            connection.sendall(head() + b"x-long: ")
            while sent < 200 * MIB:
                connection.sendall(b"x" * MIB)
                sent += MIB
        except OSError:
            pass
    assert sent < 32 * MIB, "the server read on"
    assert psutil.Process(server.process.pid).memory_info().rss - before < 50 * MIB


def test_very_many_headers(server: Server, watch: Watch) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(
                head() + b"".join(b"x-%d: y\r\n" % i for i in range(50_000)) + b"\r\n"
            )
            status, _ = read_answer(connection)
        except OSError:
            status = 431
    assert 400 <= status < 500


NO_HTTP = [
    b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00" * 50,
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\nhost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\nhost: localhost\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
]


@pytest.mark.parametrize("number", range(len(NO_HTTP)))
def test_what_is_no_http(server: Server, watch: Watch, number: int) -> None:
    """Check for an answer with a 4xx status or a closed connection, soon."""
    with connect(server) as connection:
        connection.sendall(NO_HTTP[number])
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(65536)
        except ConnectionResetError:
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]


def deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


GRAMMARS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"regex": "(" * 5000 + "a" + ")" * 5000},
    lambda: {"regex": "(a{1,1000}){1,1000}"},
    lambda: {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"},
    lambda: {"regex": "(x+x+)+y" * 500},
    lambda: {"regex": "[" * 100},
    lambda: {"regex": "a" * 10**6},
    lambda: {"choice": ["x" * 1000] * 10**4},
    lambda: {"choice": []},
    lambda: {"grammar": "start: " + "(" * 10**4},
    lambda: {"grammar": "start: start start | start"},
    lambda: {"grammar": "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(1000))},
    lambda: {"json": deep_schema(200)},
    lambda: {"json": {"$ref": "#"}},
    lambda: {"json": {"$ref": "http://127.0.0.1:1/schema"}},
    lambda: {"json": {"$ref": "file:///etc/passwd"}},
    lambda: {"json": {"enum": [f"value {i}" for i in range(10**5)]}},
    lambda: {
        "json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(20_000)},
        }
    },
    lambda: {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    lambda: {"json": {"type": "string", "minLength": 10**9}},
    lambda: {"json": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}},
    lambda: {
        "json": {"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b+$"} for i in range(3000)]}
    },
    lambda: {"json": {"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(1000)]}},
    lambda: {"json": "{" * 10**5},
    lambda: {"json": 7},
]


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_grammar_bombs(server: Server, watch: Watch, number: int) -> None:
    """Each grammar is refused or served within the limits. The watched stream shows that no other call waits."""
    memory = psutil.Process(server.engine().pid).memory_info().rss
    start = time.monotonic()
    response = server.complete("x", structured_outputs=GRAMMARS[number](), max_tokens=8)
    seconds = time.monotonic() - start
    if response.status_code != 200:
        error = check_error(response, 400)
        assert error["param"] is None or error["param"].startswith("structured_outputs"), error
    assert seconds < 15, "the limit for compiling is 5 s"
    assert psutil.Process(server.engine().pid).memory_info().rss - memory < 300 * MIB


def test_grammar_bombs_stall_no_other_call(server: Server, watch: Watch) -> None:
    """The watched stream never waits for long while large grammars are compiled one after another."""

    def fire() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for grammar in GRAMMARS:
                body = {
                    "model": MODEL,
                    "prompt": "x",
                    "max_tokens": 2,
                    "structured_outputs": grammar(),
                }
                client.post("/v1/completions", json=body)

    firing = threading.Thread(target=fire)
    firing.start()
    firing.join(120)
    assert not firing.is_alive() and watch.longest_wait < 2, (
        f"the stream waited for {watch.longest_wait:.1f} s"
    )
