"""A whole answer: pieces of text collected into finished choices, and rendered by one kind of completion."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Receive

from orca_jax.openai.generation import Generation, Piece, joined
from orca_jax.openai.schema.answers import Usage


class Renderer(Protocol):
    """One kind of completion: from pieces to JSON."""

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """A piece as one or more events; `usage` so far where every chunk has to have it."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event before `[DONE]`."""
        ...

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer. Each choice is one piece with all of its text."""
        ...


async def whole_answer(generation: Generation, renderer: Renderer, receive: Receive) -> bytes:
    """Run a call to its end; the answer as JSON. Raises ApiError and ClientGone."""
    choices: list[list[Piece]] = [[] for _ in generation.job.requests]
    async with contextlib.aclosing(generation.pieces(receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                choices[piece.choice].append(piece)
    return renderer.answer([joined(pieces) for pieces in choices], generation.usage())
