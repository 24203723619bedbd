"""Every field of every table against values that mean harm: refused by name, or honoured, and nobody else notices."""

import json
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import inspect

from orca_jax.serve.openai.schema import (
    PARSERS,
    chat_parser,
    completion_parser,
    components,
    detokenize_parser,
    messages_parser,
    responses_parser,
    tokenize_parser,
)
from tests.covering import slow
from tests.openai.json_schema import fits
from tests.openai.responses.played import checked_response, events_of
from tests.openai.shapes import check_response
from tests.openai.test_bad_input import check_error
from tests.serve.running import MODEL, Server

VALUES = (
    *(
        "NaN",
        "Infinity",
        "1e999",
        "1e308",
        "-1",
        "0",
        "1",
        "0.5",
        "2147483648",
        "9223372036854775807",
    ),
    *(
        "9223372036854775808",
        "-9223372036854775809",
        '""',
        '"x"',
        "null",
        "true",
        "false",
        '"\\ud800"',
    ),
    *("16.0", "9007199254740993.0"),
    *("[]", "[null]", '[""]', "[-1]", "[257]", '["x"]', "[" * 50 + "]" * 50),
    *("{}", '{"a": 1}', '{"5": 1}', '{"257": 1}', '{"5": 101}', '{"5": "x"}'),
)
PLAIN = ("null", '"x"')
ROUTES = {
    "/v1/completions": (completion_parser, {"model": MODEL, "prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (
        chat_parser,
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "/v1/responses": (responses_parser, {"model": MODEL, "input": "x", "max_output_tokens": 2}),
    "/v1/messages": (
        messages_parser,
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "/tokenize": (tokenize_parser, {"model": MODEL, "prompt": "x"}),
    "/detokenize": (detokenize_parser, {"model": MODEL, "tokens": [65]}),
}
# A field that is right by itself may contradict another one, which the error then names.
CONTRADICTED = {
    "max_completion_tokens": "max_tokens",
    "messages": "prompt",
    "stream": "stream_options",
}


# The other fields are those of chats, and are read by the same code.
OF_MESSAGES = (
    *(
        "model",
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "tools",
        "tool_choice",
        "thinking",
        "stream",
    ),
    *("output_config", "output_format", "container", "mcp_servers", "speed"),
)


def names(path: str) -> tuple[str, ...]:
    parser, _ = ROUTES[path]
    return (
        OF_MESSAGES if path == "/v1/messages" else (*parser.kind.__struct_fields__, *parser.unused)
    )


def body_with(path: str, name: str, value: str) -> bytes:
    fields = {key: json.dumps(one) for key, one in ROUTES[path][1].items()} | {name: value}
    return (
        "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}"
    ).encode()


def loads(text: str) -> Any:
    """The value, or this function where it is no JSON."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError:
        return loads
    return loads if "\\ud800" in text else value


def send(http: httpx.Client, path: str, name: str, value: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return http.post(path, content=body_with(path, name, value), headers=headers)


def check(
    answer: httpx.Response, document: dict[str, Any], path: str, name: str, value: str
) -> bool:
    """Hold one answer to the document; returns whether the value was taken."""
    where = f"{name} = {value} of {path}: {answer.status_code} {answer.text[:300]}"
    sent = answer.request.read()
    check_response("POST", path, sent, answer.status_code, dict(answer.headers), answer.content)
    if answer.status_code == 200:
        parsed = loads(value)
        assert parsed is not loads, where
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert fits(schema, json.loads(sent), document), (
            f"taken, though the document does not allow it: {where}"
        )
        if path == "/v1/responses":
            is_stream = answer.text.startswith("event: ")
            assert events_of(answer.text) if is_stream else checked_response(answer.json()), where
        return True
    if path == "/v1/messages":  # its errors have no param: the message names the field
        error = answer.json()["error"]
        assert loads(value) is loads or name in error["message"], where
        return False
    error = check_error(answer, 404 if name == "model" and answer.status_code == 404 else 400)
    if loads(value) is not loads:
        assert error["param"] is not None and error["param"].startswith(
            (name, CONTRADICTED.get(name, name))
        ), where
    return False


def values_of(index: int, every: int) -> list[str]:
    """The plainest values for a field, and each `every`-th one of all."""
    return [*PLAIN, *VALUES[index % every :: every]]


@pytest.mark.parametrize("every", [len(VALUES), slow(1)])
@pytest.mark.parametrize("path", list(ROUTES))
def test_every_field(idle_server: Server, path: str, every: int) -> None:
    """Meanwhile a long stream is the same, byte for byte, as when it is alone."""
    fields = {"max_tokens": 500, "ignore_eos": True, "seed": 3}

    def text_of_a_stream() -> list[Any]:
        with idle_server.stream("the long one", **fields) as events:
            return [piece for event in events for piece in event["choices"]]

    def whole(pieces: list[Any]) -> tuple[str, Any]:
        return "".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"]

    together: list[Any] = []
    long_one = threading.Thread(target=lambda: together.extend(text_of_a_stream()))
    document = idle_server.http.get("/openapi.json").json()
    taken: set[str] = set()
    long_one.start()
    with httpx.Client(base_url=idle_server.url, timeout=60) as http:
        for index, name in enumerate(names(path)):
            for value in values_of(index, every):
                if check(send(http, path, name, value), document, path, name, value):
                    taken.add(name)
    long_one.join()
    assert whole(together) == whole(text_of_a_stream())
    assert {"model", *ROUTES[path][1]} - taken <= {"model", "messages", "tokens", "prompt"}
    assert set(ROUTES[path][0].unused) & set(names(path)) <= taken, "null is always taken"


def test_meanings_belong_to_fields() -> None:
    """A field that was renamed or removed would leave its text behind."""
    texts = tomllib.loads(
        Path(components.__file__).with_name("fields.toml").read_text(encoding="utf-8")
    )
    kinds = [parser.kind for parser in PARSERS.values()]
    schemas = components.described(kinds)
    bases = {
        base.__name__: base
        for kind in kinds
        for base in kind.__mro__
        if issubclass(base, msgspec.Struct)
    }
    for name, fields in texts.items():
        known = bases[name].__struct_fields__ if name in bases else schemas[name]["properties"]
        assert set(fields) <= set(known), name


def test_the_document_and_the_tables_have_the_same_fields(server: Server) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for parser in PARSERS.values():
        schema = schemas[parser.kind.__name__]
        assert set(schema["properties"]) == {*parser.kind.__struct_fields__, *parser.unused}
        assert schema["additionalProperties"] == {"type": "null"}


WITHOUT_A_BOUND = {"allowed_token_ids", "instructions"}
"""Lists that only the number of all values in a body bounds."""


def lists(
    kind: inspect.Type, name: str, known: set[type]
) -> Iterator[tuple[str, inspect.ListType]]:
    """The types of lists within a type, each with the name of its field."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from lists(inner, name, known)
        case inspect.UnionType(types=types):
            for one in types:
                yield from lists(one, name, known)
        case inspect.ListType(item_type=item):
            yield name, kind
            yield from lists(item, name, known)
        case inspect.StructType(cls=cls, fields=fields) if cls not in known:
            known.add(cls)
            for field in fields:
                yield from lists(field.type, field.name, known)


def test_every_list_of_a_body_has_a_bound() -> None:
    known = set[type]()
    kinds = [inspect.type_info(parser.kind) for parser in PARSERS.values()]
    found = [each for kind in kinds for each in lists(kind, "", known)]
    assert len(found) > 50
    assert {name for name, kind in found if kind.max_length is None} == WITHOUT_A_BOUND
