"""Bad input gets a clear answer in OpenAI's shape, and nobody else notices."""

import asyncio
import json
import re
import socket
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from orca_jax.serve.handlers import read_json_body
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema import PARSERS, chat_parser, parse, responses_parser
from orca_jax.serve.openai.schema.limits import MAX_STRINGS
from tests.serve.running import MODEL, Server

JSON = {"content-type": "application/json"}
NUMERIC = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "presence_penalty",
    "logprobs",
    "min_p",
)
BAD_NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    '""',
    '"5"',
    "[]",
    "{}",
    "true",
    "1e308",
    "-9223372036854775809",
)

# field, value as JSON, the parameter that the error names
BAD_FIELDS: list[tuple[str, str, str | None]] = [
    *((name, value, None) for name in NUMERIC for value in BAD_NUMBERS),
    ("max_tokens", "0", "max_tokens"),
    ("max_tokens", "-2", "max_tokens"),
    ("max_tokens", "9223372036854775808", "max_tokens"),
    ("max_tokens", "1.5", "max_tokens"),
    ("temperature", "-0.1", "temperature"),
    ("temperature", "2.1", "temperature"),
    ("top_p", "0", "top_p"),
    ("top_p", "1.01", "top_p"),
    ("top_k", "-2", "top_k"),
    ("top_k", "4294967296", "top_k"),
    ("seed", "9223372036854775808", "seed"),
    ("n", "0", "n"),
    ("n", "129", "n"),
    ("n", "1000000000", "n"),
    ("best_of", "0", "best_of"),
    ("echo", "0", "echo"),
    ("logprobs", "21", "logprobs"),
    ("prompt_logprobs", "-1", "prompt_logprobs"),
    ("suffix", '"x"', "suffix"),
    ("priority", "1", "priority"),
    ("logit_bias", '{"50256": -100}', "logit_bias"),
    ("logit_bias", '{"65": -101}', "logit_bias"),
    ("logit_bias", '{"A": 1}', "logit_bias"),
    ("allowed_token_ids", "[]", "allowed_token_ids"),
    ("allowed_token_ids", "[257]", "allowed_token_ids"),
    ("bad_words", '[""]', "bad_words[0]"),
    ("bad_words", '[" "]', "bad_words"),
    ("frequency_penalty", "2.5", "frequency_penalty"),
    ("repetition_penalty", "0", "repetition_penalty"),
    ("min_tokens", "17", "min_tokens"),
    ("truncate_prompt_tokens", "0", "truncate_prompt_tokens"),
    ("request_id", '"a b"', "request_id"),
    ("timeout", "0", "timeout"),
    ("queue_timeout", "-1", "queue_timeout"),
    ("response_format", '{"type": "yaml"}', "response_format.type"),
    ("response_format", '{"type": "json_schema"}', "response_format.json_schema"),
    ("structured_outputs", "{}", "structured_outputs"),
    ("structured_outputs", '{"regex": "("}', "structured_outputs"),
    ("structured_outputs", '{"xml": "x"}', "structured_outputs.xml"),
    ("temprature", "0", "temprature"),
    ("stop", '""', "stop"),
    ("stop", '["a", ""]', "stop[1]"),
    ("stop", "[" + '"a",' * 32 + '"a"]', "stop"),
    ("stop", "[" + f'"{"a" * 1000}",' * 4 + f'"{"a" * 97}"]', "stop"),
    ("stop", "5", "stop"),
    ("stop", "[1]", "stop[0]"),
    ("stop_token_ids", "[257]", "stop_token_ids"),
    ("stop_token_ids", "[-1]", "stop_token_ids[0]"),
    ("stop_token_ids", "[true]", "stop_token_ids[0]"),
    ("ignore_eos", "1", "ignore_eos"),
    ("stream", '"yes"', "stream"),
    ("stream_options", "{}", "stream_options"),
    ("user", "5", "user"),
    ("model", '"other"', "model"),
    ("prompt", '""', "prompt"),
    ("prompt", "[]", "prompt"),
    ("prompt", "[[]]", "prompt"),
    ("prompt", '["a", ""]', "prompt"),
    ("prompt", "null", "prompt"),
    ("prompt", "5", "prompt"),
    ("prompt", "[257]", "prompt"),
    ("prompt", "[1, -1]", "prompt[1]"),
    ("prompt", "[99999999999999999999]", "prompt[0]"),
    ("prompt", "[1, true]", "prompt[1]"),
    ("prompt", "[1.5]", "prompt[0]"),
    ("prompt", '[1, "a"]', "prompt"),
    ("prompt", '["a", [1]]', "prompt"),
    ("prompt", '[["a"]]', "prompt[0][0]"),
    ("prompt", "[" + "1," * 8191 + "1]", "prompt"),
    ("prompt", "[" + '"a",' * 1024 + '"a"]', "prompt"),
]

# body, status, the parameter that the error names
BAD_BODIES: list[tuple[bytes, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"null", 400, None),
    (b"[]", 400, None),
    (b'"text"', 400, None),
    (b"{}", 400, "prompt"),
    (b'{"model": "preset:toy"}', 400, "prompt"),
    (b'{"model": "preset:toy", "prompt": "x",}', 400, None),
    (b'{"model": "preset:toy", "prompt": "\xff"}', 400, "prompt"),
    (b'{"model": "preset:toy", "prompt": "\\ud800 x"}', 400, "prompt"),
    (b"[" * 100_000, 400, None),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    (b'{"extra": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", 400, None),
    (
        b'{"stream": true, "stream_options": {"other": 1}, "model": "preset:toy", "prompt": "x"}',
        400,
        "stream_options.other",
    ),
    (b'{"model": "preset:toy", "prompt": "x", "prompt": "y"}', 400, "prompt"),
    (b'{"model": "preset:toy", "prompt": "x", "pro\\u006dpt": "y"}', 400, "prompt"),
    (b'{"model": "preset:toy", "prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
    (b'{"model": "preset:toy", "prompt": "x", "n": 3, "best_of": 2}', 400, "best_of"),
    (b'{"model": "preset:toy", "prompt": "x", "best_of": 2, "stream": true}', 400, "best_of"),
    (b'{"model": "preset:toy", "prompt": ' + b'["a"' + b',"a"' * 999 + b'], "n": 2}', 400, "n"),
    (
        b'{"model": "preset:toy", "prompt": "x", "stream": true, "prompt_logprobs": 1}',
        400,
        "prompt_logprobs",
    ),
    (b" " * (33 * 2**20), 413, None),
]


def check_error(response: httpx.Response, status: int | range = range(400, 500)) -> dict[str, Any]:
    """OpenAI's error shape, all of it."""
    statuses = status if isinstance(status, range) else (status,)
    assert response.status_code in statuses, (response.status_code, response.text[:300])
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) < 1000
    assert isinstance(error["type"], str) and isinstance(error["code"], str | None)
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ('{"5": 1, "A": 1}', 'the key "A" must be'),
        ('{"A": 1, "5": 200, "-1": 1, "B": 1}', 'the keys "A", "-1", "B" must be token ids'),
        ('{"5": 1, "65": -101}', 'the value of "65": expected'),
        ('{"5": 1, "65": "x"}', 'the value of "65": expected'),
        ('{"5": 1, "300": 1}', "contains id 300,"),
        ('{"400": 1, "5": 1, "300": 1}', "contains ids 400, 300,"),
    ],
)
def test_a_bad_entry_of_a_map_is_named(server: Server, biases: str, words: str) -> None:
    text = f'{{"prompt": "x", "logit_bias": {biases}}}'
    error = check_error(server.http.post("/v1/completions", content=text, headers=JSON))
    assert error["param"] == "logit_bias" and words in error["message"]


@pytest.mark.parametrize(
    ("name", "value", "param"), BAD_FIELDS, ids=lambda v: v[:40] if isinstance(v, str) else None
)
def test_bad_field(server: Server, name: str, value: str, param: str | None) -> None:
    fields = {"model": f'"{MODEL}"', "prompt": '"x"', name: value}
    body = "{" + ", ".join(f'"{field}": {text}' for field, text in fields.items()) + "}"
    error = check_error(server.http.post("/v1/completions", content=body, headers=JSON))
    is_json = value not in ("NaN", "Infinity", "-Infinity")
    assert error["param"] == (param or (name if is_json else None))
    if is_json:
        assert name in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"), BAD_BODIES, ids=lambda v: None if isinstance(v, bytes) else str(v)
)
def test_bad_body(server: Server, body: bytes, status: int, param: str | None) -> None:
    assert (
        check_error(server.http.post("/v1/completions", content=body, headers=JSON), status)[
            "param"
        ]
        == param
    )


def test_other_routes_methods_and_types(server: Server) -> None:
    assert check_error(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    for name in ("other", "preset:toy//", "%2e%2e/models"):
        assert server.http.get(f"/v1/models/{name}").status_code == 404
    wrong = server.http.get("/v1/completions")
    assert (
        check_error(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"
    )
    body = b'{"model": "preset:toy", "prompt": "x"}'
    assert (
        check_error(server.http.post("/v1/completions", content=body), 415)["code"]
        == "unsupported_media_type"
    )
    assert check_error(server.complete(model="other"), 404)["code"] == "model_not_found"


def test_body_without_announced_length(server: Server) -> None:
    pieces = (b" " * 2**20 for _ in range(40))
    with pytest.raises(httpx.TransportError):  # answered and closed while the client still sends
        check_error(server.http.post("/v1/completions", content=pieces, headers=JSON), 413)
        raise httpx.WriteError("the client had sent everything")


@pytest.mark.parametrize("has_length", [True, False])
def test_a_large_body_is_refused_before_it_has_arrived(has_length: bool) -> None:
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    headers = [
        (b"content-type", b"application/json"),
        *([(b"content-length", b"1001")] if has_length else []),
    ]
    with pytest.raises(ApiError, match="exceeds 1000 bytes") as caught:
        asyncio.run(read_json_body(Request({"type": "http", "headers": headers}, receive), 1000))
    assert (caught.value.status, num_read) == (413, 0 if has_length else 11)


def crowd(entry: bytes, count: int) -> bytes:
    return (
        b'{"input": "x", "metadata": {'
        + b", ".join([entry % number for number in range(count)])
        + b"}}"
    )


@pytest.mark.parametrize("entry", [b'"%d": "a"', b'"%d\\\\": "\\\\"'], ids=["plain", "escaped"])
def test_a_crowded_body_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, entry: bytes
) -> None:
    """Two million short strings in 31 MB would need 376 MB, and hold the interpreter's lock for seconds."""
    body = crowd(entry, MAX_STRINGS + 1)
    json.loads(body)
    monkeypatch.setattr(parse, "_fields", None)  # the decoder
    for parser in PARSERS.values():
        with pytest.raises(ApiError, match=f"or {MAX_STRINGS} strings") as caught:
            parser.parse(body)
        assert caught.value.status == 413


def test_a_large_text_is_no_crowd() -> None:
    """Quotes within a text are escaped, so that a document of JSON is one string."""
    text = json.dumps({str(number): "a" for number in range(MAX_STRINGS)})
    call, _ = responses_parser.parse(json.dumps({"input": text}).encode())
    assert call.input == text and text.count('"') > 3 * MAX_STRINGS


@pytest.mark.conforms("responses.metadata")
@pytest.mark.parametrize(
    "metadata", [dict.fromkeys("abcdefghijklmnopq", ""), {"a" * 65: ""}, {"a": "b" * 513}]
)
def test_metadata_is_as_small_as_that_of_openai(metadata: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        responses_parser.parse(json.dumps({"input": "x", "metadata": metadata}).encode())
    assert (caught.value.status, caught.value.param) == (400, "metadata")
    small = {**dict.fromkeys("abcdefghijklmno", ""), "a" * 64: "b" * 512}
    assert (
        responses_parser.parse(json.dumps({"input": "x", "metadata": small}).encode())[0].metadata
        == small
    )


def test_a_body_that_breaks_off_as_http(server: Server) -> None:
    """The HTTP layer answers, and nobody else does; that no traceback is logged is checked when the server ends."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for rest in (
        b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\nzz\r\n",
        b"content-length: 50\r\n\r\nabc",
    ):
        with socket.create_connection(
            (server.http.base_url.host, server.http.base_url.port or 80), timeout=60
        ) as raw:
            raw.sendall(head + rest)
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(60)
            answer = b"".join(iter(lambda: raw.recv(4096), b""))
        assert len(re.findall(rb"HTTP/1.1 \d", answer)) <= 1 and b" 200 " not in answer
    assert server.health().status_code == 200


def test_giant_header_is_refused(server: Server) -> None:
    with socket.create_connection(
        (server.http.base_url.host, server.http.base_url.port or 80), timeout=60
    ) as raw:
        raw.settimeout(60)
        sent = 0
        try:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            while sent < 2**24:
                sent += raw.send(b"a" * 2**16)
        except OSError:
            pass
    assert sent < 2**24, "it read 16 MiB of headers"
    assert server.health().status_code == 200


def test_others_do_not_notice(idle_server: Server) -> None:
    """One long stream is the same, byte for byte, whether or not every bad request above is sent meanwhile."""
    fields = {"max_tokens": 600, "ignore_eos": True, "seed": 3}

    def text_of_a_stream() -> list[Any]:
        with idle_server.stream("the long one", **fields) as events:
            return [piece for event in events for piece in event["choices"]]

    alone = text_of_a_stream()
    together: list[Any] = []
    long_one = threading.Thread(target=lambda: together.extend(text_of_a_stream()))
    long_one.start()
    with httpx.Client(base_url=idle_server.url, timeout=60) as http:
        while long_one.is_alive():
            for name, value, _ in BAD_FIELDS[::3]:
                text = f'{{"model": "{MODEL}", "prompt": "x", "{name}": {value}}}'
                check_error(http.post("/v1/completions", content=text, headers=JSON))
            for body, status, _ in BAD_BODIES[:-1]:
                check_error(http.post("/v1/completions", content=body, headers=JSON), status)
    long_one.join()

    def whole(pieces: list[Any]) -> tuple[str, Any]:
        return "".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"]

    assert whole(alone) == whole(together)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            rb'{"model": "m", "messages": [{"role": "user", "content": "cut \ud83d"}]}',
            "messages[0].content",
        ),
        (
            rb'{"model": "m", "messages": [{"role": "user", "content": "\ude00"}]}',
            "messages[0].content",
        ),
        (rb'{"model": "m", "messages": [], "user": "\ud83d\ud83d\ude00"}', "user"),
        (rb'{"model": "m", "messages": [], "\ud83d": 1}', "?"),
    ],
)
def test_half_of_a_character_is_named(body: bytes, param: str) -> None:
    with pytest.raises(ApiError, match="half of a character") as caught:
        chat_parser.parse(body)
    assert (caught.value.status, caught.value.param) == (400, param)


FAR = {"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}
FORMATS_OF_NO_TEXT: list[object] = [{}, [], 1]


@pytest.mark.parametrize(
    "schema", [FAR, *({"type": "string", "format": one} for one in FORMATS_OF_NO_TEXT)]
)
@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "tools"])
def test_a_wrong_schema_is_a_400(server: Server, schema: dict[str, Any], field: str) -> None:
    values: dict[str, object] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "structured_outputs": {"json": schema},
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"a": schema}}},
            }
        ],
    }
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], field: values[field]}
    if field == "tools":
        body["tool_choice"] = "required"
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
