"""What clients send although it changes nothing here: which values are taken, and why they change nothing."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import MAX_NAME, MAX_PAIRS

SIZES: Mapping[type, str] = {
    str: f"a string of at most {MAX_NAME} characters",
    dict: f"an object of at most {MAX_PAIRS} entries",
}


class UnusedField(NamedTuple):
    """A field that is taken and not used. `null` always is."""

    reason: str
    values: tuple[object, ...] = ()  # the only other ones that are taken
    kind: type[str] | type[dict[str, Any]] | None = None  # or any value of this type

    def takes(self, value: object) -> bool:
        """Whether a value asks for nothing."""
        if self.kind is not None and isinstance(value, self.kind):
            return len(value) <= (MAX_NAME if self.kind is str else MAX_PAIRS)
        return value is None or any(value == one and type(value) in _kinds(one) for one in self.values)

    def schema(self) -> dict[str, Any]:
        """The same as a JSON schema."""
        if self.kind is not None:
            limit = {"type": ["string", "null"], "maxLength": MAX_NAME}
            if self.kind is dict:
                limit = {"type": ["object", "null"], "maxProperties": MAX_PAIRS}
            return {**limit, "description": f"Not used: {self.reason}."}
        return {"enum": [None, *self.values], "description": f"No other values: {self.reason}."}


_BOOKS = "for the client's own books"
_NOT_STORED = "answers are not stored"
_NO_BEAMS = "tokens are sampled, and beams are not searched"

# Of both kinds of completion.
COMMON: Mapping[str, UnusedField] = {
    "use_beam_search": UnusedField(_NO_BEAMS, (False,)),
    "length_penalty": UnusedField(_NO_BEAMS, (1,)),
    "spaces_between_special_tokens": UnusedField("tokens are joined as the tokenizer spells them", (True,)),
    "return_tokens_as_token_ids": UnusedField("return_token_ids gives the ids", (False,)),
}

COMPLETION: Mapping[str, UnusedField] = {
    **COMMON,
    "suffix": UnusedField("the model goes on with a text and does not fill gaps", ("",)),
}

CHAT: Mapping[str, UnusedField] = {
    **COMMON,
    "metadata": UnusedField(_BOOKS, kind=dict),
    "safety_identifier": UnusedField(_BOOKS, kind=str),
    "prompt_cache_key": UnusedField("there is one cache of prefixes, which needs no key", kind=str),
    "prompt_cache_retention": UnusedField("prefixes are kept while there is memory", ("in_memory", "in-memory")),
    "store": UnusedField(_NOT_STORED, (False,)),
    "service_tier": UnusedField("there is one tier", ("auto", "default")),
    "modalities": UnusedField("the model writes text", (["text"],)),
    "audio": UnusedField("the model writes text"),
    "prediction": UnusedField("every token is generated"),
    "reasoning_effort": UnusedField("models that think in the open are steered by chat_template_kwargs", ("none",)),
    "verbosity": UnusedField("the model's own length is its only one", ("medium",)),
    "web_search_options": UnusedField("nothing is searched"),
    "functions": UnusedField("tools replaced it", ([],)),
    "function_call": UnusedField("tool_choice replaced it", ("none",)),
    "best_of": UnusedField("n choices are n choices", (1,)),
    "documents": UnusedField("documents go into messages", ([],)),
    "chat_template": UnusedField("a template is a program, and only the operator may bring one"),
}

TOKENIZE: Mapping[str, UnusedField] = {
    "chat_template": CHAT["chat_template"],
}

NOTHING: Mapping[str, UnusedField] = {}


def check_unused(table: Mapping[str, UnusedField], name: str, raw: msgspec.Raw) -> None:
    """Look at a field that the request's own table does not have.

    Raises:
        ApiError: it is unknown, or asks for something.
    """
    known = table.get(name)
    if known is None:
        raise ApiError(400, f"unknown parameter: {name[:100]!r}", name[:100], code="unknown_parameter")
    try:
        takes = known.takes(msgspec.json.decode(raw))
    except (msgspec.DecodeError, RecursionError):  # a number out of range; something deep
        takes = False
    if takes:
        return
    what = "must be " + " or ".join(_words(known))
    raise ApiError(400, f"{name} {what} here: {known.reason}", name, code="unsupported_parameter")


def _words(known: UnusedField) -> list[str]:
    values = [msgspec.json.encode(one).decode() for one in known.values]
    kinds = [] if known.kind is None else [SIZES[known.kind]]
    return [*kinds, *values, "null"]


def _kinds(value: object) -> tuple[type, ...]:
    """The types that may stand for a value: 0 may come as 0.0, but not as false, which Python holds equal."""
    return (int, float) if type(value) is int else (type(value),)
