"""The form of an answer: the constraint on its text, and the parser that reads it."""

from collections.abc import Callable
from typing import NamedTuple

from orca_jax.openai.conversation import ToolRules
from orca_jax.openai.errors import ApiError
from orca_jax.openai.formats import AskedForm, asked_form, enforced_tools
from orca_jax.openai.model import Service
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.request import StructuredOutput
from orca_jax.text.calls.grammar import CannotEnforceError, calls_or_format, text_with_calls
from orca_jax.text.reasoning import ReasoningParser, opening_of, thinking_first
from orca_jax.text.tools import ToolParser, forced_tools_schema, is_strict


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
    if tags is None or (opening := opening_of(prompt, tags, bool(call.continue_final_message))) == "closed":
        return form
    return form._replace(
        structured=None if form.structured is None else thinking_first(form.structured, tags, opening, specials),
        make_parser=lambda: ReasoningParser(tags, opening, None if make_calls is None else make_calls()),
        shows_special_tokens=form.shows_special_tokens or not specials.keys().isdisjoint(tags),
        has_reasoning=True,
    )


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
    asked = asked_form(call.response_format, call.structured_outputs)
    if rules.make_parser is None:
        return asked, ()
    name = service.model.tool_call_parser
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
