"""Tools of a request: their checks, and the schema and the parser of forced calls."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from orca_jax.errors import RequestError
from orca_jax.text.calls.dialects import (
    DIALECTS,
    StreamedArguments,
    ToolParser,
    Tools,
    inferred_parser,
    required_parser,
    tool_parser,
)
from orca_jax.text.calls.parser import OutputPart, Reasoning, ToolCall
from orca_jax.text.schemas.keywords import MAPS
from orca_jax.text.schemas.prepared import PreparedSchema, prepared

__all__ = [
    "DIALECTS",
    "OutputPart",
    "Reasoning",
    "StreamedArguments",
    "ToolCall",
    "ToolParser",
    "check_tools",
    "forced_parser",
    "forced_tools_schema",
    "inferred_parser",
    "is_strict",
    "prepared_tool",
    "tool_name",
    "tool_parser",
]

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # twice the limit of 64: for a namespace and a name


def forced_parser(tools: Tools, choice: str | Mapping[str, Any]) -> ToolParser:
    """Return a parser for text that matches `forced_tools_schema`.

    Raises:
        RequestError: the choice is invalid, or names a tool outside of the request; `param` is "tool_choice".
    """
    name = _chosen(choice, [tool_name(tool) for tool in tools])
    return required_parser(tools) if name is None else StreamedArguments(name)


def forced_tools_schema(tools: Tools, choice: str | Mapping[str, Any], parallel: bool = True) -> str:
    """Return the JSON schema of the generated text for forced calls.

    Args:
        tools: tools that have passed `check_tools`.
        choice: "required" for a list of one or more calls {"name": ..., "arguments": {...}}, or OpenAI's object with
            the name of a tool, for the arguments of one call of this tool.
        parallel: True if the list may hold more than one call.

    Raises:
        RequestError: the choice is invalid, or names a tool outside of the request; `param` is "tool_choice".
    """
    parameters = {tool_name(tool): parameters_of(tool) for tool in tools}
    name = _chosen(choice, parameters)
    if name is not None:
        return _dump(parameters[name])
    call = call_schema(parameters)
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}}
    if not parallel:
        schema["maxItems"] = 1
    return _dump({**schema, "$defs": call["$defs"]})


def call_schema(parameters: Mapping[str, Mapping[str, Any]], key: str = "arguments") -> dict[str, Any]:
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


def check_tools(tools: Tools) -> None:
    """Check the request field "tools", a list of objects.

    Raises:
        RequestError: the list is empty or too long, or a tool is not a function with a valid, unique name and the
            schema of an object; `param` is "tools".
    """
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise _wrong(f"tools must hold 1 to {MAX_TOOLS} tools, got {len(tools)}")
    names = set()
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise _wrong(f'{where} must be an object with type "function" and an object as function')
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong(f"{where}.function.name must be 1 to 128 letters, digits, _, - or .")
        if name in names:
            raise _wrong(f"{where}.function.name: {name} is used twice")
        names.add(name)
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool that has passed `check_tools`."""
    return str(tool["function"]["name"])


def is_strict(tool: Mapping[str, Any]) -> bool:
    """True if the arguments of a tool must match its schema, also if the model calls it by its own choice."""
    return tool["function"].get("strict") is True


def _check_parameters(where: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or value.get("type", "object") != "object":
        raise _wrong(f'{where} must be a JSON schema with type "object"')
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
    if level:
        raise _wrong(f"{where} must not be nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _children(value: object) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the arguments of a tool; without parameters it allows only an empty object."""
    found = tool["function"].get("parameters")
    if not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


def prepared_tool(tool: Mapping[str, Any]) -> tuple[Mapping[str, Any], PreparedSchema]:
    """Return a tool with parameters for a grammar, without the texts for readers, and what the grammar leaves out.

    Raises:
        WrongSchemaError: its parameters are not a JSON schema, or too large.
    """
    found = prepared(parameters_of(tool))
    return {**tool, "function": {**tool["function"], "parameters": found.schema}}, found


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
        elif key in MAPS and isinstance(value, Mapping):  # its keys are names, even those of keywords
            moved[key] = {name: _moved(one, root) for name, one in value.items()}
        elif key in ("const", "enum", "default", "examples"):  # values, not schemas
            moved[key] = value
        else:
            moved[key] = _moved(value, root)
    return moved


def _chosen(choice: str | Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the tool named by the choice, or None for "required"."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        message = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError(message, param="tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice")
    return name


def _dump(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tools")
