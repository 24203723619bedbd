"""`POST /v1/embeddings`: the fields of OpenAI, and those of vLLM for the queue."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orca_jax.serve.openai.schema.limits import MAX_NAME, MAX_PROMPT_IDS
from orca_jax.serve.openai.schema.sampling import CallerId, Prompts, Seconds, within
from orca_jax.values.request import RANGES, Pooling


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for embeddings. For every field, `null` means "not given"."""

    model: str | None = None
    input: Prompts
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
