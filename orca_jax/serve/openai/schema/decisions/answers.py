"""Answers of decisions, and their errors."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.schema.answers import CompletionDetails


class ValueProbability(msgspec.Struct, frozen=True):
    """An option of an answer. `label` is that of a level."""

    value: str | bool | int
    probability: float
    label: str | UnsetType = UNSET


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What answers of all APIs say about their reads.

    `x_label_mass` is the probability of all labels together, and `x_flips` the number of orders of the options with
    another first answer. `x_labels` says if labels are several tokens, and `x_calibrated` if a calibration was used.
    """

    x_label_mass: float
    x_labels: Literal["single", "several"]
    x_flips: int | UnsetType = UNSET
    x_calibrated: bool | UnsetType = UNSET


class DecisionAnswer(Answered, frozen=True, kw_only=True):
    """An answer in OpenAI's form."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    probabilities: list[ValueProbability] | UnsetType = UNSET
    confidence: float | UnsetType = UNSET


class InputTokenDetails(msgspec.Struct, frozen=True):
    """The source of the prompts' tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionUsage(msgspec.Struct, frozen=True):
    """Token counts of a call: those of the state once, and of each question."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class DecisionList(msgspec.Struct, frozen=True):
    """Answers in OpenAI's form, in the order of the questions."""

    id: str
    object: Literal["decision"]
    created: int
    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


class NamedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in SGLang's form."""

    type: Literal["choice", "score", "yes_no"]
    probabilities: dict[str, float]
    label_mass: float
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    x_labels: Literal["single", "several"]
    x_flips: int | UnsetType = UNSET
    x_calibrated: bool | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    label_token_ids: list[int] | UnsetType = UNSET


class PlainUsage(msgspec.Struct, frozen=True):
    """Token counts of a call, in the form of completions."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class NamedDecisions(msgspec.Struct, frozen=True):
    """Answers in SGLang's form, by the ids of the questions."""

    object: Literal["decisions"]
    model: str
    prompt_format_version: int
    answers: dict[str, NamedAnswer]
    usage: PlainUsage


class SystemAnswer(Answered, frozen=True, kw_only=True):
    """An answer of TypeSafe's API."""

    type: Literal["noul", "choice", "score"]
    noul: float | UnsetType = UNSET
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    legend: dict[str, str] | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET


class SystemUsage(msgspec.Struct, frozen=True):
    """Token counts of a call of TypeSafe's API."""

    input_tokens: int
    output_tokens: int = 0


class SystemAnswers(msgspec.Struct, frozen=True):
    """The answers of a call of TypeSafe's API, by the ids of the questions."""

    model: str
    answers: dict[str, SystemAnswer]
    usage: SystemUsage


class SystemFault(msgspec.Struct, frozen=True):
    """A fault of a body of TypeSafe's API."""

    loc: list[str | int]
    msg: str
    type: str


class SystemRefusal(msgspec.Struct, frozen=True):
    """Another error of TypeSafe's API."""

    error_type: str
    message: str


class SystemOneError(msgspec.Struct, frozen=True):
    """The JSON body of an error of TypeSafe's API."""

    detail: list[SystemFault] | SystemRefusal
