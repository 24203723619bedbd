"""The forms of tool calls by name, and their parsers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from orca_jax.errors import ConfigError
from orca_jax.text.calls.braces import BracedCall
from orca_jax.text.calls.harmony import HARMONY, HarmonyParser
from orca_jax.text.calls.json_call import HEADS, JsonCall, NamedCall
from orca_jax.text.calls.members import TAGS, PythonCall, TaggedCall
from orca_jax.text.calls.parser import CallParser, CallReader, Dialect, OutputPart, ToolCall

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's shape: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

_DEEPSEEK = {"<｜tool▁call▁begin｜>": "deepseek", "<｜tool▁calls▁end｜>": "end"}
_KIMI = {"<|tool_call_begin|>": "kimi", "<|tool_calls_section_end|>": "end"}


def _in_section(start: str, end: str, call: str, kind: str) -> Dialect:
    """Return the syntax of calls with one marker before all of them, one after all, and one before each."""
    return Dialect({start: {call: kind}}, after={kind: {end: "end", call: kind}})


def _in_list(start: str, end: str = "") -> Dialect:
    """Return the syntax of a marker and a list of JSON objects, perhaps with a marker after it."""
    return Dialect({start: {"[": "json"}}, after={"json": {",": "json", "]": {end: "end"} if end else "end"}})


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
    # the same in a section; with other tags in MiniMax-M2, see `members.TAGS`
    "seed_oss": _in_section("<seed:tool_call>", "</seed:tool_call>", "<function=", "seed"),
    "minimax_m2": _in_section("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "invoked"),
    # a marker and [{"name": ..., "arguments": {...}}, ...]; in Command A {"tool_name": ..., "parameters": {...}}
    "granite": _in_list("<|tool_call|>"),
    "nemotron_json": _in_list("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": _in_list("<tool_calls>", "</tool_calls>"),
    "cohere_command3": _in_list("<|START_ACTION|>", "<|END_ACTION|>"),
    # [name(key=value, ...), ...], in Llama 4 between <|python_start|> and <|python_end|>
    "pythonic": Dialect(
        {"<|python_end|>": "end"},
        {"[": "python", "<|python_start|>": {"[": "python"}},
        {"python": {",": "python", "]": "end"}},
    ),
    # the same, anywhere in the text, between the markers of LFM2
    "lfm2": Dialect(
        {"<|tool_call_start|>": {"[": "python"}}, after={"python": {",": "python", "]": {"<|tool_call_end|>": "end"}}}
    ),
    # name(key=value, ...) on lines
    "olmo3": Dialect({"<function_calls>": "python"}, after={"python": {"</function_calls>": "end", "": "python"}}),
    # a section of calls, each with its name before its arguments, see `json_call.HEADS`
    "deepseek_v3": Dialect(
        {"<｜tool▁calls▁begin｜>": {"<｜tool▁call▁begin｜>": "deepseek"}},
        after={"deepseek": {"<｜tool▁call▁end｜>": _DEEPSEEK, "```": {"<｜tool▁call▁end｜>": _DEEPSEEK}}},
    ),
    "kimi_k2": Dialect(
        {"<|tool_calls_section_begin|>": {"<|tool_call_begin|>": "kimi"}}, after={"kimi": {"<|tool_call_end|>": _KIMI}}
    ),
    # <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value> for each, and </tool_call>
    "glm45": Dialect({"<tool_call>": "keyed"}),
    # call:name{key:value,...}; texts are between two markers
    "gemma4": Dialect({"<|tool_call>": {"call:": "gemma4"}}, after={"gemma4": {"<tool_call|>": "end"}}),
    "functiongemma": Dialect(
        {"<start_function_call>": {"call:": "functiongemma"}}, after={"functiongemma": {"<end_function_call>": "end"}}
    ),
}
QUOTES: Mapping[str, str] = {"gemma4": '<|"|>', "functiongemma": "<escape>"}
"""The markers around texts, by the dialect."""
ALIASES: Mapping[str, str] = {
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "deepseek_v31": "deepseek_v3",
    "glm47": "glm45",
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
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ()),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    ("gemma4", ("<|tool_call>", "call:", '<|"|>'), ()),
    ("functiongemma", ("<start_function_call>", "call:"), ()),
    ("lfm2", ("<|tool_call_start|>",), ()),
    ("seed_oss", ("<seed:tool_call>", "<function="), ()),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("granite", ("<|tool_call|>", "<|start_of_role|>"), ()),
    ("nemotron_json", ("<TOOLCALL>[", "</TOOLCALL>"), ()),
    ("hunyuan_a13b", ("<tool_calls>[", "</tool_calls>"), ()),
    ("cohere_command3", ("<|START_ACTION|>", "tool_name"), ()),
    ("olmo3", ("<function_calls>", "</function_calls>"), ("<invoke",)),
    (HARMONY, ("<|channel|>", "<|message|>", "functions."), ()),
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
    """Return the name of the format of calls that a chat template shows, or None if it shows none."""
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
        name: one of `DIALECTS` or of `ALIASES`, or `HARMONY`.
        tools: the tools of the request; calls of other tools remain text.

    Raises:
        ConfigError: there is no such parser.
    """
    if name == HARMONY:
        return HarmonyParser({str(tool["function"]["name"]) for tool in tools})
    dialect = DIALECTS.get(ALIASES.get(name, name))
    if dialect is None:
        names = ", ".join([*DIALECTS, HARMONY, *ALIASES])
        raise ConfigError(f"tool_call_parser must be one of {names}, got {name!r}", "tool_call_parser")
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
        "python": lambda: PythonCall(schemas),
        **{kind: partial(NamedCall, schemas, kind) for kind in HEADS},
        **{kind: partial(TaggedCall, schemas, kind) for kind in TAGS},
        **{kind: partial(BracedCall, schemas, quote) for kind, quote in QUOTES.items()},
    }
    return lambda name: readers[name]()
