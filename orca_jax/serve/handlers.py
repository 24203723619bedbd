"""The handler of completions and chats: reads a body and answers whole, as server-sent events, or not at all."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from types import MappingProxyType

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.openai import embeddings
from orca_jax.openai.answer import Renderer, StreamRenderer, whole_answer
from orca_jax.openai.endpoints import Endpoint
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import ClientGone, Generation, Job
from orca_jax.openai.messages.errors import REQUEST_ID, encode_error, is_anthropic
from orca_jax.openai.model import Service
from orca_jax.openai.schema import embedding_parser
from orca_jax.openai.schema.parse import BodyParser
from orca_jax.openai.schema.sampling import StreamOptions
from orca_jax.openai.schema.tolerant import Ignored

WEIGHT_VERSION = "x-orca-weight-version"  # header of an answer, if the weights can be replaced


def version_header(generation: Generation) -> dict[str, str]:
    """The header with the version of the weights, on a server that can replace them."""
    version = generation.weight_version
    return {} if version is None or not generation.has_versions else {WEIGHT_VERSION: str(version)}


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as an HTTP response, in the format of the API that the call belongs to."""
    body, headers = error.encode(), error.headers
    if is_anthropic(scope):
        request_id = scope.get("state", {}).get("request_id", "")
        body, headers = encode_error(error, request_id), {REQUEST_ID: request_id, **headers}
    return Response(body, error.status, headers, media_type="application/json")


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
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._has_running_usage = options is not None and bool(options.include_usage and options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ApiError if nothing has been sent yet; later errors are events."""
        has_started = False
        with contextlib.suppress(ClientGone):
            try:
                async with contextlib.aclosing(self._events(receive)) as events:
                    async for event in events:
                        if not has_started:
                            has_started = True
                            self.headers.update(version_header(self._generation))
                            start = {"status": self.status_code, "headers": self.raw_headers}
                            await send({"type": "http.response.start", **start})
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                if not has_started:
                    raise
                event = self._renderer.failure(error)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, receive: Receive) -> AsyncGenerator[bytes]:
        """Yield the events; those that arrived together are joined."""
        generation, chunk, silence = self._generation, self._renderer.chunk, self._renderer.silence
        is_late = False
        async with contextlib.aclosing(generation.pieces(receive)) as batches:
            async for pieces in batches:
                if generation.weight_version is None:
                    is_late = generation.has_versions  # the headers leave before the version is known
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


LARGE_BODY = 256 * 1024  # bytes; a thread parses longer bodies
IGNORED_FIELDS = "x-orca-ignored-fields"  # header of an answer
CUT_LIMIT = "x-orca-max-tokens"  # header of an answer: the limit, if that of the call exceeds the context
OTHER_FIELD = "other"  # label of the metric for fields that only --unknown-fields accepts
MAX_NAMES, MAX_NAMED = 32, 128  # names in the header, and characters of each
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


async def complete(endpoint: Endpoint, service: Service, request: Request) -> Response:
    """Answer a call to one of the endpoints that generate. Raises ApiError."""
    call, ignored = await read_request(request, endpoint.parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    job = await endpoint.prepare(service, call, state["request_id"], state["caller"])
    headers = headers_of(service, job, ignored)
    renderer = endpoint.renderer(service.model.tokenizer, job, call)
    generation = Generation(service, job)
    if call.stream:
        return EventStream(generation, renderer, call.stream_options, headers)
    return await answer_whole(generation, renderer, request, headers)


async def answer_whole(
    generation: Generation, renderer: Renderer, request: Request, headers: Mapping[str, str]
) -> Response:
    """Run a call to its end, and answer with its JSON. Raises ApiError."""
    try:
        answer = await whole_answer(generation, renderer, request.receive)
    except ClientGone:
        return Silence()
    return Response(answer, headers={**headers, **version_header(generation)}, media_type="application/json")


async def embed(service: Service, request: Request) -> Response:
    """Answer with the embeddings of the inputs of a call. Raises ApiError."""
    call, ignored = await read_request(request, embedding_parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    job = await embeddings.prepare(service, call, state["request_id"], state["caller"])
    headers = report_ignored(service, ignored)
    try:
        answer = await embeddings.run(service, job, request.receive)
    except ClientGone:
        return Silence()
    if service.config.admin_key_file is not None:
        headers = headers | {WEIGHT_VERSION: str(answer.weight_version)}
    return Response(answer.body, headers=headers, media_type="application/json")


async def read_request[T: msgspec.Struct](
    request: Request, parser: BodyParser[T], service: Service
) -> tuple[T, Ignored]:
    """Read and parse the body of a call. Returns also its ignored fields. Raises ApiError."""
    body = await read_json_body(request, service.config.max_body_bytes)
    parse = partial(parser.parse, body, ignores_unknown=service.config.unknown_fields == "ignore")
    return parse() if len(body) < LARGE_BODY else await asyncio.to_thread(parse)


def headers_of(service: Service, job: Job, ignored: Ignored) -> dict[str, str]:
    """The headers that name what an answer leaves out: fields, keywords of schemas, and a limit beyond the context."""
    headers = report_ignored(service, Ignored((*ignored.known, *job.ignored), (*ignored.unknown, *job.left_out)))
    return headers if job.cut_limit is None else headers | {CUT_LIMIT: str(job.cut_limit)}


def report_ignored(service: Service, ignored: Ignored) -> dict[str, str]:
    """Count the ignored fields of a call, and return the header that names them."""
    if not any(ignored):
        return {}
    service.observer.fields_ignored([*ignored.known, *([OTHER_FIELD] if ignored.unknown else [])])
    names = [_NOT_IN_NAMES.sub("_", name[:MAX_NAMED]) for name in (*ignored.known, *ignored.unknown)]
    return {IGNORED_FIELDS: ", ".join(names[:MAX_NAMES] + ["..."] * (len(names) > MAX_NAMES))}


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
