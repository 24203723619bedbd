"""The handlers of calls that generate: read a body, and answer whole, as server-sent events, or not at all."""

import asyncio
import contextlib
import importlib
import re
from collections.abc import AsyncGenerator, Awaitable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.serve.openai import embeddings
from orca_jax.serve.openai.answer import Renderer, StreamRenderer, whole_answer
from orca_jax.serve.openai.decisions.systemone import encode_error as encode_system_error
from orca_jax.serve.openai.decisions.systemone import is_systemone
from orca_jax.serve.openai.endpoints import Endpoint
from orca_jax.serve.openai.errors import TOO_LONG, ApiError
from orca_jax.serve.openai.generation import ClientGone, Generation, Job
from orca_jax.serve.openai.messages import conversion as messages
from orca_jax.serve.openai.messages.answer import MessagesRenderer
from orca_jax.serve.openai.messages.errors import (
    REQUEST_ID,
    VERSION_HEADER,
    encode_error,
    is_anthropic,
)
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.responses.api import ResponseCall
from orca_jax.serve.openai.responses.renderer import ResponseRenderer
from orca_jax.serve.openai.responses.store import ResponseStore, is_long
from orca_jax.serve.openai.schema import embedding_parser, messages_parser, responses_parser
from orca_jax.serve.openai.schema.messages import MessagesRequest
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.sampling import CompletionFields, StreamOptions
from orca_jax.serve.openai.schema.tolerant import Ignored
from orca_jax.serve.openai.single import SingleAnswer
from orca_jax.serve.openai.work import SMALL_BODY
from orca_jax.text.work_threads import STORED

try:  # Python 3.14, or backports.zstd
    zstd: Any = importlib.import_module("compression.zstd")
except ImportError:
    zstd = None

WEIGHT_VERSION = "x-orca-weight-version"  # header of an answer, if the weights can be replaced


def version_header(generation: Generation) -> dict[str, str]:
    """The header with the version of the weights, on a server that can replace them."""
    version = generation.weight_version
    return {} if version is None or not generation.has_versions else {WEIGHT_VERSION: str(version)}


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as an HTTP response, in the format of the API that the call belongs to."""
    body = error.encode()
    headers = error.headers
    if is_anthropic(scope):
        request_id = scope.get("state", {}).get("request_id", "")
        body = encode_error(error, request_id)
        headers = {REQUEST_ID: request_id, **headers}
    status = error.status
    if is_systemone(scope):
        status, body = encode_system_error(error)
    return Response(body, status, headers, media_type="application/json")


class Silence(Response):
    """No answer: the client has gone, and the connection may be closed already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


class EventStream(Response):
    """Sends the events of a call as they arrive. It reads `receive` itself, so no middleware may read it before.

    The headers are sent with the first message of the engine: until then a refusal is an answer with its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        renderer: StreamRenderer,
        options: StreamOptions | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._has_started = False
        self._has_running_usage = options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ApiError if nothing has been sent yet; later errors are events."""
        with contextlib.suppress(ClientGone):
            try:
                await self._send_events(receive, send)
            except ApiError as error:
                if not self._has_started:
                    raise
                event = self._renderer.failure(error)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, receive: Receive, send: Send) -> None:
        """Send the headers with the first event, and all events. Raises ApiError."""
        async with contextlib.aclosing(self._events(receive)) as events:
            async for event in events:
                if not self._has_started:
                    self._has_started = True
                    self.headers.update(version_header(self._generation))
                    start = {"status": self.status_code, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **start})
                await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _events(self, receive: Receive) -> AsyncGenerator[bytes]:
        """Yield the events; those that arrived together are joined."""
        generation = self._generation
        chunk = self._renderer.chunk
        silence = self._renderer.silence
        is_late = False
        async with contextlib.aclosing(generation.pieces(receive)) as batches:
            async for pieces in batches:
                if generation.weight_version is None:
                    # the headers leave before the version is known
                    is_late = generation.has_versions
                elif is_late:
                    is_late = False
                    yield b": %b: %d\n\n" % (WEIGHT_VERSION.encode(), generation.weight_version)
                if self._has_running_usage:
                    events = [chunk(piece, generation.running_usage(piece)) for piece in pieces]
                    yield b"".join(events) or silence()
                elif len(pieces) == 1:
                    yield chunk(pieces[0], None)
                else:
                    yield b"".join([chunk(piece, None) for piece in pieces]) or silence()
        yield self._renderer.end(generation.usage())


IGNORED_FIELDS = "x-orca-ignored-fields"  # header of an answer
# header of an answer: the limit, if that of the call exceeds the context
CUT_LIMIT = "x-orca-max-tokens"
OTHER_FIELD = "other"  # label of the metric for fields that only --unknown-fields accepts
MAX_NAMES = 32  # in the header
MAX_NAMED = 128  # characters of each
_OF_ANTHROPIC = ("anthropic-beta", VERSION_HEADER)  # of all its clients; without effect
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


async def complete(endpoint: Endpoint, service: Service, request: Request) -> Response:
    """Answer a call to one of the endpoints that generate. Raises ApiError."""
    call, ignored, job = await prepared_job(endpoint, service, request)
    headers = headers_of(service, job, ignored)
    renderer = endpoint.renderer(service.model.tokenizer, job, call)
    generation = Generation(service, job)
    if call.stream:
        return EventStream(generation, renderer, call.stream_options, headers)
    return await answer_whole(generation, renderer, request, headers)


async def prepared_job(
    endpoint: Endpoint, service: Service, request: Request
) -> tuple[Any, Ignored, Job]:
    """Read a call, and prepare it for the engine. Returns also its ignored fields. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, endpoint.parser, service)
    service.check_model(call.model)
    if call.stream and service.config.enable_force_include_usage:
        call = with_usage(call)
    state = request.scope["state"]
    prepare = partial(endpoint.prepare, service, call, state["request_id"], state["caller"])
    return call, ignored, await service.work.prepare(num_bytes, prepare)


def with_usage[T: CompletionFields](call: T) -> T:
    """The call, with token counts at the end of its stream."""
    options = call.stream_options or StreamOptions()
    forced = msgspec.structs.replace(options, include_usage=True)
    return msgspec.structs.replace(call, stream_options=forced)


async def respond(service: Service, store: ResponseStore, request: Request) -> Response:
    """Answer a call for a response, whole or as a stream. Raises ApiError."""
    asked, ignored = await read_response_call(service, store, request)
    state = request.scope["state"]
    try:
        make = partial(asked.job, state["request_id"])
        job = await service.work.prepare(asked.num_bytes, make)
    except ApiError as error:
        if not asked.call.stream or error.code != TOO_LONG:
            raise
        return Response(asked.renderer().failure(error), media_type="text/event-stream")
    headers = headers_of(service, job, ignored)
    generation = Generation(service, job)
    renderer = asked.renderer(job, generation.usage)
    if asked.call.stream:
        return EventStream(generation, renderer, None, headers)
    return await _answered(_whole_response(generation, renderer, request), generation, headers)


async def _whole_response(
    generation: Generation, renderer: ResponseRenderer, request: Request
) -> bytes:
    """Run a call to its end and return the response as JSON. Raises ApiError and ClientGone."""
    async with contextlib.aclosing(generation.pieces(request.receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                renderer.chunk(piece, None)
    return renderer.answer(generation.usage())


async def read_response_call(
    service: Service, store: ResponseStore, request: Request
) -> tuple[ResponseCall, Ignored]:
    """Read a call for a response, with the stored part of its conversation. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, responses_parser, service)
    service.check_model(call.model)
    caller = request.scope["state"]["caller"]
    make = partial(ResponseCall, service, store, call, caller, num_bytes)
    if num_bytes < SMALL_BODY and not is_long(call):
        return make(), ignored
    return await service.work.run_work(STORED, make), ignored


async def create_message(service: Service, request: Request) -> Response:
    """Answer a call for a message, whole or as a stream. Raises ApiError."""
    call, ignored, num_bytes = await read_message_call(service, request)
    state = request.scope["state"]
    make = partial(messages.prepare, service, call, state["request_id"], state["caller"])
    job = await service.work.prepare(num_bytes, make)
    headers = {REQUEST_ID: state["request_id"], **headers_of(service, job, ignored)}
    generation = Generation(service, job)
    fills = messages.fills_context(service, call, job)
    renderer = MessagesRenderer(job, generation.usage, state["request_id"], fills_context=fills)
    if call.stream:
        return EventStream(generation, renderer, None, headers)
    return await answer_whole(generation, renderer, request, headers)


async def read_message_call(
    service: Service, request: Request
) -> tuple[MessagesRequest, Ignored, int]:
    """Read a call for a message. Returns also its ignored fields and headers, and its bytes. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, messages_parser, service)
    service.check_model(call.model)
    sent = [name for name in _OF_ANTHROPIC if name in request.headers]
    return call, Ignored((*ignored.known, *sent), ignored.unknown), num_bytes


async def answer_whole(
    generation: Generation, renderer: Renderer, request: Request, headers: Mapping[str, str]
) -> Response:
    """Run a call to its end, and answer with its JSON. Raises ApiError."""
    answer = whole_answer(generation, renderer, request.receive)
    return await _answered(answer, generation, headers)


async def _answered(
    answer: Awaitable[bytes], generation: Generation, headers: Mapping[str, str]
) -> Response:
    """The response with the JSON of an answer. Raises ApiError."""
    try:
        body = await answer
    except ClientGone:
        return Silence()
    return Response(
        body, headers={**headers, **version_header(generation)}, media_type="application/json"
    )


async def embed(service: Service, request: Request) -> Response:
    """Answer with the embeddings of the inputs of a call. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, embedding_parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    prepare = partial(embeddings.prepare, service, call, state["request_id"], state["caller"])
    job = await service.work.prepare(num_bytes, prepare)
    answer = embeddings.run(service, call, job, request.receive)
    return await answer_single(service, ignored, answer)


async def answer_single(
    service: Service, ignored: Ignored, answer: Awaitable[SingleAnswer]
) -> Response:
    """The response with an answer without a stream. Raises ApiError."""
    headers = report_ignored(service, ignored)
    try:
        body, version = await answer
    except ClientGone:
        return Silence()
    if service.config.admin_key_file is not None:
        headers = {**headers, WEIGHT_VERSION: str(version)}
    return Response(body, headers=headers, media_type="application/json")


async def read_request[T: msgspec.Struct](
    request: Request, parser: BodyParser[T], service: Service, *, ignores_unknown: bool = False
) -> tuple[T, Ignored, int]:
    """Read and parse the body of a call. Returns also its ignored fields, and its bytes. Raises ApiError."""
    body = await read_json_body(request, service.config.max_body_bytes)
    ignores_unknown = ignores_unknown or service.config.unknown_fields == "ignore"
    parse = partial(parser.parse, body, ignores_unknown=ignores_unknown)
    return *await service.work.read(len(body), parse), len(body)


def headers_of(service: Service, job: Job, ignored: Ignored) -> dict[str, str]:
    """The headers with ignored fields, ignored keywords of schemas, and a limit beyond the context."""
    headers = report_ignored(
        service, Ignored((*ignored.known, *job.ignored), (*ignored.unknown, *job.left_out))
    )
    if job.cut_limit is not None:
        headers[CUT_LIMIT] = str(job.cut_limit)
    return headers


def report_ignored(service: Service, ignored: Ignored) -> dict[str, str]:
    """Count the ignored fields of a call, and return the header that names them."""
    if not any(ignored):
        return {}
    service.observer.fields_ignored([*ignored.known, *([OTHER_FIELD] if ignored.unknown else [])])
    names = (*ignored.known, *ignored.unknown)
    shown = [_NOT_IN_NAMES.sub("_", name[:MAX_NAMED]) for name in names[:MAX_NAMES]]
    return {IGNORED_FIELDS: ", ".join(shown + ["..."] * (len(names) > MAX_NAMES))}


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body of a JSON call. Raises ApiError."""
    # Browsers send other types across origins without a preflight, so a web page could drive a local server.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "the content-type must be application/json", code="unsupported_media_type"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity") and not (coding == "zstd" and zstd is not None):
        message = (
            f"the content-encoding {coding!r} is not supported; send the body without compression"
        )
        raise ApiError(415, message, code="unsupported_content_encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    if coding == "zstd":
        return await asyncio.to_thread(_decompressed, bytes(body), max_bytes)
    return bytes(body)


def _decompressed(body: bytes, max_bytes: int) -> bytes:
    """The content of a compressed body, which is read no further than to its limit. Raises ApiError."""
    assert zstd is not None, "refused before"
    try:
        whole: bytes = zstd.ZstdDecompressor().decompress(body, max_bytes + 1)
    except zstd.ZstdError:
        raise ApiError(400, "the body is not compressed by zstd, as its header says") from None
    if len(whole) > max_bytes:
        raise _too_large(max_bytes)
    return whole


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body exceeds {max_bytes} bytes (--max-body-bytes)", code="request_too_large"
    )
