"""The routes of the playground: the page is open, and its data need a key as all other routes do."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from orca_jax.helpers.bundled import DEMO
from orca_jax.helpers.processor import cpu_name
from orca_jax.link.feed import FeedFull, Watcher
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.playground.burst import MAX_BURST_BYTES, run_burst
from orca_jax.serve.playground.page import page_routes
from orca_jax.serve.playground.saved import MAX_PAGE_BYTES, saved_page
from orca_jax.values.checks import is_class_name
from orca_jax.values.config import EngineConfig
from orca_jax.values.platforms import platform_named

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_OF_THE_DEMO = (
    "Tom has 3 apples and buys 4. How many does he have?",
    "What is iteration-level scheduling?",
    "Juan had 5 shirts and gave 2 away. How many? Reply with JSON.",
)
_CHATS = (
    "How many days are in a week?",
    "Write a short list of three fruits.",
    "What is the opposite of hot?",
)
_PROMPTS = ("Once upon a time", "The capital of France is", "One, two, three, four,")

JsonBodyReader = Callable[[Request, int], Awaitable[bytes]]
"""Reads the JSON body of a call, of at most so many bytes; raises ApiError."""


def playground_routes(service: Service, read_body: JsonBodyReader) -> list[Route]:
    """Build the routes of the page and of its data."""

    async def settings(request: Request) -> Response:
        return Response(msgspec.json.encode(_settings(service)), media_type="application/json")

    async def burst(request: Request) -> Response:
        return await run_burst(service, request, await read_body(request, MAX_BURST_BYTES))

    async def page(request: Request) -> Response:
        body = await read_body(request, MAX_PAGE_BYTES)
        return await service.work.page(partial(saved_page, service, body))

    data = [
        Route("/playground/settings", settings, methods=["GET"], include_in_schema=False),
        Route(
            "/playground/iterations",
            partial(watch_iterations, service),
            methods=["GET"],
            include_in_schema=False,
        ),
        Route("/playground/burst", burst, methods=["POST"], include_in_schema=False),
        Route("/playground/page", page, methods=["POST"], include_in_schema=False),
    ]
    return [*page_routes(), *data]


def _settings(service: Service) -> dict[str, object]:
    """The settings of the server that the page shows or obeys. Raises ApiError while the model is loading."""
    model = service.model
    config = service.config
    return {
        "model": service.names[0],
        "context": model.context,
        "has_chat": model.template is not None,
        "defaults": model.defaults,
        "max_logprobs": config.max_logprobs,
        "scheduler": _scheduler(config.engine),
        "max_num_seqs": config.engine.max_num_seqs,
        "machine": _machine(service),
        "examples": _examples(service),
    }


def _scheduler(config: EngineConfig) -> str:
    """The scheduler, and an order from outside; of classes without the files that they are in."""
    names = [
        config.scheduler,
        *([config.scheduling_policy] if is_class_name(config.scheduling_policy) else []),
    ]
    return ", ".join([name.rpartition(":")[2] for name in names])


def _machine(service: Service) -> str:
    """The devices of the engine, or the processor; empty without a device."""
    summary = service.client.summary
    if summary is None or not summary.device:
        return ""
    return (
        cpu_name()
        if platform_named(summary.device).is_host
        else f"{summary.num_devices} x {summary.device}"
    )


def _examples(service: Service) -> dict[str, tuple[str, ...]]:
    """Return three questions and three beginnings of a text."""
    return {"chat": example_chats(service.config.engine.model), "prompt": _PROMPTS}


def example_chats(model: str) -> tuple[str, ...]:
    """Return three questions that a model answers."""
    return _OF_THE_DEMO if model == DEMO else _CHATS


async def watch_iterations(service: Service, request: Request) -> Response:
    """Answer with the iterations of the engine as server-sent events.

    Each event holds lines of JSON: `start`, `arrival`, `iteration` or `end`, as in a `LiveTimeline`. An event `dropped`
    has the number of lines that the engine sent faster than the client read them; a `start` follows. Requests are
    numbers.

    Raises:
        ApiError: too many clients watch.
    """
    if request.method == "HEAD":  # it has no body, so nothing may be watched for it
        return Response(headers=HEADERS, media_type="text/event-stream")
    try:
        watcher = service.client.feed.watch()
    except FeedFull:
        message = "too many pages watch the engine; close one of them"
        raise ApiError(503, message, code="too_many_watchers") from None
    return StreamingResponse(_events(watcher), headers=HEADERS, media_type="text/event-stream")


async def _events(watcher: Watcher) -> AsyncGenerator[bytes]:
    with watcher:
        yield KEEP_ALIVE  # the headers leave at once, also of an idle engine
        while (news := await watcher.receive(KEEP_ALIVE_SECONDS)) is not None:
            dropped = b""
            if news.num_dropped:
                dropped = b"event: dropped\ndata: %d\n\n" % news.num_dropped
            yield dropped + (_event(news.lines) or KEEP_ALIVE)


def _event(lines: bytes) -> bytes:
    if not lines:
        return b""
    return b"".join([b"data: " + line + b"\n" for line in lines.splitlines()]) + b"\n"
