"""The routes of the playground: the page is open, and its data need a key as all other routes do."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.checks import is_class_name
from orca_jax.config import EngineConfig
from orca_jax.openai.model import Service
from orca_jax.playground.burst import MAX_BURST_BYTES, run_burst
from orca_jax.playground.examples import examples
from orca_jax.playground.iterations import watch_iterations
from orca_jax.playground.page import page_routes
from orca_jax.playground.saved import MAX_PAGE_BYTES, saved_page
from orca_jax.processor import cpu_name

JsonBodyReader = Callable[[Request, int], Awaitable[bytes]]
"""Reads the JSON body of a call, of at most so many bytes; raises ApiError."""


def playground_routes(service: Service, read_body: JsonBodyReader) -> list[Route]:
    """Build the routes of the page and of its data."""

    async def settings(request: Request) -> Response:
        return Response(msgspec.json.encode(_settings(service)), media_type="application/json")

    async def burst(request: Request) -> Response:
        return await run_burst(service, request, await read_body(request, MAX_BURST_BYTES))

    async def page(request: Request) -> Response:
        return await asyncio.to_thread(saved_page, service, await read_body(request, MAX_PAGE_BYTES))

    data = [
        Route("/playground/settings", settings, methods=["GET"], include_in_schema=False),
        Route("/playground/iterations", partial(watch_iterations, service), methods=["GET"], include_in_schema=False),
        Route("/playground/burst", burst, methods=["POST"], include_in_schema=False),
        Route("/playground/page", page, methods=["POST"], include_in_schema=False),
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
        "scheduler": _scheduler(config.engine),
        "max_num_seqs": config.engine.max_num_seqs,
        "machine": _machine(service),
        "examples": examples(service),
    }


def _scheduler(config: EngineConfig) -> str:
    """The scheduler, and an order from outside; of classes without the files that they are in."""
    names = [config.scheduler, *([config.scheduling_policy] if is_class_name(config.scheduling_policy) else [])]
    return ", ".join([name.rpartition(":")[2] for name in names])


def _machine(service: Service) -> str:
    """The devices of the engine, or the processor; empty without a device."""
    summary = service.client.summary
    if summary is None or not summary.device:
        return ""
    return cpu_name() if summary.device == "cpu" else f"{summary.num_devices} x {summary.device}"
