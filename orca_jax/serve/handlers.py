"""The handler of completions and chats: reads a body and answers whole or as a stream."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from orca_jax.openai.answer import whole_answer
from orca_jax.openai.endpoints import Endpoint
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import ClientGone, Generation
from orca_jax.openai.model import Service
from orca_jax.openai.schema.parse import BodyParser
from orca_jax.serve.events import EventStream, Silence

LARGE_BODY = 256 * 1024  # bytes; a thread parses longer bodies


async def complete(endpoint: Endpoint, service: Service, request: Request) -> Response:
    """Answer a call to one of the endpoints that generate. Raises ApiError."""
    call = await read_request(request, endpoint.parser, service.config.max_body_bytes)
    service.check_model(call.model)
    state = request.scope["state"]
    job = await endpoint.prepare(service, call, state["request_id"], state["caller"])
    generation, renderer = Generation(service, job), endpoint.renderer(service.model.tokenizer, job, call)
    if call.stream:
        return EventStream(generation, renderer, call.stream_options)
    try:
        answer = await whole_answer(generation, renderer, request.receive)
    except ClientGone:
        return Silence()
    return Response(answer, media_type="application/json")


async def read_request[T: msgspec.Struct](request: Request, parser: BodyParser[T], max_bytes: int) -> T:
    """Read and parse the body of a call. Raises ApiError."""
    body = await read_json_body(request, max_bytes)
    return parser.parse(body) if len(body) < LARGE_BODY else await asyncio.to_thread(parser.parse, body)


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body of a JSON call. Raises ApiError."""
    # Browsers send other types across origins without a preflight, so a web page could drive a local server.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        message = f"the content-encoding {coding!r} is not supported; send the body without compression"
        raise ApiError(415, message, code="unsupported_content_encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body exceeds {max_bytes} bytes (--max-body-bytes)", code="request_too_large")
