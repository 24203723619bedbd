"""The body of a call: of the right type, within its limit."""

import asyncio

import msgspec
from starlette.requests import Request

from orca_jax.serve.api_error import ApiError
from orca_jax.serve.schema.parse import Parser

LARGE_BODY = 256 * 1024  # bytes: what takes longer to read does so in a thread


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
