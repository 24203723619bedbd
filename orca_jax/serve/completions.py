"""`POST /v1/completions`: one call, from its body to its last byte."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import EngineError
from orca_jax.request import RequestUpdate, SamplingParams
from orca_jax.serve.api_error import ApiError, engine_gone
from orca_jax.serve.engine_client import Mailbox
from orca_jax.serve.schema import Choice, Completion, CompletionRequest, Usage, parse_completion
from orca_jax.serve.service import Service
from orca_jax.serve.wire import Rejected
from orca_jax.text.stream import OutputStream

MAX_BODY_BYTES = 32 * 2**20

_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The caller hung up: there is nobody to answer."""


class Call:
    """One completion call: its prompts are its choices, and each has an engine request of its own."""

    def __init__(
        self, service: Service, call: CompletionRequest, requests: Sequence[tuple[list[int], SamplingParams]]
    ) -> None:
        stops = call.stops()
        self._service = service
        self._requests = requests
        self._outputs = [OutputStream(service.tokenizer, stops) for _ in requests]
        self._open = set(range(len(requests)))  # choices that have not ended
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.with_usage = bool(call.stream_options and call.stream_options.include_usage)

    async def pieces(self, receive: Receive) -> AsyncGenerator[list[Choice]]:
        """Run to the end; yields what came together. Leaving early aborts the rest.

        Raises:
            ApiError: the engine refused or failed.
            ClientGone: the caller hung up.
        """
        async with self._service.open(self._requests) as mailbox, _watch(receive, mailbox):
            while self._open:
                try:
                    items = await mailbox.receive()
                except EngineError as error:
                    raise engine_gone(str(error)) from None
                choices: list[Choice] = []
                failure: ApiError | None = None
                for index, item in items:
                    try:
                        choices += self._take(mailbox, index, item)
                    except ApiError as error:
                        failure = error
                        break
                if choices:  # also what came before a failure
                    yield choices
                if failure is not None:
                    raise failure

    def _take(self, mailbox: Mailbox, index: int, item: RequestUpdate | Rejected) -> Iterator[Choice]:
        if isinstance(item, Rejected):
            raise ApiError(400, item.message, item.param)
        if index not in self._open:
            return  # ended by a stop string, and this update was already on its way
        if item.finish_reason in ("abort", "error"):
            raise ApiError(500, item.error or "the request was aborted", code="generation_failed")
        output = self._outputs[index]
        text = output.push(item.new_ids, item.finish_reason)
        reason = output.finish_reason
        if reason is not None:
            self._open.remove(index)
            if item.finish_reason is None:
                mailbox.abort(index)
        if text or reason is not None:
            assert reason in ("stop", "length", None)
            yield Choice(index, text, None, reason)

    def completion(self, choices: list[Choice], usage: Usage | UnsetType | None = UNSET) -> Completion:
        """An answer or a chunk."""
        return Completion(self._id, "text_completion", self._created, self._service.names[0], choices, usage)

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(len(ids) for ids, _ in self._requests)
        generated = sum(output.num_tokens for output in self._outputs)
        return Usage(prompt, generated, prompt + generated)

    async def answer(self, receive: Receive) -> Response:
        """Everything in one body."""
        texts = ["" for _ in self._requests]
        ends: dict[int, Choice] = {}
        async with contextlib.aclosing(self.pieces(receive)) as pieces:
            async for choice in (choice async for choices in pieces for choice in choices):
                texts[choice.index] += choice.text
                if choice.finish_reason is not None:
                    ends[choice.index] = choice
        whole = [Choice(i, text, None, ends[i].finish_reason) for i, text in enumerate(texts)]
        return Response(_encode(self.completion(whole, self.usage())), media_type="application/json")

    async def events(self, receive: Receive) -> AsyncGenerator[bytes]:
        """Server-sent events, joined where they came together; an error is the last one."""
        unasked: UnsetType | None = None if self.with_usage else UNSET
        try:
            async with contextlib.aclosing(self.pieces(receive)) as pieces:
                async for choices in pieces:
                    yield b"".join(_event(_encode(self.completion([choice], unasked))) for choice in choices)
        except ApiError as error:
            yield _event(error.encode())
            return
        if self.with_usage:
            yield _event(_encode(self.completion([], self.usage())))
        yield _event(b"[DONE]")


class EventStream(Response):
    """Sends a call's events as they come. It reads `receive` itself, so no middleware may do so before."""

    media_type = "text/event-stream"

    def __init__(self, call: Call) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone):
            async with contextlib.aclosing(self._call.events(receive)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def create_completion(service: Service, request: Request) -> Response:
    """The handler. Raises ApiError."""
    body = await read_json_body(request)
    call = parse_completion(body)
    service.check_model(call.model)
    prepared = Call(service, call, await service.prepare(call))
    if call.stream:
        return EventStream(prepared)
    try:
        return await prepared.answer(request.receive)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; nginx's name for this end


async def read_json_body(request: Request) -> bytes:
    """The whole body, within `MAX_BODY_BYTES`. Raises ApiError."""
    # Browsers send other types across origins without asking first, so a page could drive a local server.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


@contextlib.asynccontextmanager
async def _watch(receive: Receive, mailbox: Mailbox) -> AsyncIterator[None]:
    """Fail the mailbox when the caller hangs up. The body must have been read."""

    async def wait_for_the_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.fail(ClientGone())

    watcher = asyncio.create_task(wait_for_the_end())
    try:
        yield
    finally:
        watcher.cancel()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
