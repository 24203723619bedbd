"""The dialects of tool calls: a row for each, and their parsers and constraints by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from orca_jax.text.calls import forms
from orca_jax.text.calls.forms import Offer
from orca_jax.text.calls.harmony import HarmonyCalls
from orca_jax.text.calls.json_call import NAME, JsonCall, NamedCall
from orca_jax.text.calls.marked import (
    MarkedCalls,
    braced,
    json_alone,
    json_between,
    json_list,
    keyed,
    named_in_section,
    python_lines,
    python_list,
    tagged,
)
from orca_jax.text.calls.members import PythonCall, Tags
from orca_jax.text.calls.offered import Tools, tool_name
from orca_jax.text.calls.parser import CallParser, Syntax
from orca_jax.text.calls.parts import ToolCall, ToolParser
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import StructuredOutput


class Calls(Protocol):
    """How the calls of a dialect are read, and their grammar."""

    def parser(self, tools: Tools) -> ToolParser:
        """Return a parser for the calls that a model generates by itself."""
        ...

    def constraint(self, offer: Offer, answer: StructuredOutput | None) -> StructuredOutput:
        """Return the constraint on calls or an answer, which is free text without a format.

        Raises:
            CannotEnforceError: the dialect has no grammar for a strict tool.
        """
        ...


@dataclass(frozen=True)
class Dialect:
    """A dialect of tool calls.

    Attributes:
        name: vLLM's name.
        calls: how they are read, and their grammar.
        shown: texts of chat templates that show the dialect: each of these.
        absent: texts that no such template has; other dialects with the same markers have them.
        aliases: vLLM's other names.
        has_short_ids: the templates take only ids of nine letters and digits.
    """

    name: str
    calls: Calls
    shown: tuple[str, ...]
    absent: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    has_short_ids: bool = False

    def is_shown_by(self, template: str) -> bool:
        """True if a chat template shows the dialect."""
        has_all = all(text in template for text in self.shown)
        return has_all and not any(text in template for text in self.absent)


def _of_deepseek(offer: Offer) -> str:
    mark = offer.mark("<｜tool▁sep｜>")
    old = f'"function" {mark} "NAME\\n```json\\n" @arguments "\\n```"'
    return f'({old} | "NAME" {mark} @arguments)'


def _of_kimi(offer: Offer) -> str:
    mark = offer.mark("<|tool_call_argument_begin|>")
    return f'"functions.NAME:" /[0-9]{{1,4}}/ {mark} @arguments'


_MISTRAL_HEAD = re.compile(rf"\s*{NAME}(\[CALL_ID\][a-zA-Z0-9_.-]*)?(\[ARGS\])?\s*")
_QWEN_TAGS = Tags(
    first="<function=",
    name_end=">",
    key="<parameter=",
    value=">",
    end="</parameter>",
    ends=("</function>", "</tool_call>"),
    has_lines=True,
)
_SEED_TAGS = _QWEN_TAGS._replace(ends=("</function>", "</seed:tool_call>"), has_lines=False)
HARMONY = Dialect("openai", HarmonyCalls(), shown=("<|channel|>", "<|message|>", "functions."))
"""The messages of gpt-oss, among which calls are."""
_ROWS = (
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times
    Dialect(
        "hermes",
        json_between("<tool_call>", "</tool_call>"),
        shown=("<tool_call>", "</tool_call>"),
        absent=("<function=", "<arg_key>", "<use_mcp_tool>", "<tool_calls>", "```"),
    ),
    # {"name": ..., "parameters": {...}}; {...}
    Dialect(
        "llama3_json",
        json_alone("<|python_tag|>"),
        shown=("<|start_header_id|>", '{"name": function name, "parameters": '),
        absent=("<tool_call>", "<function="),
        aliases=("llama4_json",),
    ),
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or for each call [TOOL_CALLS]name[ARGS]{...}, with
    # [CALL_ID] and an id between name and [ARGS], or without [ARGS]
    Dialect(
        "mistral",
        MarkedCalls(
            Syntax(
                {"[TOOL_CALLS]": {"[": "json", "": "named"}},
                after={"json": {",": "json", "]": "end"}},
            ),
            {"json": JsonCall, "named": partial(NamedCall, head=_MISTRAL_HEAD)},
            forms.mistral,
        ),
        shown=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        has_short_ids=True,
    ),
    # <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>; the outer tag may be missing
    Dialect(
        "qwen3_coder",
        tagged("<tool_call>", _QWEN_TAGS, may_lack_outer=True),
        shown=("<tool_call>", "<function=", "<parameter="),
        absent=("<arg_key>",),
        aliases=("qwen3_xml",),
    ),
    # the same in a section
    Dialect(
        "seed_oss",
        tagged("<seed:tool_call>", _SEED_TAGS),
        shown=("<seed:tool_call>", "<function="),
    ),
    Dialect(
        "minimax_m2",
        tagged(
            "<minimax:tool_call>",
            Tags(
                first='<invoke name="',
                name_end='"',
                key='<parameter name="',
                value='">',
                end="</parameter>",
                ends=("</invoke>", "</minimax:tool_call>"),
            ),
        ),
        shown=("<minimax:tool_call>", "<invoke name="),
    ),
    # a marker and [{"name": ..., "arguments": {...}}, ...]; in Command A {"tool_name": ..., "parameters": {...}}
    Dialect("granite", json_list("<|tool_call|>"), shown=("<|tool_call|>", "<|start_of_role|>")),
    Dialect(
        "nemotron_json",
        json_list("<TOOLCALL>", "</TOOLCALL>"),
        shown=("<TOOLCALL>[", "</TOOLCALL>"),
    ),
    Dialect(
        "hunyuan_a13b",
        json_list("<tool_calls>", "</tool_calls>"),
        shown=("<tool_calls>[", "</tool_calls>"),
    ),
    Dialect(
        "cohere_command3",
        json_list("<|START_ACTION|>", "<|END_ACTION|>", is_cohere=True),
        shown=("<|START_ACTION|>", "tool_name"),
    ),
    # [name(key=value, ...), ...], in Llama 4 between <|python_start|> and <|python_end|>
    Dialect(
        "pythonic",
        MarkedCalls(
            Syntax(
                {"<|python_end|>": "end"},
                {"[": "python", "<|python_start|>": {"[": "python"}},
                {"python": {",": "python", "]": "end"}},
            ),
            {"python": PythonCall},
            forms.pythonic,
        ),
        shown=("[func_name1(params_name1=params_value1",),
        absent=("<tool_call>", "<function="),
        aliases=("llama4_pythonic",),
    ),
    # the same, anywhere in the text
    Dialect(
        "lfm2",
        python_list("<|tool_call_start|>", "<|tool_call_end|>"),
        shown=("<|tool_call_start|>",),
    ),
    # name(key=value, ...) on lines
    Dialect(
        "olmo3",
        python_lines("<function_calls>", "</function_calls>"),
        shown=("<function_calls>", "</function_calls>"),
        absent=("<invoke",),
    ),
    # function<｜tool▁sep｜>name, and a block of JSON; in DeepSeek V3.1 name<｜tool▁sep｜>{...}
    Dialect(
        "deepseek_v3",
        named_in_section(
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            re.compile(rf"\s*(function<｜tool▁sep｜>)?{NAME}\s*(<｜tool▁sep｜>)?\s*(```json)?\s*"),
            _of_deepseek,
            fence="```",
        ),
        shown=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        aliases=("deepseek_v31",),
    ),
    # functions.name:number<|tool_call_argument_begin|>{...}
    Dialect(
        "kimi_k2",
        named_in_section(
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("<|tool_call_begin|>", "<|tool_call_end|>"),
            re.compile(rf"\s*(functions\.)?{NAME}(:\d+)?\s*(<\|tool_call_argument_begin\|>)?\s*"),
            _of_kimi,
        ),
        shown=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    ),
    # <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value> for each, and </tool_call>
    Dialect(
        "glm45",
        keyed(
            "<tool_call>",
            Tags(
                first="",
                name_end="<",
                key="<arg_key>",
                key_end="</arg_key>",
                value="<arg_value>",
                end="</arg_value>",
                ends=("</tool_call>",),
            ),
        ),
        shown=("<tool_call>", "<arg_key>", "<arg_value>"),
        aliases=("glm47",),
    ),
    # call:name{key:value,...}
    Dialect(
        "gemma4",
        braced("<|tool_call>", "<tool_call|>", quote='<|"|>'),
        shown=("<|tool_call>", "call:", '<|"|>'),
    ),
    Dialect(
        "functiongemma",
        braced("<start_function_call>", "<end_function_call>", quote="<escape>"),
        shown=("<start_function_call>", "call:"),
    ),
    HARMONY,
)
DIALECTS: Mapping[str, Dialect] = {row.name: row for row in _ROWS}
"""The dialects by their first names."""
BY_NAME: Mapping[str, Dialect] = {name: row for row in _ROWS for name in (row.name, *row.aliases)}
"""The dialects by all their names."""

_FORCED = Syntax({}, {"[": "json"}, {"json": {",": "json", "]": "end"}})


def inferred_dialect(template: str) -> Dialect | None:
    """Return the dialect that a chat template shows, or None if it shows none, or several."""
    fitting = [row for row in _ROWS if row.is_shown_by(template)]
    return fitting[0] if len(fitting) == 1 else None


def tool_parser(name: str, tools: Tools) -> ToolParser:
    """Return a parser for the calls that a model generates by itself.

    The markers of some dialects are special tokens, so special tokens must not be skipped in decoding.

    Args:
        name: one of `BY_NAME`.
        tools: the tools of the request; calls of other tools remain text.

    Raises:
        ConfigError: there is no such parser.
    """
    dialect = BY_NAME.get(name)
    if dialect is None:
        names = ", ".join(BY_NAME)
        raise ConfigError(
            f"tool_call_parser must be one of {names}, got {name!r}", "tool_call_parser"
        )
    return dialect.calls.parser(tools)


def required_parser(tools: Tools) -> ToolParser:
    """Return a parser for text that matches the schema of `forced_tools_schema` for the choice "required"."""
    names = {tool_name(tool) for tool in tools}
    return CallParser(_FORCED, lambda _: JsonCall(names))


class StreamedArguments:
    """A parser for text that is the arguments of one forced call. Each piece of text is a piece of the call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ToolCall]:
        """Add a piece of text, and return it as a piece of the call."""
        name = self._name
        self._name = None
        return [ToolCall(name, text)]

    def finish(self) -> list[ToolCall]:
        """Return nothing, since no text is held back."""
        return []
