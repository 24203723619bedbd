"""The handlers of completions and chats: a body in, an answer or a stream out."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.openai import chat, completions
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Generation
from orca_jax.openai.model import Service
from orca_jax.openai.schema import chat_parser, completion_parser
from orca_jax.openai.schema.parse import Parser
from orca_jax.serve.access import caller_of
from orca_jax.serve.events import respond, stream_rules

LARGE_BODY = 256 * 1024  # bytes: what takes longer to read does so in a thread


async def create_completion(service: Service, request: Request) -> Response:
    """The handler. Raises ApiError."""
    call = await read_request(request, completion_parser, service.config.max_body_bytes)
    service.check_model(call.model)
    job = await completions.prepare(service, call, request.scope["state"]["request_id"], caller_of(request.scope))
    shape = completions.CompletionRenderer(service.model.tokenizer, job, call)
    return await respond(Generation(service, job), shape, request, stream_rules(call))


async def create_chat_completion(service: Service, request: Request) -> Response:
    """The handler. Raises ApiError."""
    call = await read_request(request, chat_parser, service.config.max_body_bytes)
    service.check_model(call.model)
    job = await chat.prepare(service, call, request.scope["state"]["request_id"], caller_of(request.scope))
    shape = chat.ChatRenderer(service.model.tokenizer, job, call)
    return await respond(Generation(service, job), shape, request, stream_rules(call))


async def read_request[T: msgspec.Struct](request: Request, parser: Parser[T], max_bytes: int) -> T:
    """The call that a body describes. Raises ApiError."""
    body = await read_json_body(request, max_bytes)
    return parser.parse(body) if len(body) < LARGE_BODY else await asyncio.to_thread(parser.parse, body)


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError."""
    # Browsers send other types across origins without asking first, so a page could drive a local server.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the body exceeds {max_bytes} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
