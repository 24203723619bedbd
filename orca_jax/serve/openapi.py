"""`GET /openapi.json`: the API as a document, built from the tables used to validate requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.serve.access import KEY_HEADERS
from orca_jax.serve.openai.errors import ErrorEnvelope
from orca_jax.serve.openai.messages.answer import MessageAnswer
from orca_jax.serve.openai.messages.conversion import TokenCount
from orca_jax.serve.openai.messages.errors import MESSAGES, MessagesError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.responses.items import (
    DeletedResponse,
    InputTokens,
    ModelResponse,
    ResponseItemList,
)
from orca_jax.serve.openai.schema.answers import (
    CacheExplanations,
    ChatChunk,
    ChatCompletion,
    Completion,
    EngineHealth,
    Generated,
    Live,
    ModelCard,
    ModelList,
    ServerLoad,
    Version,
)
from orca_jax.serve.openai.schema.components import REF, request_schemas
from orca_jax.serve.openai.schema.decisions.answers import (
    DecisionList,
    NamedDecisions,
    SystemAnswers,
    SystemOneError,
)
from orca_jax.serve.openai.schema.decisions.neighbours import (
    ClassList,
    ItemScores,
    RerankList,
    ScoreList,
)
from orca_jax.serve.openai.schema.embeddings import EmbeddingList
from orca_jax.serve.openai.schema.tokens import Detokenized, Rendered, Tokenized

Document = dict[str, Any]

_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    *(
        ErrorEnvelope,
        Completion,
        ChatCompletion,
        ChatChunk,
        ModelCard,
        ModelList,
        Version,
        Tokenized,
        Detokenized,
    ),
    EmbeddingList,
    *(DecisionList, NamedDecisions, SystemAnswers, SystemOneError),
    *(RerankList, ClassList, ScoreList, ItemScores),
    Rendered,
    *(MessageAnswer, TokenCount, MessagesError),
    *(ModelResponse, DeletedResponse, ResponseItemList, InputTokens),
    *(EngineHealth, Generated, Live, ServerLoad, CacheExplanations),
)
_ERRORS: Mapping[int, str] = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The server is called by a name that is not one of its --allowed-hosts.",
    404: "The model does not exist, or the stored response.",
    408: "The request took longer than its timeout allows.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    422: "A field is wrong or not supported; `detail` has its place.",
    429: "The key has as many open calls as --max-calls-per-key allows, or the queue is full (--overload-status 429).",
    500: "The generation failed.",
    503: "The model is loading, the queue is full, or the engine has ended.",
}
_EVENTS = (
    " With `stream`, events with a chunk as `data`: a Completion, or a ChatChunk for chats. The last event is `[DONE]` "
    "or an ErrorEnvelope. Responses have OpenAI's events, the last one with the whole response."
)
_MESSAGE_EVENTS = (
    " With `stream`, the events of Anthropic's format. The last event is `message_stop` or `error`."
)
_OF_NEIGHBOURS = ("RerankList", "ClassList", "ScoreList", "ItemScores")
_OF_READS = ("EmbeddingList", "DecisionList", "SystemAnswers", *_OF_NEIGHBOURS)
_OF_BODIES = (400, 404, 413, 415, 429)
_OF_ENGINE = (408, 500)


def openapi_route(service: Service, *, has_keys: bool) -> Route:
    """Build the route. The document names the served models, and their limits once they are known."""
    documents: dict[bool, bytes] = {}  # are the limits known? -> JSON

    def document(is_known: bool) -> bytes:
        limits = {}
        if is_known:
            limits = {
                "vocab_size": service.model.vocab_size - 1,
                "context": service.model.context - 1,
            }
        document = openapi_document(
            service.names,
            limits,
            has_keys,
            takes_priority=not is_known or "priority" in service.client.reads,
            takes_unknown=service.config.unknown_fields == "ignore",
        )
        return msgspec.json.encode(document)

    async def openapi(request: Request) -> Response:
        is_known = service.is_ready
        # in a thread: it takes a tenth of a second, and streams must not wait
        if is_known not in documents:
            documents[is_known] = await asyncio.to_thread(document, is_known)
        return Response(documents[is_known], media_type="application/json")

    return Route("/openapi.json", openapi, methods=["GET"])


def openapi_document(
    names: Sequence[str],
    limits: Mapping[str, int],
    has_keys: bool,
    *,
    takes_priority: bool = True,
    takes_unknown: bool = False,
) -> Document:
    """Build the document, in OpenAPI 3.1.

    Args:
        names: the model's names.
        limits: see `request_schemas`.
        has_keys: True if calls need an API key.
        takes_priority: see `request_schemas`.
        takes_unknown: see `request_schemas`.
    """
    schemas = request_schemas(
        names, limits, takes_priority=takes_priority, takes_unknown=takes_unknown
    )
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=REF)
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "orca-jax",
            "version": metadata.version("orca-jax"),
            "description": "OpenAI's completions and chat completions. A field that is `null` counts as not given.",
        },
        "paths": _paths(has_keys, names[0]),
        "components": {"schemas": {**schemas, **answers}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            **{name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADERS},
        }
        document["security"] = [{"key": []}, *({name: []} for name in KEY_HEADERS)]
    return document


def _paths(has_keys: bool, model: str) -> Document:
    # no schema: validators disagree about schemas of single events
    streams: Document = {"text/event-stream": {}}

    def post(summary: str, request: str, answer: str, engine: bool, **example: Any) -> Document:
        errors = (*_OF_BODIES, *(_OF_ENGINE if engine or answer in _OF_READS else ()), 503)
        error = "ErrorEnvelope"
        events = _EVENTS
        if request == "MessagesRequest":
            error = "MessagesError"
            events = _MESSAGE_EVENTS
        if request == "SystemRequest":
            error = "SystemOneError"
            errors = (*errors, 422)
        operation = _operation(summary, answer, errors, has_keys, error)
        content = _json_content(request)
        content["application/json"]["examples"] = {"short": {"value": {"model": model, **example}}}
        operation["requestBody"] = {"required": True, "content": content}
        if engine:
            operation["responses"]["200"]["content"].update(streams)
            operation["responses"]["200"]["description"] += events
        return {"post": operation}

    def get(summary: str, answer: str, errors: Sequence[int] = ()) -> Document:
        return {"get": _operation(summary, answer, errors, has_keys)}

    hello = [{"role": "user", "content": "Hello!"}]
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": model,
    }
    paths = {
        "/v1/completions": post(
            "Continue texts", "CompletionRequest", "Completion", True, prompt="Once", max_tokens=4
        ),
        "/v1/chat/completions": post(
            "Answer conversations",
            "ChatRequest",
            "ChatCompletion",
            True,
            messages=hello,
            max_tokens=4,
        ),
        **_agents(post, hello, has_keys),
        **_prompts(post, hello),
        "/v1/models": get("List the served names and adapters", "ModelList", (503,)),
        "/v1/models/{model}": {
            **get("Describe one model", "ModelCard", (404, 503)),
            "parameters": [name],
        },
        "/v1/cache_explanations": get(
            "Why tokens of the last prompts were computed again", "CacheExplanations", (404,)
        ),
        "/version": get("The server's version", "Version"),
        "/live": _open(get("Liveness: the process answers", "Live")),
        "/ready": _probe(
            "Readiness: 200 when requests are served, else 503", "EngineHealth", has_keys
        ),
        "/health": _open(_probe("The same as /ready, without a key", "EngineHealth", has_keys)),
        "/health_generate": _probe("Generate one token", "Generated", has_keys),
        "/load": get("Number of open calls", "Load"),
        "/metrics": {"get": _plain("Metrics for Prometheus", "text/plain", "string", has_keys)},
        "/openapi.json": {"get": _plain("This document", "application/json", "object", has_keys)},
    }
    _add_links(paths)
    return paths


def _prompts(post: Callable[..., Document], hello: list[Document]) -> Document:
    """The paths that generate nothing."""
    found = {
        "/v1/completions/render": post(
            "Token ids of the prompts of a completion",
            "CompletionRequest",
            "Rendered",
            False,
            prompt="Once",
        ),
        "/v1/chat/completions/render": post(
            "Token ids of the prompt of a chat completion",
            "ChatRequest",
            "Rendered",
            False,
            messages=hello,
        ),
        "/v1/embeddings": post(
            "Embed texts", "EmbeddingRequest", "EmbeddingList", False, input="Once"
        ),
        "/v1/decisions": post(
            "Answer typed questions by probabilities, in OpenAI's form or in SGLang's",
            "DecisionRequest",
            "DecisionList",
            False,
            input="The parcel came broken.",
            questions=[{"type": "predicate", "instructions": "Is it about damage?"}],
        ),
        "/v1/systemone": post(
            "Answer typed questions by probabilities, in TypeSafe's form",
            "SystemRequest",
            "SystemAnswers",
            False,
            state="The parcel came broken.",
            questions={"damage": {"type": "noul", "instructions": "Is it about damage?"}},
        ),
        **_neighbours(post),
        "/apply-template": post(
            "Text of the prompt, for llama.cpp", "ChatRequest", "Detokenized", False, messages=hello
        ),
        "/tokenize": post(
            "Token ids of a text or conversation",
            "TokenizeRequest",
            "Tokenized",
            False,
            prompt="Once",
        ),
        "/detokenize": post(
            "Text of token ids", "DetokenizeRequest", "Detokenized", False, tokens=[1, 2]
        ),
    }
    decided = found["/v1/decisions"]["post"]["responses"]["200"]["content"]["application/json"]
    decided["schema"] = {"anyOf": [decided["schema"], {"$ref": REF.format(name="NamedDecisions")}]}
    answer = found["/v1/completions/render"]["post"]["responses"]["200"]
    of_prompts = answer["content"]["application/json"]
    of_prompts["schema"] = {"type": "array", "items": of_prompts["schema"]}
    return found


def _neighbours(post: Callable[..., Document]) -> Document:
    """The paths that decisions answer too."""
    documents = {"query": "sea", "documents": ["The sea was calm.", "A dog ran."]}
    scored = {"query": "Once", "items": [" upon", " more"], "label_token_ids": [1, 2]}
    summary = "Relevance of documents to a query"
    score = "Probabilities of given tokens after a query and each item"
    return {
        **{
            path: post(summary, "RerankRequest", "RerankList", False, **documents)
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        },
        "/classify": post(
            "One of the given labels for each text",
            "ClassifyRequest",
            "ClassList",
            False,
            input="The sea was calm.",
            labels=["sea", "land"],
        ),
        "/v1/score": post(f"{score}, for SGLang", "ScoreRequest", "ScoreList", False, **scored),
        "/generative_scoring": post(
            f"{score}, for vLLM", "ScoreRequest", "ItemScores", False, **scored
        ),
    }


def _add_links(paths: Document) -> None:
    """Say which answers name a path of another operation."""
    first_model = {"parameters": {"model": "$response.body#/data/0/id"}}
    of_response = {"parameters": {"response_id": "$response.body#/id"}}
    tokens = {"requestBody": {"tokens": "$response.body#/tokens"}}
    one = "/v1/responses/{response_id}"
    _link(paths["/v1/models"]["get"], paths, "get", "/v1/models/{model}", first_model)
    _link(paths["/v1/responses"]["post"], paths, "get", one, of_response)
    _link(paths["/v1/responses"]["post"], paths, "delete", one, of_response)
    _link(paths[one]["get"], paths, "get", f"{one}/input_items", of_response)
    _link(paths["/tokenize"]["post"], paths, "post", "/detokenize", tokens)


def _agents(post: Callable[..., Document], hello: list[Document], has_keys: bool) -> Document:
    """The paths that agents call by default."""
    return {
        MESSAGES: post(
            "Answer conversations in Anthropic's format",
            *("MessagesRequest", "MessageAnswer", True),
            messages=hello,
            max_tokens=4,
        ),
        f"{MESSAGES}/count_tokens": post(
            "Number of tokens of the prompt of a message",
            "MessagesRequest",
            "TokenCount",
            False,
            messages=hello,
        ),
        "/v1/responses": post(
            "Answer conversations, and keep the answers",
            "ResponsesRequest",
            "ModelResponse",
            True,
            input="Hello!",
        ),
        "/v1/responses/input_tokens": post(
            "Count the tokens of an input", "ResponsesRequest", "InputTokens", False, input="Hello!"
        ),
        **_stored_responses(has_keys),
    }


def _stored_responses(has_keys: bool) -> Document:
    """The paths of responses that the server keeps."""
    name = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": "resp_1",
    }
    path = "/v1/responses/{response_id}"
    one = {
        "get": _operation("Read a stored response", "ModelResponse", (400, 404), has_keys),
        "delete": _operation("Remove a stored response", "DeletedResponse", (404,), has_keys),
    }
    items = _operation(
        "Read the input of a stored response, in pages", "ResponseItemList", (400, 404), has_keys
    )
    return {
        path: {**one, "parameters": [name]},
        f"{path}/input_items": {"get": items, "parameters": [name]},
    }


def _link(start: Document, paths: Document, method: str, target: str, values: Document) -> None:
    """Link two operations: the answer of the first holds `values` for a call of the second."""
    name = f"{method}{target}".replace("/", "_").replace("{", "").replace("}", "")
    paths[target][method]["operationId"] = name
    start["responses"]["200"].setdefault("links", {})[method] = {"operationId": name, **values}


def _operation(
    summary: str, answer: str, errors: Sequence[int], has_keys: bool, failure: str = "ErrorEnvelope"
) -> Document:
    codes = sorted({*errors, 401 if has_keys else 403})
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": _json_content(answer)},
            **{
                str(code): {"description": _ERRORS[code], "content": _json_content(failure)}
                for code in codes
            },
        },
    }


def _probe(summary: str, answer: str, has_keys: bool) -> Document:
    operation = _operation(summary, answer, (), has_keys)
    operation["responses"]["503"] = {
        "description": "Not ready; the body says why.",
        "content": _json_content(answer),
    }
    return {"get": operation}


def _open(path: Document) -> Document:
    """Mark a path as open without a key."""
    for operation in path.values():
        operation["security"] = []
        operation["responses"].pop("401", None)
    return path


def _plain(summary: str, media_type: str, kind: str, has_keys: bool) -> Document:
    """An operation with a plain answer, without its own component."""
    operation = _operation(summary, "Load", (), has_keys)
    operation["responses"]["200"]["content"] = {media_type: {"schema": {"type": kind}}}
    return operation


def _json_content(name: str) -> Document:
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}
