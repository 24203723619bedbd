"""The routes of Anthropic's messages API."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orca_jax.serve.handlers import create_message, read_message_call, report_ignored
from orca_jax.serve.models import json_response
from orca_jax.serve.openai.messages.conversion import count_tokens
from orca_jax.serve.openai.messages.errors import MESSAGES, REQUEST_ID
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema.tolerant import Ignored


def messages_routes(service: Service) -> list[Route]:
    """Build the routes. Their paths take any query string."""
    return [
        Route(MESSAGES, partial(create_message, service), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", partial(count, service), methods=["POST"]),
    ]


async def count(service: Service, request: Request) -> Response:
    """Answer with the number of tokens of a prompt. Raises ApiError."""
    call, ignored, num_bytes = await read_message_call(service, request)
    tokens, left_out = await service.work.prepare(num_bytes, partial(count_tokens, service, call))
    named = report_ignored(service, Ignored((*ignored.known, *left_out), ignored.unknown))
    return json_response(
        tokens, headers={REQUEST_ID: request.scope["state"]["request_id"], **named}
    )
