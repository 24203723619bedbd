"""A whole answer: pieces of text collected into finished choices, and rendered by one kind of completion."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Receive

from orca_jax.openai.generation import Generation, Piece
from orca_jax.openai.schema.answers import FinishReason, Usage
from orca_jax.request import TokenLogprobs
from orca_jax.text.tools import ToolCall


@dataclass(slots=True)
class FinishedChoice:
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


class Renderer(Protocol):
    """One kind of completion: from pieces and outcomes to JSON."""

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """A piece as one or more events; `usage` so far where every chunk has to have it."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event before `[DONE]`."""
        ...

    def answer(self, outcomes: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole answer."""
        ...


async def whole_answer(generation: Generation, shape: Renderer, receive: Receive) -> bytes:
    """Run a call to its end; the answer as JSON. Raises ApiError and ClientGone."""
    outcomes = [FinishedChoice() for _ in generation.job.requests]
    async with contextlib.aclosing(generation.pieces(receive)) as batches:
        async for pieces in batches:
            for piece in pieces:
                outcomes[piece.choice].add(piece)
    return shape.answer(outcomes, generation.usage())
