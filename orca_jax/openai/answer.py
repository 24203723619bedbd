"""Rendering of answers, and the collection of a whole answer from its pieces."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Receive

from orca_jax.openai.generation import Generation, Piece, joined
from orca_jax.openai.schema.answers import Usage


class Renderer(Protocol):
    """Renders pieces of text as the JSON of one endpoint."""

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One or more events for a piece. `usage` has the counts up to it, if every chunk must contain them."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the token counts, before `[DONE]`."""
        ...

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer as JSON. Each choice is one piece with all of its text."""
        ...


async def whole_answer(generation: Generation, renderer: Renderer, receive: Receive) -> bytes:
    """Run a call to its end and return the answer as JSON. Raises ApiError and ClientGone."""
    choices: list[list[Piece]] = [[] for _ in generation.job.requests]
    async with contextlib.aclosing(generation.pieces(receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                choices[piece.choice].append(piece)
    return renderer.answer([joined(pieces) for pieces in choices], generation.usage())
