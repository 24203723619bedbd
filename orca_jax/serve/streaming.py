"""How a call is answered: in one body, or as server-sent events."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.serve.api_error import ApiError
from orca_jax.serve.generation import ClientGone, Generation, Piece
from orca_jax.serve.schema.answers import FinishReason, Usage
from orca_jax.serve.schema.sampling import SamplingFields
from orca_jax.step import TokenLogprobs
from orca_jax.text.tools import ToolCall

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Outcome:
    """A choice that has ended."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        """Take what came next."""
        self.texts.append(piece.text)
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.calls += piece.calls
        self.reason = piece.reason
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


class Shape(Protocol):
    """One kind of completion: from pieces and outcomes to JSON."""

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """A piece as one or more events; `usage` so far where every chunk has to have it."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event before `[DONE]`."""
        ...

    def answer(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """The whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class StreamRules:
    """What `stream_options` say."""

    usage: bool  # a last chunk with the token counts
    continuous_usage: bool  # all others have them too


def stream_rules(call: SamplingFields) -> StreamRules | None:
    """How to stream; None for an answer in one body."""
    if not call.stream:
        return None
    options = call.stream_options
    wants_usage = options is not None and bool(options.include_usage)
    return StreamRules(wants_usage, wants_usage and options is not None and bool(options.continuous_usage_stats))


async def respond(generation: Generation, shape: Shape, request: Request, rules: StreamRules | None) -> Response:
    """Answer as a stream by `rules`, or whole. Raises ApiError."""
    if rules is not None:
        return EventStream(generation, shape, rules)
    try:
        answer = await whole_answer(generation, shape, request.receive)
    except ClientGone:
        return Silence()
    return Response(answer, media_type="application/json")


async def whole_answer(generation: Generation, shape: Shape, receive: Receive) -> bytes:
    """Run a call to its end; the answer as JSON. Raises ApiError and ClientGone."""
    outcomes = [Outcome() for _ in generation.job.requests]
    async with contextlib.aclosing(generation.pieces(receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                outcomes[piece.choice].add(piece)
    return shape.answer(outcomes, generation.usage())


class Silence(Response):
    """No answer: the caller has gone, and the connection may be closed already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""


class EventStream(Response):
    """Sends a call's events as they come. It reads `receive` itself, so no middleware may do so before.

    The headers leave with the first news of the engine, so that what it refuses is still an answer of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, shape: Shape, rules: StreamRules) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._shape = shape
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's. Raises ApiError where nothing has been sent."""
        has_started = False
        with contextlib.suppress(ClientGone):
            try:
                async with contextlib.aclosing(self._events(receive)) as events:
                    async for event in events:
                        if not has_started:
                            has_started = True
                            start = {"status": self.status_code, "headers": self.raw_headers}
                            await send({"type": "http.response.start", **start})
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                if not has_started:
                    raise
                event = b"data: " + error.encode() + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, receive: Receive) -> AsyncGenerator[bytes]:
        """Joined where they came together."""
        generation, chunk = self._generation, self._shape.chunk
        continuous = self._rules.continuous_usage
        async with contextlib.aclosing(generation.pieces(receive)) as batches:
            async for pieces in batches:
                usage = generation.usage() if continuous else None
                if len(pieces) == 1:
                    yield chunk(pieces[0], usage)
                else:
                    yield b"".join([chunk(piece, usage) for piece in pieces]) or KEEP_ALIVE
        end = self._shape.usage_chunk(generation.usage()) if self._rules.usage else b""
        yield end + DONE
