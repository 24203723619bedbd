"""The routes of Anthropic's messages API."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.openai.generation import Generation
from orca_jax.openai.messages.answer import MessagesRenderer
from orca_jax.openai.messages.conversion import count_tokens, fills_context, prepare
from orca_jax.openai.messages.errors import MESSAGES, REQUEST_ID, VERSION_HEADER
from orca_jax.openai.model import Service
from orca_jax.openai.schema import messages_parser
from orca_jax.openai.schema.messages import MessagesRequest
from orca_jax.openai.schema.tolerant import Ignored
from orca_jax.serve.handlers import EventStream, answer_whole, headers_of, read_request, report_ignored
from orca_jax.serve.models import json_response

_HEADERS = ("anthropic-beta", VERSION_HEADER)  # of all clients of Anthropic; without effect


def messages_routes(service: Service) -> list[Route]:
    """Build the routes. Their paths take any query string."""
    return [
        Route(MESSAGES, partial(create_message, service), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", partial(count, service), methods=["POST"]),
    ]


async def create_message(service: Service, request: Request) -> Response:
    """Answer a call. Raises ApiError."""
    call, ignored = await _read(service, request)
    state = request.scope["state"]
    job = await prepare(service, call, state["request_id"], state["caller"])
    headers = {REQUEST_ID: state["request_id"], **headers_of(service, job, ignored)}
    generation = Generation(service, job)
    fills = fills_context(service, call, job)
    renderer = MessagesRenderer(job, generation.usage, state["request_id"], fills_context=fills)
    if call.stream:
        return EventStream(generation, renderer, None, headers)
    return await answer_whole(generation, renderer, request, headers)


async def count(service: Service, request: Request) -> Response:
    """Answer with the number of tokens of a prompt. Raises ApiError."""
    call, ignored = await _read(service, request)
    tokens, left_out = await count_tokens(service, call)
    named = report_ignored(service, Ignored((*ignored.known, *left_out), ignored.unknown))
    return json_response(tokens, headers={REQUEST_ID: request.scope["state"]["request_id"], **named})


async def _read(service: Service, request: Request) -> tuple[MessagesRequest, Ignored]:
    call, ignored = await read_request(request, messages_parser, service)
    service.check_model(call.model)
    sent = [name for name in _HEADERS if name in request.headers]
    return call, Ignored((*ignored.known, *sent), ignored.unknown)
