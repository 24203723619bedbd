"""Conversion of messages and tools into a prompt, and the form of the answer: its constraint and its parser."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from orca_jax.errors import RequestError
from orca_jax.openai.errors import ApiError
from orca_jax.openai.model import Service
from orca_jax.openai.params import AskedForm, asked_form, enforced_tools
from orca_jax.openai.schema.chat import (
    AllowedTools,
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    DeveloperMessage,
    NamedTool,
    SystemMessage,
    Tool,
    ToolMessage,
    UserMessage,
    content_text,
    plain_messages,
)
from orca_jax.openai.schema.tokens import TokenizeRequest
from orca_jax.request import StructuredOutput
from orca_jax.text.calls.grammar import CannotEnforceError, calls_or_format, harmony_form, text_with_calls
from orca_jax.text.calls.harmony import HARMONY, HarmonyParser
from orca_jax.text.reasoning import ReasoningParser, opening_of, thinking_first
from orca_jax.text.tools import (
    ToolParser,
    check_tools,
    forced_parser,
    forced_tools_schema,
    is_strict,
    tool_name,
    tool_parser,
)

PlainTool = Mapping[str, Any]
TEMPLATE_FIELDS = ("reasoning_effort", "enable_thinking")
"""Fields of a call that are variables of some chat templates, and mean nothing for the others."""


REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Fields of a message of the assistant that a chat template may read."""


class ToolRules(NamedTuple):
    """The effect of a call's tools on its prompt and answer."""

    shown: list[PlainTool]  # passed to the chat template
    forced: str | Mapping[str, Any] | None = None  # "required" or the named function, if a call is forced
    make_parser: Callable[[], ToolParser] | None = None  # makes a parser of calls for each choice
    ignored: tuple[str, ...] = ()  # fields without effect on this model
    shows_special_tokens: bool = False  # the markers of calls may be special tokens


async def render_conversation(
    service: Service,
    messages: list[ChatMessage],
    tools: Sequence[Tool | PlainTool],
    call: ChatRequest | TokenizeRequest,
) -> str:
    """The prompt of a conversation, from the chat template. Raises ApiError."""
    _check_shown(service, messages)
    template = service.model.template
    variables = {
        name: value
        for name in TEMPLATE_FIELDS
        if (value := getattr(call, name, None)) is not None and template is not None and template.reads(name)
    }
    return await service.render(
        plain_messages(messages),
        plain_tools(tools) or None,
        add_generation_prompt=call.add_generation_prompt is not False,
        continue_final_message=bool(call.continue_final_message),
        kwargs={**variables, **(call.chat_template_kwargs or {})},
    )


def settled_system(messages: Sequence[ChatMessage], *, keeps_late: bool) -> list[ChatMessage]:
    """The messages with one system message at most at the beginning, for APIs that allow several at any place.

    Args:
        messages: the conversation.
        keeps_late: True if the chat template renders later system messages. Otherwise each is a message of the user in
            its place, joined with the messages of the user beside it. So a turn of an agent, whose calls and results
            follow, leaves the prompt of the turn before as it was.
    """
    leading = list(takewhile(_is_system, messages))
    settled: list[ChatMessage] = []
    if text := _paragraphs(leading):
        settled.append(SystemMessage(text))
    was_late = False
    for message in messages[len(leading) :]:
        is_late = _is_system(message) and not keeps_late
        if is_late and not _paragraphs([message]):
            continue
        here = UserMessage(message.content or "") if is_late else message
        if (is_late or was_late) and settled and isinstance(settled[-1], UserMessage) and isinstance(here, UserMessage):
            settled[-1] = UserMessage(_paragraphs([settled[-1], here]))
        else:
            settled.append(here)
        was_late = is_late
    return settled


def _is_system(message: ChatMessage) -> bool:
    return isinstance(message, SystemMessage | DeveloperMessage)


def _paragraphs(messages: Sequence[ChatMessage]) -> str:
    return "\n\n".join(text for message in messages if (text := content_text(message.content)))


async def share_of_tools(service: Service, call: ChatRequest, shown: Sequence[PlainTool]) -> str:
    """The size of the tools in a prompt, in words: in tokens, or in characters if it is too long to count them."""
    texts = [await render_conversation(service, call.messages, tools, call) for tools in (shown, [])]
    try:
        whole, plain = map(len, await service.encode_all(texts, "messages", False))
        unit = "tokens"
    except ApiError:
        whole, plain = map(len, texts)
        unit = "characters"
    return f"{whole - plain} of these {unit} are {len(shown)} tools"


def unread_fields(service: Service, call: ChatRequest) -> tuple[str, ...]:
    """The fields of a call for the chat template, without those used by it."""
    template = service.model.template
    given = [name for name in TEMPLATE_FIELDS if getattr(call, name) is not None]
    unread = [name for name in given if template is None or not template.reads(name)]
    if template is None or not any([template.reads(name) for name in REASONING_FIELDS]):
        answers = [message for message in call.messages if isinstance(message, AssistantMessage)]
        unread += [f"messages.{name}" for name in REASONING_FIELDS if any([getattr(one, name) for one in answers])]
    return tuple(unread)


def tool_rules(call: ChatRequest, service: Service) -> ToolRules:
    """The rules given by `tools` and `tool_choice`.

    Raises:
        ApiError: the fields contradict each other, or they require `--tool-call-parser`.
    """
    tools, choice = plain_tools(call.tools or []), call.tool_choice
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(tools, choice), choice.allowed_tools.mode
    if choice == "any":
        choice = "required"
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice forces a call, but tools is empty", "tool_choice")
        return ToolRules([])
    try:
        check_tools(tools)
        if choice == "none":
            return ToolRules([])
        if choice is None or choice == "auto":
            return _by_the_model(tools, service)
        plain: str | dict[str, Any] = msgspec.to_builtins(choice) if isinstance(choice, NamedTool) else choice
        forced_parser(tools, plain)
    except RequestError as error:
        raise ApiError(400, error.message, error.param) from None
    return ToolRules(tools, plain, lambda: forced_parser(tools, plain))


def _check_shown(service: Service, messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that the chat template would leave out. Raises ApiError."""
    shown = service.model.shown
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage) and not shown.results:
            name, what = f"messages[{index}].role", "messages of the role tool"
        elif isinstance(message, AssistantMessage) and message.tool_calls and not shown.calls:
            name, what = f"messages[{index}].tool_calls", "messages with tool calls"
        else:
            continue
        text = f"{name}: the chat template of this model leaves out {what}; send their text in a user message"
        raise ApiError(400, text, name, code="unsupported_parameter")


def plain_tools(tools: Sequence[Tool | PlainTool]) -> list[PlainTool]:
    """Tools as chat templates expect them: mappings without the keys that were not given."""
    return [tool if isinstance(tool, Mapping) else _plain(tool) for tool in tools]


def _plain(tool: Tool) -> PlainTool:
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[PlainTool], choice: AllowedTools) -> list[PlainTool]:
    """The tools that a choice allows. Raises ApiError."""
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    found = [tool for tool in tools if tool_name(tool) in allowed]
    if missing := sorted(allowed - {tool_name(tool) for tool in found}):
        raise ApiError(400, f"tool_choice names {missing[0]!r}, which is not one of the tools", "tool_choice")
    return found


def _by_the_model(tools: list[PlainTool], service: Service) -> ToolRules:
    parser_name = service.model.tool_call_parser
    if not service.model.shown.tools:  # the prompt is the same without them, and to call none is a valid choice
        service.warn_once(
            "the chat template of this model shows no tools, so calls with tools are answered without them"
        )
        return ToolRules([], ignored=("tools",))
    if parser_name is None:
        message = (
            'tool_choice "auto", the default with tools, requires a server with --tool-call-parser, since the chat '
            'template of this model has no known format of calls; this server accepts "none", "required" or a named '
            "function"
        )
        raise ApiError(400, message, "tool_choice", code="no_tool_call_parser")
    return ToolRules(tools, None, lambda: tool_parser(parser_name, tools), shows_special_tokens=True)


class AnswerForm(NamedTuple):
    """How the text of an answer is made and read."""

    structured: StructuredOutput | None
    make_parser: Callable[[], ToolParser] | None  # makes a parser for each choice; None: all is text
    shows_special_tokens: bool  # the parser reads some
    ignored: tuple[str, ...] = ()  # fields without effect on this model
    left_out: tuple[str, ...] = ()  # paths in schemas that are not enforced
    has_reasoning: bool = False  # the parser separates it


def answer_form(service: Service, call: ChatRequest, rules: ToolRules, prompt: str) -> AnswerForm:
    """The form of the answers to a call. `prompt` is the text of its whole prompt.

    Raises:
        ApiError: fields of the call contradict each other.
    """
    asked, ignored = _constraint(service, call, rules)
    make_calls, tags, specials = rules.make_parser, service.model.think_tags, service.model.specials
    form = AnswerForm(asked.structured, make_calls, rules.shows_special_tokens, ignored, asked.left_out)
    if service.model.tool_call_parser == HARMONY and rules.forced is None:
        return _of_messages(form, call, rules)
    if tags is None or (opening := opening_of(prompt, tags, bool(call.continue_final_message))) == "closed":
        return form
    return form._replace(
        structured=None if form.structured is None else thinking_first(form.structured, tags, opening, specials),
        make_parser=lambda: ReasoningParser(tags, opening, None if make_calls is None else make_calls()),
        shows_special_tokens=form.shows_special_tokens or not specials.keys().isdisjoint(tags),
        has_reasoning=True,
    )


def _of_messages(form: AnswerForm, call: ChatRequest, rules: ToolRules) -> AnswerForm:
    """The form of an answer of gpt-oss, whose parser separates calls and reasoning."""
    names, is_answer = {tool_name(tool) for tool in rules.shown}, bool(call.continue_final_message)
    make = partial(HarmonyParser, names, is_answer=is_answer)
    return form._replace(make_parser=make, shows_special_tokens=True, has_reasoning=True)


def _constraint(service: Service, call: ChatRequest, rules: ToolRules) -> tuple[AskedForm, tuple[str, ...]]:
    """The constraint on the text after the reasoning, and the ignored fields. Raises ApiError."""
    parallel = call.parallel_tool_calls is not False
    if rules.forced is not None:  # the answer is a call, without a text in a format
        if call.structured_outputs is not None:
            message = 'structured_outputs cannot be combined with a forced call: set tool_choice to "auto" or "none"'
            raise ApiError(400, message, "structured_outputs")
        tools, left_out = enforced_tools(rules.shown, is_forced=True)
        schema = forced_tools_schema(tools, rules.forced, parallel)
        return AskedForm(StructuredOutput("json_schema", schema), left_out), ()
    asked, name = asked_form(call.response_format, call.structured_outputs), service.model.tool_call_parser
    if rules.make_parser is None:
        if asked.structured is not None and name == HARMONY and not call.continue_final_message:
            asked = asked._replace(structured=harmony_form([], asked.structured, service.model.specials))
        return asked, ()
    assert name is not None, "a parser reads the calls"
    answer = asked.structured
    if answer is None and not any([is_strict(tool) for tool in rules.shown]):
        return asked, ()
    tools, _ = enforced_tools(rules.shown, is_forced=False)
    specials = service.model.specials
    try:
        if answer is None:
            return AskedForm(text_with_calls(name, tools, specials, parallel)), ()
        return asked._replace(structured=calls_or_format(name, tools, answer, specials, parallel)), ()
    except CannotEnforceError:
        ignored = ("tools.function.strict",)
        loose = [{**tool, "function": {**tool["function"], "strict": False}} for tool in tools]
        free = None if answer is None else calls_or_format(name, loose, answer, specials, parallel)
        return asked._replace(structured=free), ignored
