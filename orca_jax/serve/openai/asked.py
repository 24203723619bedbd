"""A call in one form for all APIs: what it asks for. Only the module of its API reads more of it than this.

A path names a part of a call by the field of a chat. Errors carry a path, and each API has a table of names for paths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orca_jax.serve.openai.schema.sampling import SamplingFields
from orca_jax.serve.openai.schema.structured import ResponseFormat
from orca_jax.text.calls.parts import ToolParser

type TemplateMessage = dict[str, Any]
"""A message as chat templates expect it: with text as content, and without keys that were not given."""
type TemplateTool = Mapping[str, Any]
"""A tool as chat templates expect it: without keys that were not given."""


class Prompt(NamedTuple):
    """A prompt as token ids. `text` is None if the call gave ids, or if the prompt was truncated."""

    text: str | None
    ids: list[int]


@dataclass(frozen=True, slots=True)
class TemplatePrompt:
    """A prompt that the chat template renders.

    Attributes:
        messages: the messages, in order.
        hints: variables that only some templates have, by path.
        variables: further variables of the template; they replace hints of the same name.
        thoughts: names of the fields with reasoning of earlier answers, in the API of the call.
        adds_prompt: True if the text ends with the begin of an answer.
        is_continued: True if the answer continues the last message.
    """

    messages: Sequence[TemplateMessage]
    hints: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    thoughts: Sequence[str] = ()
    adds_prompt: bool = True
    is_continued: bool = False


class AskedTools(NamedTuple):
    """The tools that a call allows, and the rule for their calls."""

    listed: Sequence[TemplateTool] = ()
    # "none", "auto", "required", or the object of a named function; None: not given
    choice: str | Mapping[str, Any] | None = None
    are_parallel: bool = True  # an answer may have several calls


NO_TOOLS = AskedTools()


class ToolRules(NamedTuple):
    """The effect of a call's tools on its prompt and answer."""

    shown: Sequence[TemplateTool] = ()  # passed to the chat template
    # "required" or the named function, if a call is forced
    forced: str | Mapping[str, Any] | None = None
    make_parser: Callable[[], ToolParser] | None = None  # makes a parser of calls for each choice
    unread: tuple[str, ...] = ()  # paths without effect on this model
    shows_special_tokens: bool = False  # the markers of calls may be special tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in tokens.

    Attributes:
        answer: the most generated tokens; -1 for the rest of the context, None if not given.
        default: `answer` if neither the call nor the model has one; None for the rest of the context.
        kept: the most tokens of the prompt, of which the last ones stay; -1 for what leaves room for the answer.
    """

    answer: int | None = None
    default: int | None = None
    kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call, understood.

    Attributes:
        id: id of the answer.
        endpoint: the route, in metrics and logs.
        names: the names of its API for paths.
        fields: the fields that all APIs share.
        prompt: the conversation, or prompts with their ids.
        form: the form of the text, unless `fields` asks for one.
        stops: the stop strings.
        candidates: the number of answers to each prompt.
        logprobs: the number of most probable tokens of each generated token; None without log probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        keeps_ids: True if the answer shows token ids.
        scores_only: True if only the log probabilities of the prompt are wanted.
        unread: names of fields without effect, in its API.
    """

    id: str
    endpoint: str
    names: Mapping[str, str]
    fields: SamplingFields
    prompt: TemplatePrompt | Sequence[Prompt]
    tools: AskedTools = NO_TOOLS
    form: ResponseFormat | None = None
    limits: Limits
    stops: Sequence[str] = ()
    candidates: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    keeps_ids: bool = False
    scores_only: bool = False
    unread: Sequence[str] = ()
