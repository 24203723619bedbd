"""Rendering of answers, and the collection of a whole answer from its pieces."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Generation, Piece, Receive, joined
from orca_jax.serve.openai.schema.answers import Usage

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class StreamRenderer(Protocol):
    """Renders pieces of text as the events of one endpoint. It belongs to one call."""

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """Events for a piece, or none. `usage` has the counts up to it, if every chunk must contain them."""
        ...

    def silence(self) -> bytes:
        """What is sent while there is nothing to say, so that proxies keep the stream open."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails after its first event."""
        ...


class Renderer(StreamRenderer, Protocol):
    """Renders whole answers, too."""

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer as JSON. Each choice is one piece with all of its text."""
        ...


def error_event(error: ApiError) -> bytes:
    """The event of an error, in OpenAI's format."""
    return b"data: " + error.encode() + b"\n\n"


async def whole_answer(generation: Generation, renderer: Renderer, receive: Receive) -> bytes:
    """Run a call to its end and return the answer as JSON. Raises ApiError and ClientGone."""
    choices: list[list[Piece]] = [[] for _ in generation.job.requests]
    async with contextlib.aclosing(generation.pieces(receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                choices[piece.choice].append(piece)
    return renderer.answer([joined(pieces) for pieces in choices], generation.usage())
