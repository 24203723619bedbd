"""Tools of a request: their checks, and the schema and the parser of forced calls."""

import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import msgspec

from orca_jax.text.calls.dialects import StreamedArguments, required_parser
from orca_jax.text.calls.offered import Tools, call_schema, is_strict, parameters_of, tool_name
from orca_jax.text.calls.parts import OutputPart, Reasoning, ToolCall, ToolParser
from orca_jax.text.schemas.prepared import PreparedSchema, prepared
from orca_jax.values.errors import RequestError

__all__ = [
    "OutputPart",
    "Reasoning",
    "StreamedArguments",
    "ToolCall",
    "ToolParser",
    "check_choice",
    "check_tools",
    "forced_parser",
    "forced_tools_schema",
    "is_strict",
    "prepared_tool",
    "tool_name",
]

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # twice the limit of 64: for a namespace and a name


def check_choice(tools: Tools, choice: str | Mapping[str, Any]) -> None:
    """Check that forced calls are possible.

    Raises:
        RequestError: the choice is invalid, or names a tool outside of the request; `param` is "tool_choice".
    """
    _chosen(choice, [tool_name(tool) for tool in tools])


def forced_parser(tools: Tools, choice: str | Mapping[str, Any]) -> ToolParser:
    """Return a parser for text that matches `forced_tools_schema`.

    Raises:
        RequestError: the choice is invalid, or names a tool outside of the request; `param` is "tool_choice".
    """
    name = _chosen(choice, [tool_name(tool) for tool in tools])
    if name is None:
        return required_parser(tools)
    return StreamedArguments(name)


def forced_tools_schema(
    tools: Tools, choice: str | Mapping[str, Any], parallel: bool = True
) -> str:
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
        where = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise _wrong(
                f'{where} must be an object with type "function" and an object as function'
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong(f"{where}.function.name must be 1 to 128 letters, digits, _, - or .")
        if name in names:
            raise _wrong(f"{where}.function.name: {name} is used twice")
        names.add(name)
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))


def _check_parameters(where: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or value.get("type", "object") != "object":
        raise _wrong(f'{where} must be a JSON schema with type "object"')
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [*chain.from_iterable(map(_children, level))]
    if level:
        raise _wrong(f"{where} must not be nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _children(value: object) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def prepared_tool(tool: Mapping[str, Any]) -> tuple[Mapping[str, Any], PreparedSchema]:
    """Return a tool with parameters for a grammar, without the texts for readers, and what the grammar leaves out.

    Raises:
        WrongSchemaError: its parameters are not a JSON schema, or too large.
    """
    found = prepared(parameters_of(tool))
    return {**tool, "function": {**tool["function"], "parameters": found.schema}}, found


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
        raise RequestError(
            f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice"
        )
    return name


def _dump(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tools")
