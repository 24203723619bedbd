"""Bodies and answers of rerankers, classifiers and scores, which decisions answer too."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orca_jax.serve.openai.schema.decisions.answers import PlainUsage
from orca_jax.serve.openai.schema.decisions.bodies import DecisionFields, ReadFields
from orca_jax.serve.openai.schema.limits import MAX_PROMPT_IDS, MAX_PROMPTS
from orca_jax.serve.openai.schema.sampling import TokenId
from orca_jax.text.decisions.questions import MAX_OPTIONS
from orca_jax.values.request import MAX_LOGIT_BIAS

Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_PROMPT_IDS)]


class RerankText(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(ReadFields, frozen=True, kw_only=True):
    """A request for the relevance of documents, in the form of Jina, Cohere and vLLM."""

    query: str
    documents: Annotated[list[str | RerankText], Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class Reranked(msgspec.Struct, frozen=True):
    """A document with its relevance."""

    index: int
    relevance_score: float
    x_label_mass: float
    document: RerankText | UnsetType = UNSET


class RerankList(msgspec.Struct, frozen=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[Reranked]
    usage: PlainUsage


class ClassifyRequest(DecisionFields, frozen=True, kw_only=True):
    """A request for one of several labels for each text."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    labels: Annotated[list[str], Meta(min_length=2, max_length=MAX_OPTIONS)]
    instructions: str | None = None


class Classified(msgspec.Struct, frozen=True):
    """A text with its label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    x_label_mass: float


class ClassList(msgspec.Struct, frozen=True):
    """The labels of all texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PlainUsage


class ScoreRequest(ReadFields, frozen=True, kw_only=True):
    """A request for the probabilities of given tokens after a query and each item."""

    query: str | Ids
    items: str | Annotated[list[str | Ids], Meta(min_length=1, max_length=MAX_PROMPTS)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGIT_BIAS)]
    apply_softmax: bool | None = None
    item_first: bool | None = None


class ScoreList(msgspec.Struct, frozen=True):
    """The probabilities of all tokens after each item, in SGLang's form."""

    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: PlainUsage


class ItemScore(msgspec.Struct, frozen=True):
    """The probability of the first token after one item."""

    index: int
    object: Literal["score"]
    score: float


class ItemScores(msgspec.Struct, frozen=True):
    """The scores of all items, in vLLM's form."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ItemScore]
    usage: PlainUsage
