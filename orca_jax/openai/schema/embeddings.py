"""`POST /v1/embeddings`: the fields of OpenAI, and those of vLLM for the queue."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import MAX_NAME, MAX_PROMPT_IDS, MAX_PROMPTS
from orca_jax.openai.schema.sampling import CallerId, MaxIds, Seconds, TokenId, within
from orca_jax.request import RANGES, Pooling

type EmbeddingPart = str | list[int]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for embeddings. For every field, `null` means "not given"."""

    model: str | None = None
    input: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], MaxIds]], MaxIds],
        Meta(description=f"A string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or lists of ids."),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_PROMPT_IDS)] | None = None
    user: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    priority: Annotated[int, within(RANGES["priority"])] | None = None
    request_id: CallerId | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None

    def parts(self) -> list[EmbeddingPart]:
        """The inputs, in order. Raises ApiError."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and all(isinstance(part, int) for part in self.input):
            return [[part for part in self.input if isinstance(part, int)]]
        if not 1 <= len(self.input) <= MAX_PROMPTS:
            raise ApiError(400, f"input must contain 1 to {MAX_PROMPTS} inputs, got {len(self.input)}", "input")
        parts = [part for part in self.input if not isinstance(part, int)]
        if len(parts) < len(self.input) or len({type(part) for part in parts}) > 1:
            raise ApiError(
                400,
                "input must be a string, a list of token ids, a list of strings, or a list of lists of token ids",
                "input",
            )
        return parts


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of one call."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True):
    """All vectors of a call, in the order of its inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    id: str | UnsetType = UNSET
