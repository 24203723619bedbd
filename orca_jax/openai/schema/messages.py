"""The request body of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.chat import AnswerLimit
from orca_jax.openai.schema.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from orca_jax.openai.schema.sampling import SamplingFields, StopStrings
from orca_jax.openai.schema.structured import JsonObject

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text for the model, or of it."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A tool call of the model, in a message of the assistant."""

    id: str
    name: str
    input: JsonObject


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a tool call, in a message of the user."""

    tool_use_id: str
    content: Annotated[
        str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None,
        Meta(description="Text for the model. All results of a turn come before its texts."),
    ] = None


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning before an earlier answer, in a message of the assistant. It is passed on to the chat template."""

    thinking: str
    signature: Annotated[str | None, Meta(description="Without effect.")] = None


class RedactedBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server. The model does not see it."""

    data: Annotated[str | None, Meta(description="Without effect.")] = None


ContentBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class TurnMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message. Messages of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)]
    clear_at: Annotated[
        Literal["next_user_message", "never"] | None,
        Meta(
            description="Of a message of the role `system`: `next_user_message` leaves it out once a message of the "
            "user follows. Default `never`."
        ),
    ] = None


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: ToolName
    input_schema: Annotated[JsonObject, Meta(description="JSON schema of the input, an object.")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Annotated[bool | None, Meta(description="As in `tools` of a chat.")] = None


class MessagesToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of `tools`."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        Meta(description="`any` forces a call, and `tool` a call of the tool `name`. Default `auto`."),
    ]
    name: Annotated[ToolName | None, Meta(description="One of `tools`. Required with type `tool`.")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, Meta(description="If true, only the first call is returned. Default false.")
    ] = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning before the answer."""

    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        Meta(
            description="Sets the variable `enable_thinking` of the chat template: false for `disabled`, else true. "
            "Ignored if the template does not use it."
        ),
    ]


class OutputSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    schema: JsonObject


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort for it."""

    format: Annotated[OutputSchema | None, Meta(description="The format is enforced.")] = None
    effort: Annotated[
        str | None,
        Meta(description="Variable `reasoning_effort` of the chat template; ignored if the template does not use it."),
    ] = None


class MessagesRequest(SamplingFields, frozen=True, kw_only=True):
    """A request for a message, or for the number of tokens of its prompt."""

    messages: Annotated[
        list[TurnMessage],
        Meta(
            min_length=1,
            max_length=MAX_MESSAGES,
            description="The conversation. The answer continues a last message of the assistant. A later message of "
            "the role `system` stays as it is if the chat template renders it there; otherwise it is a message "
            "of the user.",
        ),
    ]
    system: Annotated[
        str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None,
        Meta(
            description="Instructions for the model. A first block that begins with `x-anthropic-billing-header:` is "
            "left out, since it differs in each call and would keep the prefix cache from being used."
        ),
    ] = None
    max_tokens: Annotated[
        AnswerLimit | None,
        Meta(
            description="Maximum number of generated tokens; -1: the rest of the context. Default: the model's "
            "`generation_config.json`, else the rest of the context."
        ),
    ] = None
    stop_sequences: Annotated[
        StopStrings | None, Meta(description="Strings that end the text, in addition to those of `stop`.")
    ] = None
    tools: Annotated[
        Annotated[list[CustomTool | None], Meta(max_length=MAX_TOOLS)] | None,
        Meta(
            description="Tools that the model may call. Tools of other types, which Anthropic defines, are left out, "
            "and named in the header of ignored fields."
        ),
    ] = None
    tool_choice: Annotated[MessagesToolChoice | None, Meta(description="The use of `tools`.")] = None
    thinking: Annotated[ThinkingConfig | None, Meta(description="Reasoning before the answer.")] = None
    output_config: Annotated[OutputConfig | None, Meta(description="The form of the answer.")] = None
    output_format: Annotated[OutputSchema | None, Meta(description="Older name of `output_config.format`.")] = None
    chat_template_kwargs: Annotated[
        JsonObject | None, Meta(description="Additional variables for the chat template.")
    ] = None

    prompt_name: ClassVar[str] = "messages"

    @property
    def format(self) -> OutputSchema | None:
        """The required form of the answer."""
        return (
            self.output_format
            if self.output_config is None or not self.output_config.format
            else self.output_config.format
        )

    def all_stops(self) -> list[str]:
        """The stop strings of both fields."""
        return [*(self.stop_sequences or ()), *self.stops()]


_ROLES = ("user", "assistant", "system")
_BLOCKS = frozenset({"text", "tool_use", "tool_result", "thinking", "redacted_thinking"})
_NO_TEXT = {"image": "images", "document": "documents", "search_result": "search results"}


def settle(values: dict[str, Any]) -> list[str]:
    """Replace the tools of other types by None.

    Returns:
        Their names, such as "tools.web_search_20250305".

    Raises:
        ApiError: a role is unknown, or a block of content is not text for the model.
    """
    for index, message in _entries(values, "messages"):
        where = f"messages[{index}]"
        role = message.get("role")
        if role is not None and role not in _ROLES:
            raise ApiError(400, f"{where}.role: must be user, assistant or system", f"{where}.role")
        for at, block in _entries(message, "content"):
            _check_block(block, _BLOCKS, f"{where}.content[{at}]")
            for inner, part in _entries(block, "content"):
                _check_block(part, frozenset({"text"}), f"{where}.content[{at}].content[{inner}]")
    left_out = []
    for index, tool in _entries(values, "tools"):
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "custom":
            values["tools"][index] = None
            left_out.append(f"tools.{kind}")
    return left_out


def _entries(values: dict[str, Any], field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a list, with their indices."""
    found = values.get(field)
    if isinstance(found, list):
        yield from ((index, one) for index, one in enumerate(found) if isinstance(one, dict))


def _check_block(block: dict[str, Any], known: frozenset[str], where: str) -> None:
    kind = block.get("type")
    if not isinstance(kind, str) or kind in known:
        return
    what = _NO_TEXT.get(kind, f"blocks of type {kind[:100]!r}")
    name = f"{where}.type"
    raise ApiError(400, f"{name}: {what} are not supported here", name, code="unsupported_parameter")
