"""Fields without effect: the values that are accepted, for compatibility, and the reasons."""

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
    """A field without effect. `null` is always accepted."""

    reason: str
    values: tuple[object, ...] = ()  # the other accepted values
    kind: type[str] | type[dict[str, Any]] | None = None  # or: any value of this type

    def takes(self, value: object) -> bool:
        """True if a value is accepted."""
        if self.kind is not None and isinstance(value, self.kind):
            return len(value) <= (MAX_NAME if self.kind is str else MAX_PAIRS)
        return value is None or any(value == one and type(value) in _kinds(one) for one in self.values)

    def schema(self) -> dict[str, Any]:
        """The field as a JSON schema."""
        if self.kind is not None:
            limit = {"type": ["string", "null"], "maxLength": MAX_NAME}
            if self.kind is dict:
                limit = {"type": ["object", "null"], "maxProperties": MAX_PAIRS}
            return {**limit, "description": f"Ignored: {self.reason}."}
        return {"enum": [None, *self.values], "description": f"No other value is accepted: {self.reason}."}


_FOR_CLIENT = "the server keeps no records of calls"
_NOT_STORED = "answers are not stored"
_NO_BEAMS = "beam search is not supported"

# Fields of completions and chat completions.
COMMON: Mapping[str, UnusedField] = {
    "use_beam_search": UnusedField(_NO_BEAMS, (False,)),
    "length_penalty": UnusedField(_NO_BEAMS, (1,)),
    "spaces_between_special_tokens": UnusedField("tokens are joined as the tokenizer defines", (True,)),
    "return_tokens_as_token_ids": UnusedField("use return_token_ids to get token ids", (False,)),
}

COMPLETION: Mapping[str, UnusedField] = {
    **COMMON,
    "suffix": UnusedField("filling in the middle of a text is not supported", ("",)),
}

CHAT: Mapping[str, UnusedField] = {
    **COMMON,
    "metadata": UnusedField(_FOR_CLIENT, kind=dict),
    "safety_identifier": UnusedField(_FOR_CLIENT, kind=str),
    "prompt_cache_key": UnusedField("all requests share one prefix cache, which needs no key", kind=str),
    "prompt_cache_retention": UnusedField(
        "cached prefixes stay until their memory is needed", ("in_memory", "in-memory")
    ),
    "store": UnusedField(_NOT_STORED, (False,)),
    "service_tier": UnusedField("there is only one tier", ("auto", "default")),
    "modalities": UnusedField("the model generates text only", (["text"],)),
    "audio": UnusedField("the model generates text only"),
    "prediction": UnusedField("predicted outputs are not supported"),
    "reasoning_effort": UnusedField("use chat_template_kwargs to control the reasoning of a model", ("none",)),
    "verbosity": UnusedField("the length of answers cannot be controlled", ("medium",)),
    "web_search_options": UnusedField("web search is not supported"),
    "functions": UnusedField("use tools instead", ([],)),
    "function_call": UnusedField("use tool_choice instead", ("none",)),
    "best_of": UnusedField("n candidates are generated for n choices", (1,)),
    "documents": UnusedField("put documents into messages", ([],)),
    "chat_template": UnusedField("a template is a program; only the operator of the server may set one"),
}

TOKENIZE: Mapping[str, UnusedField] = {
    "chat_template": CHAT["chat_template"],
}

NOTHING: Mapping[str, UnusedField] = {}


def check_unused(table: Mapping[str, UnusedField], name: str, raw: msgspec.Raw) -> None:
    """Check a field outside the request's own table of fields.

    Raises:
        ApiError: the field is unknown, or its value is not accepted.
    """
    known = table.get(name)
    if known is None:
        raise ApiError(400, f"unknown parameter: {name[:100]!r}", name[:100], code="unknown_parameter")
    try:
        takes = known.takes(msgspec.json.decode(raw))
    except (msgspec.DecodeError, RecursionError):  # a number out of range, or deep nesting
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
    """The types accepted for a value: 0 may be sent as 0.0, but not as false, although Python treats both as equal."""
    return (int, float) if type(value) is int else (type(value),)
