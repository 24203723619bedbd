"""`POST /v1/chat/completions`: what comes in."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orca_jax.openai.schema.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from orca_jax.openai.schema.sampling import NumLogprobs, SamplingFields, TokenCount
from orca_jax.openai.schema.structured import JsonObject, Name


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; images, sounds and files are not known here."""

    type: Literal["text"]  # no tag: msgspec lets the tag of a struct that stands alone be left out
    text: str


Unused = Meta(description="Not used: clients' libraries put it into messages that they send back.")

Content = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class SystemMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """What the model should do."""

    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """The same in OpenAI's newer word: templates get it as a system message."""

    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a message called, with the arguments as JSON text."""

    name: str
    arguments: str
    parsed_arguments: Annotated[Any, Unused] = None


class CalledTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the model made earlier."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Annotated[int | None, Unused] = None


class AssistantMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model said earlier; the keys of an answer's message may all come back."""

    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: Annotated[str | None, Meta(description="For templates that know it.")] = None
    refusal: Annotated[None, Unused] = None
    audio: Annotated[None, Unused] = None
    function_call: Annotated[None, Unused] = None
    annotations: Annotated[Annotated[list[Any], Meta(max_length=0)] | None, Unused] = None
    parsed: Annotated[Any, Unused] = None


class ToolMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[JsonObject | None, Meta(description="A JSON schema of an object.")] = None
    strict: Annotated[bool | None, Meta(description="A forced call matches its schema whatever this says.")] = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool, which is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tools`."""

    name: Name


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """A call for chat completions."""

    messages: Annotated[
        list[ChatMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, with text as content."),
    ]
    max_completion_tokens: Annotated[
        TokenCount | None,
        Meta(description="Generated tokens at most. Default: the model directory's, or what the context leaves."),
    ] = None
    max_tokens: Annotated[TokenCount | None, Meta(description="The older name of `max_completion_tokens`.")] = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[
        NumLogprobs | None, Meta(description="And of so many most probable ones; only with `logprobs`.")
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, Meta(description="Functions that may be called.")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Meta(
            description='"required" or a function forces a call that matches its schema; "auto", the default with '
            "tools, needs `--tool-call-parser`."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="False: the first call is the only one. Default true.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="End the prompt with the beginning of an assistant's message. Default true.")
    ] = None
    continue_final_message: Annotated[
        bool | None,
        Meta(description="Go on with the last message; needs `add_generation_prompt: false`."),
    ] = None
    chat_template_kwargs: Annotated[JsonObject | None, Meta(description="Further variables for the chat template.")] = (
        None
    )
    echo: Annotated[
        bool | None, Meta(description="Begin the answer with the last message, where that is continued.")
    ] = None

    prompt_name: ClassVar[str] = "messages"
    default_limit: ClassVar[int | None] = None  # all that the context leaves

    @property
    def limit_name(self) -> str:
        """The name by which the caller limits generated tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        """Generated tokens at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text as content, and the roles that templates know."""
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {k: v for k, v in msgspec.to_builtins(message).items() if v is not None}
    plain["content"] = content_text(message.content)
    if isinstance(message, DeveloperMessage):
        plain["role"] = "system"
    if isinstance(message, AssistantMessage):
        for name in ("annotations", "parsed"):
            plain.pop(name, None)
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: CalledTool) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def content_text(content: Content | None) -> str:
    """A message's text; parts stand on lines of their own, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
