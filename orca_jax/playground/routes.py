"""The routes of the playground: the page is open, and its data need a key as all other routes do."""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.openai.model import Service
from orca_jax.playground.burst import MAX_BURST_BYTES, run_burst
from orca_jax.playground.iterations import watch_iterations
from orca_jax.playground.page import page_routes

JsonBodyReader = Callable[[Request, int], Awaitable[bytes]]
"""Reads the JSON body of a call, of at most so many bytes; raises ApiError."""


def playground_routes(service: Service, read_body: JsonBodyReader) -> list[Route]:
    """Build the routes of the page and of its data."""

    async def settings(request: Request) -> Response:
        return Response(msgspec.json.encode(_settings(service)), media_type="application/json")

    async def burst(request: Request) -> Response:
        return await run_burst(service, request, await read_body(request, MAX_BURST_BYTES))

    data = [
        Route("/playground/settings", settings, methods=["GET"], include_in_schema=False),
        Route("/playground/iterations", partial(watch_iterations, service), methods=["GET"], include_in_schema=False),
        Route("/playground/burst", burst, methods=["POST"], include_in_schema=False),
    ]
    return [*page_routes(), *data]


def _settings(service: Service) -> dict[str, object]:
    """The settings of the server that the page shows or obeys. Raises ApiError while the model is loading."""
    model, config = service.model, service.config
    return {
        "model": service.names[0],
        "context": model.context,
        "has_chat": model.template is not None,
        "defaults": model.defaults,
        "max_logprobs": config.max_logprobs,
        "scheduler": config.engine.scheduler,
        "max_num_seqs": config.engine.max_num_seqs,
    }
