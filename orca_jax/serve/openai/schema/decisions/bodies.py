"""Bodies of calls for decisions."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.limits import MAX_NAME
from orca_jax.serve.openai.schema.sampling import CallerId, Seconds, within
from orca_jax.serve.openai.schema.structured import JsonObject
from orca_jax.text.decisions.questions import MAX_OPTIONS
from orca_jax.text.decisions.reads import TEMPERATURE, OptionOrder
from orca_jax.values.request import RANGES

MAX_QUESTIONS = 400  # OpenAI's

Id = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class ReadFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies that are answered by reads. For every field, `null` means "not given"."""

    model: str | None = None
    temperature: Annotated[float, within(TEMPERATURE)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    priority: Annotated[int, within(RANGES["priority"])] | None = None
    user: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    request_id: CallerId | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None


class DecisionFields(ReadFields, frozen=True, kw_only=True):
    """Base of bodies with typed questions."""

    order: OptionOrder | None = None
    chat_template_kwargs: JsonObject | None = None


class DecisionOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An option: `value` is OpenAI's, `label` that of a level, and `name` SGLang's."""

    value: str | bool | None = None
    label: str | None = None
    name: str | None = None
    description: str | None = None


OptionList = Annotated[list[DecisionOption | str], Meta(max_length=MAX_OPTIONS)]


class DecisionQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question: with `instructions` in OpenAI's form, and with `id` and `question` in SGLang's."""

    type: Literal["predicate", "choice", "score", "yes_no"]
    name: str | None = None
    instructions: str | list[JsonObject] | None = None
    choices: OptionList | None = None
    levels: OptionList | None = None
    id: Id | None = None
    question: str | None = None
    options: OptionList | None = None
    yes: str | None = None
    no: str | None = None


class DecisionRequest(DecisionFields, frozen=True, kw_only=True):
    """A request for decisions."""

    input: Any
    questions: Annotated[list[DecisionQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    return_prompt_token_ids: bool | None = None


class SystemQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question of TypeSafe's API."""

    type: Literal["noul", "choice", "score"]
    instructions: Any = None
    criteria: Any = None


class SystemRequest(DecisionFields, frozen=True, kw_only=True):
    """A request for decisions of TypeSafe's API."""

    state: Any
    questions: Annotated[dict[Id, SystemQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    instructions: Any = None
