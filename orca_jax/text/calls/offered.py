"""Facts of the tools that a request offers: names, schemas of arguments, and the schema of a call."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.text.schemas.keywords import MAPS

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's shape: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool, by its name."""


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool that has passed `check_tools`."""
    return str(tool["function"]["name"])


def is_strict(tool: Mapping[str, Any]) -> bool:
    """True if the arguments of a tool must match its schema, also if the model calls it by its own choice."""
    return tool["function"].get("strict") is True


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the arguments of a tool; without parameters it allows only an empty object."""
    found = tool["function"].get("parameters")
    if not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


def call_schema(
    parameters: Mapping[str, Mapping[str, Any]], key: str = "arguments"
) -> dict[str, Any]:
    """Return the JSON schema of {"name": ..., "arguments": {...}}, with `anyOf` and `$defs` alone.

    `parameters` has the schema of the arguments of each tool. `key` is the name of the arguments.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in parameters
    ]
    moved = {name: _moved(value, f"#/$defs/{name}") for name, value in parameters.items()}
    return {"anyOf": calls, "$defs": moved}


def _moved(schema: Any, root: str) -> Any:
    """Return the schema for a place inside another schema: references to its root are changed to `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        # its keys are names, even those of keywords
        elif key in MAPS and isinstance(value, Mapping):
            moved[key] = {name: _moved(one, root) for name, one in value.items()}
        elif key in ("const", "enum", "default", "examples"):  # values, not schemas
            moved[key] = value
        else:
            moved[key] = _moved(value, root)
    return moved
