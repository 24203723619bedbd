"""`/openapi.json` is complete and correct, and its examples work."""

from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.serve.openapi import openapi_document
from tests.openai.json_schema import fits
from tests.serve.played import Stage, on_stage, saying
from tests.serve.running import MODEL, VOCAB_SIZE, Server

OPEN = {"/live", "/health"}


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    answer = server.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        yield from (
            (path, method, item[method]) for method in ("get", "post", "delete") if method in item
        )


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from references(part)


@pytest.mark.conforms("GET /openapi.json")
def test_every_route_is_documented(document: dict[str, Any]) -> None:
    assert on_stage(saying("x"), routes_of) == set(document["paths"])


async def routes_of(stage: Stage) -> set[str]:
    """The paths of the application, spelt as in OpenAPI documents."""
    app: Any = stage.app
    while not hasattr(app, "routes"):
        app = getattr(app, "_app", None) or app.app
    return {
        route.path.replace("{name:path}", "{model}")
        for route in app.routes
        if route.include_in_schema
    }


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known and len(known) > 20


@pytest.mark.conforms("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize")
@pytest.mark.conforms("POST /detokenize", "detokenize.model")
def test_examples_are_valid_and_answered(server: Server, document: dict[str, Any]) -> None:
    posts = [
        (path, operation) for path, method, operation in operations(document) if method == "post"
    ]
    assert len(posts) == 20
    for path, operation in posts:
        content = operation["requestBody"]["content"]["application/json"]
        example = content["examples"]["short"]["value"]
        assert fits(content["schema"], example, document)
        answer = server.http.post(path, json=example)
        assert answer.status_code == 200, answer.text
        shape = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert fits(shape, answer.json(), document), path


@pytest.mark.conforms(
    "GET /v1/models", "GET /v1/models/{model}", "GET /version", "GET /openapi.json"
)
@pytest.mark.conforms("GET /metrics", "GET /load", "GET /live", "GET /ready", "GET /health")
@pytest.mark.conforms("GET /health_generate")
def test_reading_routes_answer_what_they_say(server: Server, document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        if method == "get":
            answer = server.http.get(path.replace("{model}", MODEL))
            kind = answer.headers["content-type"].partition(";")[0]
            content = operation["responses"][str(answer.status_code)]["content"]
            assert kind in content, path
            if kind == "application/json":
                assert fits(content[kind]["schema"], answer.json(), document), path


def test_limits_are_the_models(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == [MODEL, None]
    assert (
        schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == VOCAB_SIZE - 1
    )
    body = {"model": MODEL, "prompt": "x", "min_tokens": 8193}
    assert not fits(schemas["CompletionRequest"], body, document)
    assert "x-limit" not in str(document)


def test_keys() -> None:
    closed = openapi_document(["m"], {}, has_keys=True)
    assert [name for one in closed["security"] for name in one] == ["key", "x-api-key", "api-key"]
    assert closed["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, _, operation in operations(closed):
        assert ("401" in operation["responses"]) == (path not in OPEN), path
        assert operation.get("security") == ([] if path in OPEN else None), path
    free = openapi_document(["m"], {}, has_keys=False)
    assert "security" not in free and all(
        "401" not in one["responses"] for _, _, one in operations(free)
    )
