"""`GET /openapi.json`: the API as a document, made of the same tables that check requests."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.serve.access import read_keys
from orca_jax.serve.api_error import ErrorEnvelope
from orca_jax.serve.models import json_response
from orca_jax.serve.schema import PARSERS
from orca_jax.serve.schema.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    EngineHealth,
    Generated,
    Live,
    Load,
    ModelCard,
    ModelList,
    Version,
)
from orca_jax.serve.schema.neutral import Neutral
from orca_jax.serve.schema.tokens import Detokenized, Tokenized
from orca_jax.serve.service import Service

Document = dict[str, Any]

_REF = "#/components/schemas/{name}"
_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    *(ErrorEnvelope, Completion, ChatCompletion, ChatChunk, ModelCard, ModelList, Version, Tokenized, Detokenized),
    *(EngineHealth, Generated, Live, Load),
)
_ERRORS: Mapping[int, str] = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No key, or not one of the server's.",
    404: "No such model.",
    408: "The call took longer than it may.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full, where the server says so by 429.",
    500: "The generation failed.",
    503: "The model is loading, the queue is full, or the engine has gone.",
}
_OF_BODIES = (400, 404, 413, 415)
_OF_ENGINE = (408, 429, 500)


def openapi_route(service: Service) -> Route:
    """The route. The document names the models that this server serves."""
    document = openapi_document(service.names, has_keys=bool(read_keys(service.config)))

    async def openapi(request: Request) -> Response:
        return json_response(document)

    return Route("/openapi.json", openapi, methods=["GET"])


def openapi_document(names: Sequence[str], has_keys: bool) -> Document:
    """OpenAPI 3.1.

    Args:
        names: of the model.
        has_keys: whether callers have to bring a key.
    """
    schemas = request_schemas(names)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "orca-jax",
            "version": metadata.version("orca-jax"),
            "description": "OpenAI's completions and chat completions. `null` means that a field is not given.",
        },
        "paths": _paths(has_keys, names[0]),
        "components": {"schemas": {**schemas, **answers}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def request_schemas(names: Sequence[str]) -> Document:
    """Components for all requests, with the fields that are taken and not used."""
    _, schemas = msgspec.json.schema_components([parser.kind for parser in PARSERS], ref_template=_REF)
    for parser in PARSERS:
        _complete(schemas[parser.kind.__name__], parser.neutral, names)
    return dict(schemas)


def _complete(schema: Document, neutral: Mapping[str, Neutral], names: Sequence[str]) -> None:
    schema["additionalProperties"] = False
    properties = schema["properties"]
    required = "model" in schema.get("required", ())
    properties["model"] = {
        "enum": [*names] if required else [*names, None],
        "description": properties["model"].get("description", ""),
    }
    properties.update({name: known.schema() for name, known in neutral.items()})


def _paths(has_keys: bool, model: str) -> Document:
    event_stream = {"text/event-stream": {"schema": {"type": "string"}}}

    def post(summary: str, request: str, answer: str, engine: bool, **extra: Any) -> Document:
        errors = (*_OF_BODIES, *(_OF_ENGINE if engine else ()), 503)
        operation = _operation(summary, answer, errors, has_keys)
        operation["requestBody"] = {"required": True, "content": _json_content(request)}
        operation["responses"]["200"]["content"].update(extra)
        return {"post": operation}

    def get(summary: str, answer: str, errors: Sequence[int] = ()) -> Document:
        return {"get": _operation(summary, answer, errors, has_keys)}

    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": model,
    }
    return {
        "/v1/completions": post("Continue texts", "CompletionRequest", "Completion", True, **event_stream),
        "/v1/chat/completions": post("Answer conversations", "ChatRequest", "ChatCompletion", True, **event_stream),
        "/tokenize": post("Ids of a text or a conversation", "TokenizeRequest", "Tokenized", False),
        "/detokenize": post("The text of ids", "DetokenizeRequest", "Detokenized", False),
        "/v1/models": get("What is served", "ModelList", (503,)),
        "/v1/models/{model}": {**get("One of them", "ModelCard", (404, 503)), "parameters": [name]},
        "/version": get("The server's version", "Version"),
        "/live": _open(get("Whether the process answers", "Live")),
        "/ready": _probe("Whether requests are served now", "EngineHealth", has_keys),
        "/health": _open(_probe("The same", "EngineHealth", has_keys)),
        "/health_generate": _probe("Whether a token comes out", "Generated", has_keys),
        "/load": get("Calls that are open", "Load"),
        "/metrics": {"get": _metrics(has_keys)},
        "/openapi.json": {"get": _this(has_keys)},
    }


def _operation(summary: str, answer: str, errors: Sequence[int], has_keys: bool) -> Document:
    codes = sorted({*errors, *([401] if has_keys else [])})
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": _json_content(answer)},
            **{str(code): {"description": _ERRORS[code], "content": _json_content("ErrorEnvelope")} for code in codes},
        },
    }


def _probe(summary: str, answer: str, has_keys: bool) -> Document:
    operation = _operation(summary, answer, (), has_keys)
    operation["responses"]["503"] = {"description": "No, and why.", "content": _json_content(answer)}
    return {"get": operation}


def _open(path: Document) -> Document:
    """A path that needs no key."""
    for operation in path.values():
        operation["security"] = []
        operation["responses"].pop("401", None)
    return path


def _metrics(has_keys: bool) -> Document:
    operation = _operation("What Prometheus reads", "Load", (), has_keys)
    operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return operation


def _this(has_keys: bool) -> Document:
    operation = _operation("This document", "Load", (), has_keys)
    operation["responses"]["200"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    return operation


def _json_content(name: str) -> Document:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
