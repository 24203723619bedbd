"""Fields without effect here: ignored ones, and others accepted only at values without a request.

A field that could change an answer is honoured or refused by name. A field that cannot change it here is ignored: it
must not break a client. The server names ignored fields in a header of the answer and counts them. `null` is accepted
for all fields, known or not, and means that the field is not given. `unused.toml` has the fields of whole bodies, and
`nested.py` those of the objects in bodies.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orca_jax.serve.openai.errors import ApiError


class UnusedField(NamedTuple):
    """A field without effect."""

    reason: str
    values: tuple[object, ...] = ()  # accepted values that request nothing
    is_ignored: bool = False  # any other value is ignored; otherwise it is refused

    def takes(self, value: object) -> bool:
        """True if a value requests nothing, so that it need not be reported."""
        return value is None or any(
            value == one and type(value) in _kinds(one) for one in self.values
        )

    def schema(self) -> dict[str, Any]:
        """The field as a JSON schema."""
        if self.is_ignored:
            return {"description": f"Ignored: {self.reason}."}
        return {
            "enum": [None, *self.values],
            "description": f"No other value is accepted: {self.reason}.",
        }


def ignored(reason: str, *values: object) -> UnusedField:
    """A field without effect at any value; `values` need not be reported."""
    return UnusedField(reason, values, is_ignored=True)


type UnusedFields = Mapping[str, UnusedField]

OF_CLIENT = "client libraries add it"

_OF_CALLS = (
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "provider_specific_fields",
    "keep_alive",
    "rid",
)
_OF_CACHES = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
_HEARD = frozenset({*_OF_CACHES, "cache_control"})  # with texts, see `cache/fields.py`
_OF_AGENTS = (
    *("service_tier", "user_security_context"),
    *(
        "provider_specific_fields",
        "provider",
        "models",
        "route",
    ),
    *(
        "rid",
        "cache_prompt",
        "id_slot",
        "keep_alive",
        "ttl",
        "session_id",
        "trace",
        "data_parallel_rank",
    ),
)


MAX_NAME = 100
"""Most characters of a field's name in a message."""


def _rows(table: Mapping[str, Mapping[str, Any]]) -> dict[str, UnusedField]:
    """The fields of a table of `unused.toml`."""
    return {
        name: UnusedField(
            row.get("ignored") or row["refused"], tuple(row.get("values", ())), "ignored" in row
        )
        for name, row in table.items()
    }


_TABLES = tomllib.loads(Path(__file__).with_name("unused.toml").read_text(encoding="utf-8"))
COMMON: UnusedFields = _rows(_TABLES["common"])
"""Fields of completions and chat completions."""
_OF_TEXTS: UnusedFields = {name: field for name, field in COMMON.items() if name not in _HEARD}
COMPLETION: UnusedFields = {**_OF_TEXTS, **_rows(_TABLES["completion"])}
CHAT: UnusedFields = {**_OF_TEXTS, **_rows(_TABLES["chat"])}
EMBEDDING: UnusedFields = {
    **{name: COMMON[name] for name in _OF_CALLS},
    **_rows(_TABLES["embedding"]),
}
DECISION: UnusedFields = {
    **{name: COMMON[name] for name in (*_OF_CALLS, *_OF_CACHES)},
    **_rows(_TABLES["decision"]),
}
CALLS: UnusedFields = {name: COMMON[name] for name in _OF_CALLS}
RERANK: UnusedFields = {**CALLS, **_rows(_TABLES["rerank"])}
SYSTEM: UnusedFields = {
    **{name: DECISION[name] for name in (*_OF_CALLS, "images", "joint")},
    **_rows(_TABLES["system"]),
}
RESPONSES: UnusedFields = {
    **{name: COMMON[name] for name in _OF_AGENTS},
    **_rows(_TABLES["responses"]),
}
MESSAGES: UnusedFields = {
    **{name: field for name, field in _OF_TEXTS.items() if name != "stop_sequences"},
    **_rows(_TABLES["messages"]),
}
TOKENIZE: UnusedFields = {"chat_template": CHAT["chat_template"]}
ADAPTER: UnusedFields = _rows(_TABLES["adapter"])
NOTHING: UnusedFields = {}


def check_unused(known: UnusedField | None, name: str, value: object, hint: str = "") -> bool:
    """Check a field outside the table of an object, with a value that is not null. True if it is ignored.

    The error for an unknown field has the hint, such as "; did you mean top_p?".

    Raises:
        ApiError: the field is unknown, or its value is refused.
    """
    if known is None:
        remedy = "leave it out, or start the server with --unknown-fields ignore"
        message = f"unknown parameter: {name[:MAX_NAME]!r}{hint}; {remedy}"
        raise ApiError(400, message, name[:MAX_NAME], code="unknown_parameter")
    if known.takes(value):
        return False
    if not known.is_ignored:
        what = " or ".join([*(msgspec.json.encode(one).decode() for one in known.values), "null"])
        message = f"{name} must be {what} here: {known.reason}"
        raise ApiError(400, message, name, code="unsupported_parameter")
    return True


def _kinds(value: object) -> tuple[type, ...]:
    """The types accepted for a value: 0 may be sent as 0.0, but not as false, although Python treats both as equal."""
    return (int, float) if type(value) is int else (type(value),)
