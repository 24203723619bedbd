"""JSON schemas of all request bodies, from the tables of fields, and from `fields.toml`, which says what each means."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orca_jax.serve.openai.schema import PARSERS
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.serve.openai.schema.unused import UnusedFields

REF = "#/components/schemas/{name}"
LIMIT = "x-limit"  # marks a number with a maximum that depends on the model

KNOWN_TYPES = "x-known-types"  # marks a list whose objects of other types are left out
LEFT_OUT_TYPES = "x-left-out-types"  # marks a list whose objects of these types are left out
WITHOUT_TYPE = ("InputMessage", "ItemReference")  # objects whose type may be left out

TEXT_ONLY = ("prompt",)
MESSAGES_ONLY = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

Document = dict[str, Any]


def request_schemas(
    names: Sequence[str],
    limits: Mapping[str, int],
    *,
    takes_priority: bool = True,
    takes_unknown: bool = False,
) -> Document:
    """Components for all request bodies, with the unused fields.

    Args:
        names: served names of the model.
        limits: value of an `x-limit` mark -> maximum; empty while the model is not loaded.
        takes_priority: if False, only a `priority` of 0 is allowed.
        takes_unknown: if False, unknown fields must be null.
    """
    schemas = described([parser.kind for parser in PARSERS.values()])
    unused = {**NESTED, **{parser.kind.__name__: parser.unused for parser in PARSERS.values()}}
    for name, schema in schemas.items():
        if "properties" in schema:
            fields: UnusedFields = unused.get(name, {})
            schema["properties"].update({name: known.schema() for name, known in fields.items()})
            # else a form whose other keys are left out without a word
            if name in unused or schema.get("additionalProperties") is False:
                schema["additionalProperties"] = True if takes_unknown else {"type": "null"}
    # like all fields that may be left out
    schemas["CalledTool"]["properties"]["type"]["enum"].append(None)
    for parser in PARSERS.values():
        properties = schemas[parser.kind.__name__]["properties"]
        properties["model"] = {
            "enum": [*names, None],
            "description": properties["model"].get("description", ""),
        }
        if not takes_priority and "priority" in properties:
            properties["priority"] |= {"enum": [0, None]}
    schemas["TokenizeRequest"]["oneOf"] = _either()
    _tools_of(schemas["MessagesRequest"]).append(_other_than("custom"))
    for name in WITHOUT_TYPE:
        schemas[name]["required"].remove("type")
        schemas[name]["properties"]["type"]["enum"].append(None)
    return {name: _limited(schema, limits) for name, schema in schemas.items()}


def described(kinds: Sequence[type[msgspec.Struct]]) -> Document:
    """Components for these bodies and what is in them, with the meaning of each field."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    texts = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
    bases = {kind.__name__: _names_of_bases(kind) for kind in kinds}
    for name, schema in schemas.items():
        for base in bases.get(name, [name]):
            for field, text in texts.get(base, {}).items():
                schema["properties"][field]["description"] = text
    return schemas


def _names_of_bases(kind: type) -> list[str]:
    """The names of the bases of a class, the most general one first."""
    return [base.__name__ for base in reversed(kind.__mro__)]


def _tools_of(schema: Document) -> list[Document]:
    """The alternatives for a tool in a body."""
    alternatives: list[Document] = schema["properties"]["tools"]["anyOf"][0]["items"]["anyOf"]
    return alternatives


def _other_than(*kinds: str) -> Document:
    """An object of a type that is left out of a prompt."""
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"type": "string", "not": {"enum": list(kinds)}}},
    }


def _one_of(kinds: Sequence[str]) -> Document:
    """An object of one of the types that are left out of a prompt."""
    return {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(kinds)}}}


def _either() -> list[Document]:
    """The two mutually exclusive forms of a body: with `prompt`, or with `messages`."""
    null = {"type": "null"}
    return [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, **dict.fromkeys(MESSAGES_ONLY, null)},
        },
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array"}, **dict.fromkeys(TEXT_ONLY, null)},
        },
    ]


def _limited(schema: Any, limits: Mapping[str, int]) -> Any:
    if isinstance(schema, list):
        return [_limited(part, limits) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: _limited(value, limits) for name, value in schema.items() if name != LIMIT}
    if schema.get(LIMIT) in limits:
        known["maximum"] = limits[schema[LIMIT]]
    if types := known.pop(KNOWN_TYPES, None):
        known["items"] = {"anyOf": [*known["items"]["anyOf"], _other_than(*types)]}
    if types := known.pop(LEFT_OUT_TYPES, None):
        known["items"] = {"anyOf": [*known["items"]["anyOf"], _one_of(types)]}
    return known
