"""The ASGI application: routes, and errors in OpenAI's shape for everything else."""

import uuid

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_jax.serve.api_error import ApiError
from orca_jax.serve.completions import create_completion
from orca_jax.serve.schema import ModelCard, ModelList
from orca_jax.serve.service import Service


class RequestId:
    """Pure ASGI, as Starlette's own base class would hide disconnects: every answer carries an `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = (b"x-request-id", f"req_{uuid.uuid4().hex}".encode())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], name]
            await send(message)

        await self._app(scope, receive, send_named)


def create_app(service: Service) -> ASGIApp:
    """The application over one engine."""

    async def health(request: Request) -> Response:
        client = service.client
        state = "loading" if client.state == "ready" and not service.is_ready else client.state
        body = {"status": state, "running": client.running, "waiting": client.waiting}
        return _json(body, 200 if service.is_ready else 503)

    async def models(request: Request) -> Response:
        cards = [ModelCard(name, service.started, service.max_model_len) for name in service.names]
        return _json(ModelList(cards))

    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_crash,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body in many clients
    return RequestId(app)  # around Starlette's own middleware, so that its 500 carries the header too


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such route", 405: f"{request.method} is not allowed here"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = words.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # hung up while sending the body; nobody reads this


async def _on_crash(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the log has its traceback and the client has not.
    return ApiError(500, "an internal error occurred", code="internal_error").response()
