"""The forms of tool calls by name, and their parsers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from orca_jax.errors import ConfigError
from orca_jax.text.calls.json_call import JsonCall, NamedCall
from orca_jax.text.calls.members import PythonCall, TaggedCall
from orca_jax.text.calls.parser import CallParser, CallReader, Dialect, OutputPart, ToolCall

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's shape: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

DIALECTS: Mapping[str, Dialect] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times
    "hermes": Dialect({"<tool_call>": "json"}, after={"json": {"</tool_call>": "end"}}),
    # {"name": ..., "parameters": {...}}; {...}
    "llama3_json": Dialect({}, {"<|python_tag|>": "json", "": "json"}, {"json": {";": "json"}}),
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call
    "mistral": Dialect({"[TOOL_CALLS]": {"[": "json", "": "named"}}, after={"json": {",": "json", "]": "end"}}),
    # <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>; the outer tag may be missing
    "qwen3_coder": Dialect(
        {"<tool_call>": {"<function=": "tagged"}, "<function=": "tagged"},
        after={"tagged": {"</tool_call>": "end", "<function=": "tagged"}},
    ),
    # [name(key=value, ...), ...], in Llama 4 between <|python_start|> and <|python_end|>
    "pythonic": Dialect(
        {"<|python_end|>": "end"},
        {"[": "python", "<|python_start|>": {"[": "python"}},
        {"python": {",": "python", "]": "end"}},
    ),
}
ALIASES: Mapping[str, str] = {
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "llama4_pythonic": "pythonic",
}
"""vLLM's other names of these forms."""

_FORCED = Dialect({}, {"[": "json"}, {"json": {",": "json", "]": "end"}})
# Texts of chat templates that show the format of calls: all of the first, and none of the second, which other formats
# with the same markers have.
_SIGNATURES: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    (
        "hermes",
        ("<tool_call>", "</tool_call>"),
        ("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>", "```"),
    ),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ("<arg_key>",)),
    ("llama3_json", ("<|start_header_id|>", '{"name": function name, "parameters": '), ("<tool_call>", "<function=")),
    ("pythonic", ("[func_name1(params_name1=params_value1",), ("<tool_call>", "<function=")),
    ("mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ()),
)


class ToolParser(Protocol):
    """Parses a text that arrives in pieces. Text and calls are returned in their order."""

    def push(self, text: str) -> Sequence[OutputPart]:
        """Add a piece of text, and return the decided text and pieces of calls."""
        ...

    def finish(self) -> Sequence[OutputPart]:
        """Return the rest at the end of the text."""
        ...


def inferred_parser(template: str) -> str | None:
    """Return the name of the format of calls that a chat template shows, or None if it shows none of `DIALECTS`."""
    fitting = [
        name
        for name, present, absent in _SIGNATURES
        if all(text in template for text in present) and not any(text in template for text in absent)
    ]
    return fitting[0] if len(fitting) == 1 else None


def tool_parser(name: str, tools: Tools) -> ToolParser:
    """Return a parser for the calls that a model generates by itself.

    The markers of some dialects are special tokens, so special tokens must not be skipped in decoding.

    Args:
        name: one of `DIALECTS`, or of `ALIASES`.
        tools: the tools of the request; calls of other tools remain text.

    Raises:
        ConfigError: there is no such parser.
    """
    dialect = DIALECTS.get(ALIASES.get(name, name))
    if dialect is None:
        raise ConfigError(
            f"tool_call_parser must be one of {', '.join([*DIALECTS, *ALIASES])}, got {name!r}", "tool_call_parser"
        )
    return CallParser(dialect, _maker(dialect, tools))


def required_parser(tools: Tools) -> ToolParser:
    """Return a parser for text that matches the schema of `forced_tools_schema` for the choice "required"."""
    return CallParser(_FORCED, _maker(_FORCED, tools))


class StreamedArguments:
    """A parser for text that is the arguments of one forced call. Each piece of text is a piece of the call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ToolCall]:
        """Add a piece of text, and return it as a piece of the call."""
        name, self._name = self._name, None
        return [ToolCall(name, text)]

    def finish(self) -> list[ToolCall]:
        """Return nothing, since no text is held back."""
        return []


def _maker(dialect: Dialect, tools: Tools) -> Callable[[str], CallReader]:
    schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
    stop = next(iter(dialect.after.get("json", {})), "")
    readers: Mapping[str, Callable[[], CallReader]] = {
        "json": lambda: JsonCall(schemas, stop if stop.startswith("<") else ""),
        "named": lambda: NamedCall(schemas),
        "tagged": lambda: TaggedCall(schemas),
        "python": lambda: PythonCall(schemas),
    }
    return lambda name: readers[name]()
