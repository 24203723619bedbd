"""The outputs of `LLM.embed`, with the fields of vLLM's classes."""

from dataclasses import dataclass

from orca_jax.llm.open_requests import OpenCandidate
from orca_jax.text.embedding import embedding_of
from orca_jax.values.errors import EngineError


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    weight_version: int = 0  # of the weights that made it; see `LLM.update_params`


def embedded(candidate: OpenCandidate, normalize: bool) -> EmbeddingRequestOutput:
    """The output of a finished candidate. Raises EngineError if it failed."""
    of = candidate.of
    if candidate.pooled is None:
        raise EngineError(
            f"prompt {of.request_id} has no embedding: {candidate.error or 'it was aborted'}"
        )
    vector = embedding_of(candidate.pooled, normalize=normalize)
    return EmbeddingRequestOutput(
        of.request_id,
        of.prompt_ids,
        EmbeddingOutput(vector.tolist()),
        num_cached_tokens=candidate.num_cached,
        weight_version=of.call.weight_version,
    )
