"""The form of an answer: the effect of tools, the constraint on the text, and its parser."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from orca_jax.serve.openai.asked import Asked, AskedTools, TemplatePrompt, TemplateTool, ToolRules
from orca_jax.serve.openai.constraints import ReadForm, asked_form, enforced_tools
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Model, Service
from orca_jax.text.calls.dialects import HARMONY
from orca_jax.text.calls.forms import CannotEnforceError, Offer
from orca_jax.text.calls.harmony import HarmonyParser
from orca_jax.text.calls.parts import ToolParser
from orca_jax.text.reasoning import ReasoningParser, ThinkTags, opening_of, thinking_first
from orca_jax.text.tools import (
    check_choice,
    check_tools,
    forced_parser,
    forced_tools_schema,
    is_strict,
    tool_name,
)
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredOutput


class AnswerForm(NamedTuple):
    """How the text of an answer is made and read."""

    structured: StructuredOutput | None = None
    # makes a parser for each choice; None: all is text
    make_parser: Callable[[], ToolParser] | None = None
    shows_special_tokens: bool = False  # the parser reads some
    unread: tuple[str, ...] = ()  # paths without effect on this model
    left_out: tuple[str, ...] = ()  # paths in schemas that are not enforced
    has_reasoning: bool = False  # the parser separates it


def tool_rules(service: Service, tools: AskedTools) -> ToolRules:
    """The effect of the tools of a call on the served model.

    Raises:
        ApiError: the fields contradict each other, or they require `--tool-call-parser`.
    """
    listed = tools.listed
    choice = tools.choice
    if not listed:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice forces a call, but tools is empty", "tool_choice")
        return ToolRules()
    try:
        check_tools(listed)
        if choice not in (None, "none", "auto"):
            check_choice(listed, choice)
    except RequestError as error:
        raise ApiError(400, error.message, error.param) from None
    if choice == "none":
        return ToolRules()
    if choice is None or choice == "auto":
        return _by_the_model(service, listed)
    return ToolRules(listed, choice, partial(forced_parser, listed, choice))


def _by_the_model(service: Service, tools: Sequence[TemplateTool]) -> ToolRules:
    # the prompt is the same without them, and to call none is a valid choice
    if not service.model.shown.tools:
        service.warn_once(
            "the chat template of this model shows no tools, so calls with tools are answered without them"
        )
        return ToolRules(unread=("tools",))
    dialect = service.model.dialect
    if dialect is None:
        message = (
            'tool_choice "auto", the default with tools, requires a server with --tool-call-parser, since the chat '
            'template of this model has no known format of calls; this server accepts "none", "required" or a named '
            "function"
        )
        raise ApiError(400, message, "tool_choice", code="no_tool_call_parser")
    make_parser = partial(dialect.calls.parser, tools)
    return ToolRules(tools, None, make_parser, shows_special_tokens=True)


def answer_form(model: Model, asked: Asked, rules: ToolRules, text: str | None) -> AnswerForm:
    """The form of the answers to a call.

    Args:
        model: the served model.
        asked: the call.
        rules: the effect of its tools.
        text: its conversation as a text; None for prompts, which are continued without reasoning and calls.

    Raises:
        ApiError: fields of the call contradict each other, or a schema cannot be enforced.
    """
    constraint, unread = _constraint(model, asked, rules)
    form = AnswerForm(
        constraint.structured,
        rules.make_parser,
        rules.shows_special_tokens,
        unread,
        constraint.left_out,
    )
    if text is None:
        return form
    if model.dialect is HARMONY and rules.forced is None:
        return _of_messages(form, rules, is_answer=_is_continued(asked))
    if model.think_tags is None:
        return form
    return _after_reasoning(form, model, model.think_tags, text, continues=_is_continued(asked))


def _is_continued(asked: Asked) -> bool:
    return isinstance(asked.prompt, TemplatePrompt) and asked.prompt.is_continued


def _of_messages(form: AnswerForm, rules: ToolRules, *, is_answer: bool) -> AnswerForm:
    """The form of an answer of gpt-oss, whose parser separates calls and reasoning."""
    names = {tool_name(tool) for tool in rules.shown}
    make = partial(HarmonyParser, names, is_answer=is_answer)
    return form._replace(make_parser=make, shows_special_tokens=True, has_reasoning=True)


def _after_reasoning(
    form: AnswerForm, model: Model, tags: ThinkTags, text: str, *, continues: bool
) -> AnswerForm:
    """The form of an answer that may begin with reasoning between tags."""
    opening = opening_of(text, tags, continues)
    if opening == "closed":
        return form
    specials = model.specials
    make_calls = form.make_parser
    structured = form.structured
    if structured is not None:
        structured = thinking_first(structured, tags, opening, specials)

    def make_parser() -> ReasoningParser:
        calls = None
        if make_calls is not None:
            calls = make_calls()
        return ReasoningParser(tags, opening, calls)

    return form._replace(
        structured=structured,
        make_parser=make_parser,
        shows_special_tokens=form.shows_special_tokens or not specials.keys().isdisjoint(tags),
        has_reasoning=True,
    )


def _constraint(model: Model, asked: Asked, rules: ToolRules) -> tuple[ReadForm, tuple[str, ...]]:
    """The constraint on the text after the reasoning, and the paths without effect. Raises ApiError."""
    outputs = asked.fields.structured_outputs
    parallel = asked.tools.are_parallel
    if rules.forced is None:
        constraint = asked_form(asked.form, outputs)
        is_message = isinstance(asked.prompt, TemplatePrompt) and not asked.prompt.is_continued
        return _with_calls(model, rules, constraint, is_message=is_message, parallel=parallel)
    # the answer is a call, without a text in a format
    if outputs is not None:
        message = 'structured_outputs cannot be combined with a forced call: set tool_choice to "auto" or "none"'
        raise ApiError(400, message, "structured_outputs")
    tools, left_out = enforced_tools(rules.shown, is_forced=True)
    schema = forced_tools_schema(tools, rules.forced, parallel)
    return ReadForm(StructuredOutput("json_schema", schema), left_out), ()


def _with_calls(
    model: Model, rules: ToolRules, constraint: ReadForm, *, is_message: bool, parallel: bool
) -> tuple[ReadForm, tuple[str, ...]]:
    """The constraint on an answer with this one on its text, and the paths without effect. Raises ApiError.

    Args:
        model: the served model.
        rules: the effect of the tools, of which the model may call any.
        constraint: the constraint on the text.
        is_message: True if the answer is a new message of a conversation.
        parallel: True if the answer may have several calls.
    """
    answer = constraint.structured
    dialect = model.dialect
    if rules.make_parser is None:
        if answer is not None and dialect is HARMONY and is_message:
            no_tools = Offer([], model.specials, parallel)
            answer = dialect.calls.constraint(no_tools, answer)
        return constraint._replace(structured=answer), ()
    if answer is None and not any(map(is_strict, rules.shown)):
        return constraint, ()
    assert dialect is not None, "a parser reads the calls"
    tools, _ = enforced_tools(rules.shown, is_forced=False)
    offer = Offer(tools, model.specials, parallel)
    try:
        return constraint._replace(structured=dialect.calls.constraint(offer, answer)), ()
    except CannotEnforceError:
        if answer is not None:
            answer = dialect.calls.constraint(offer._replace(tools=_loose(tools)), answer)
        return constraint._replace(structured=answer), ("tools.function.strict",)


def _loose(tools: Sequence[TemplateTool]) -> list[TemplateTool]:
    return [{**tool, "function": {**tool["function"], "strict": False}} for tool in tools]
