"""Tools of a request: their checks, the syntax of generated calls, and the schema of forced calls."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from orca_jax.errors import ConfigError, RequestError
from orca_jax.text.call_parser import CallParser, Dialect, Node, OutputPart, Reasoning, ToolCall, read_call, read_object
from orca_jax.text.json_end import BLANKS
from orca_jax.text.json_schema import MAPS

__all__ = [
    "DIALECTS",
    "ForcedCalls",
    "OutputPart",
    "Reasoning",
    "StreamedArguments",
    "ToolCall",
    "ToolParser",
    "check_tools",
    "forced_tools_schema",
    "inferred_parser",
    "tool_name",
    "tool_parser",
]

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's shape: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_OBJECT: Node = {"{": "object"}
# The last call of a list that ends early. The schema puts the name first.
_BEGUN_CALL = re.compile(
    r'[\s,\[]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"(\s*,\s*"arguments"\s*:\s*(?P<arguments>.*))?', re.DOTALL
)

DIALECTS: Mapping[str, Dialect] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times
    "hermes": Dialect("<tool_call>", _OBJECT, {"</tool_call>": "end"}),
    # {"name": ..., "parameters": {...}}; {...}
    "llama3_json": Dialect(None, {"{": "object", "<|python_tag|>": _OBJECT}, {";": _OBJECT}),
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    "mistral": Dialect("[TOOL_CALLS]", {"[": _OBJECT}, {",": _OBJECT, "]": "end"}),
}
# Texts of chat templates that show the format of calls: all of the first, and none of the second, which other formats
# with the same markers have.
_SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", "</tool_call>"), ("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>", "```")),
    "llama3_json": (("<|start_header_id|>", '{"name": function name, "parameters": '), ("<tool_call>", "<function=")),
    "mistral": (("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ("[ARGS]", "[CALL_ID]")),
}
_CALL_LIST = Dialect(None, {"[": _OBJECT}, {",": _OBJECT, "]": "end"})
_ONE_OBJECT = Dialect(None, _OBJECT, {})


class ToolParser(Protocol):
    """Parses a text that arrives in pieces. Text and calls are returned in their order, without loss of text."""

    def push(self, text: str) -> Sequence[OutputPart]:
        """Add a piece of text, and return the decided text and calls."""
        ...

    def finish(self, is_cut: bool = False) -> Sequence[OutputPart]:
        """Return the rest at the end of the text. With `is_cut`, a limit has ended it."""
        ...


def inferred_parser(template: str) -> str | None:
    """Return the name of the format of calls that a chat template shows, or None if it shows none of `DIALECTS`."""
    fitting = [
        name
        for name, (present, absent) in _SIGNATURES.items()
        if all(text in template for text in present) and not any(text in template for text in absent)
    ]
    return fitting[0] if len(fitting) == 1 else None


def tool_parser(name: str, tool_names: Collection[str]) -> ToolParser:
    """Return a parser for the calls that a model generates by itself.

    The markers of "mistral" and "llama3_json" are special tokens, so special tokens must not be skipped in decoding.

    Args:
        name: one of `DIALECTS`.
        tool_names: the tools of the request; calls of other tools remain text.

    Raises:
        ConfigError: there is no such parser.
    """
    if name not in DIALECTS:
        raise ConfigError(f"tool_call_parser must be one of {', '.join(DIALECTS)}, got {name!r}", "tool_call_parser")
    known = frozenset(tool_names)
    return CallParser(DIALECTS[name], lambda text: read_call(text, known))


class ForcedCalls:
    """A parser for text that matches `forced_tools_schema`.

    If a limit cuts the text, its last call has the beginning of its arguments, as soon as its name is known.
    """

    def __init__(self, tools: Tools, choice: str | Mapping[str, Any]) -> None:
        known = frozenset(tool_name(tool) for tool in tools)
        name = _chosen(choice, known)
        self._name, self._known = name, known
        if name is None:
            self._parser = CallParser(_CALL_LIST, lambda text: read_call(text, known))
        else:
            self._parser = CallParser(_ONE_OBJECT, lambda text: _call_of(name, read_object(text)))

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the decided text and calls."""
        return self._parser.push(text)

    def finish(self, is_cut: bool = False) -> list[str | ToolCall]:
        """Return the rest at the end of the text. With `is_cut`, a limit has ended it; otherwise it is text."""
        rest = self._parser.finish()
        return [self._cut(part) if is_cut and isinstance(part, str) else part for part in rest]

    def _cut(self, text: str) -> str | ToolCall:
        """The call that begins in a text; the text itself if its name is not complete."""
        if self._name is not None:
            begins = text.lstrip(BLANKS).startswith("{")
            return ToolCall(self._name, text) if begins else text
        found = _BEGUN_CALL.match(text)
        if found is None or found["name"] not in self._known:
            return text
        return ToolCall(found["name"], found["arguments"] or "")


class StreamedArguments:
    """A parser for text that is the arguments of one forced call. Each piece of text is a piece of the call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ToolCall]:
        """Add a piece of text, and return it as a piece of the call."""
        name, self._name = self._name, None
        return [ToolCall(name, text)]

    def finish(self, is_cut: bool = False) -> list[ToolCall]:
        """Return nothing, since no text is held back."""
        return []


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
    parameters = {tool_name(tool): _parameters(tool) for tool in tools}
    name = _chosen(choice, parameters)
    if name is not None:
        return _dump(parameters[name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in parameters
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {name: _moved(value, f"#/$defs/{name}") for name, value in parameters.items()}
    return _dump(schema)


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
            raise _wrong(f"{where}.function.name must be 1 to 64 letters, digits, _, - or .")
        if name in names:
            raise _wrong(f"{where}.function.name: {name} is used twice")
        names.add(name)
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool that has passed `check_tools`."""
    return str(tool["function"]["name"])


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


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the arguments of a tool; without parameters it allows only an empty object."""
    found = tool["function"].get("parameters")
    if not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


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


def _call_of(name: str, arguments: str | None) -> ToolCall | None:
    return None if arguments is None else ToolCall(name, arguments)


def _dump(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tools")
