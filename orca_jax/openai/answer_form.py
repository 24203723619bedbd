"""The form of an answer: the constraint on its text, and the parser that reads it."""

from collections.abc import Callable
from typing import NamedTuple

from orca_jax.openai.conversation import ToolRules, structured_answer
from orca_jax.openai.model import Service
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.request import StructuredOutput
from orca_jax.text.reasoning import ReasoningParser, opening_of, thinking_first
from orca_jax.text.tools import ToolParser


class AnswerForm(NamedTuple):
    """How the text of an answer is made and read."""

    structured: StructuredOutput | None
    make_parser: Callable[[], ToolParser] | None  # makes a parser for each choice; None: all is text
    shows_special_tokens: bool  # the parser reads some
    has_reasoning: bool = False  # the parser separates it


def answer_form(service: Service, call: ChatRequest, rules: ToolRules, prompt: str) -> AnswerForm:
    """The form of the answers to a call. `prompt` is the text of its whole prompt.

    Raises:
        ApiError: fields of the call contradict each other.
    """
    structured = structured_answer(call, rules)
    make_calls, tags, specials = rules.make_parser, service.model.think_tags, service.model.specials
    form = AnswerForm(structured, make_calls, rules.shows_special_tokens)
    if tags is None or (opening := opening_of(prompt, tags, bool(call.continue_final_message))) == "closed":
        return form
    return AnswerForm(
        None if structured is None else thinking_first(structured, tags, opening, specials),
        lambda: ReasoningParser(tags, opening, None if make_calls is None else make_calls()),
        form.shows_special_tokens or not specials.keys().isdisjoint(tags),
        has_reasoning=True,
    )
