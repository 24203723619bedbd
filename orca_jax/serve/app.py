"""The ASGI application: routes, middleware, and error answers in the format of their API."""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from orca_jax.serve.access import (
    OPEN_PATHS,
    Access,
    CallLimit,
    read_keys,
    with_cors,
    with_host_check,
)
from orca_jax.serve.admin import ADMIN_CALLS, adapter_routes, admin_routes
from orca_jax.serve.agents.messages import messages_routes
from orca_jax.serve.agents.responses import response_routes
from orca_jax.serve.decisions import classify, decide, rerank, score, system_one
from orca_jax.serve.handlers import Silence, complete, embed, error_response, read_json_body
from orca_jax.serve.health import health_routes, metrics_route, root_route
from orca_jax.serve.models import model_routes
from orca_jax.serve.openai.decisions import neighbours, scoring, systemone, wires
from orca_jax.serve.openai.embeddings import EMBEDDINGS
from orca_jax.serve.openai.endpoints import ENDPOINTS
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openapi import openapi_route
from orca_jax.serve.playground.page import page_paths
from orca_jax.serve.playground.routes import playground_routes
from orca_jax.serve.request_context import RequestContext, WithoutLastSlash
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.serve.tokenize import apply_template, detokenize, render, tokenize
from orca_jax.server_config import MIB, ServerConfig


def create_app(service: Service, config: ServerConfig, observer: ServerObserver) -> ASGIApp:
    """Build the application over one engine. Raises ConfigError for unusable keys, folders or origins."""
    keys = read_keys(config)
    service.salts_keys = (
        len(keys) > 1 if config.cache_salt_per_key is None else config.cache_salt_per_key
    )
    answering, stored = response_routes(service, config.responses_store * MIB)
    app = Starlette(
        routes=[
            *health_routes(service, has_keys=bool(keys)),
            *(() if config.has_playground else (root_route(),)),
            *model_routes(service),
            metrics_route(observer),
            *admin_routes(service, config),
            openapi_route(service, has_keys=bool(keys)),
            *_limited([*_work_routes(service, config), *answering], config.max_calls_per_key),
            *stored,
            *adapter_routes(service),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_crash,
        },
    )
    app.router.redirect_slashes = False
    # Outside Starlette's own middleware, so that its 500 and the refusals of Access carry a request id, too.
    routed = WithoutLastSlash(app)
    opened = OPEN_PATHS | page_paths() if config.has_playground else OPEN_PATHS
    guarded = Access(routed, keys, opened, ADMIN_CALLS) if keys else routed
    return RequestContext(
        with_host_check(with_cors(guarded, config), config, has_keys=bool(keys)), observer
    )


def _work_routes(service: Service, config: ServerConfig) -> list[Route]:
    """The routes with work for the engine or the tokenizer, and the playground."""
    return [
        *(_post(path, partial(complete, end, service)) for path, end in ENDPOINTS.items()),
        *(
            _post(f"{path}/render", partial(render, end, service))
            for path, end in ENDPOINTS.items()
        ),
        *messages_routes(service),
        _post(EMBEDDINGS, partial(embed, service)),
        _post(wires.ENDPOINT, partial(decide, service)),
        _post(systemone.ENDPOINT, partial(system_one, service)),
        *(_post(path, partial(rerank, service)) for path in neighbours.RERANKS),
        _post(neighbours.CLASSIFY, partial(classify, service)),
        *(
            _post(path, partial(score, service, path))
            for path in (scoring.SCORE, scoring.GENERATIVE)
        ),
        _post("/apply-template", partial(apply_template, service)),
        _post("/tokenize", partial(tokenize, service)),
        _post("/detokenize", partial(detokenize, service)),
        *(playground_routes(service, read_json_body) if config.has_playground else ()),
    ]


def _limited(routes: list[Route], most: int | None) -> list[Route]:
    """The routes, with a common limit of the open POST calls of a key."""
    if most is None:
        return routes
    num_open: Counter[str | None] = Counter()
    for route in routes:
        if route.methods is not None and "POST" in route.methods:
            route.app = CallLimit(route.app, most, num_open)
    return routes


def _post(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, handler, methods=["POST"])


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: "there is no such route; see /openapi.json",
        405: f"{request.method} is not allowed on this route",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = words.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    refusal = ApiError(
        error.status_code, message, code=codes.get(error.status_code), headers=headers
    )
    return error_response(refusal, request.scope)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    # the client hung up while sending the body, or sent invalid HTTP and has its answer
    return Silence()


async def _on_crash(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer: the log gets the traceback, the client does not.
    return error_response(
        ApiError(500, "an internal error occurred", code="internal_error"), request.scope
    )
