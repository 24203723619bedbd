"""The request body of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.chat import AnswerLimit
from orca_jax.openai.schema.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from orca_jax.openai.schema.parse import entries
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
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning before an earlier answer, in a message of the assistant. It is passed on to the chat template."""

    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server. The model does not see it."""

    data: str | None = None


ContentBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class TurnMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message. Messages of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)]
    clear_at: Literal["next_user_message", "never"] | None = None


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: ToolName
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of `tools`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning before the answer."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    schema: JsonObject


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort for it."""

    format: OutputSchema | None = None
    effort: str | None = None


class MessagesRequest(SamplingFields, frozen=True, kw_only=True):
    """A request for a message, or for the number of tokens of its prompt."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    max_tokens: AnswerLimit | None = None
    stop_sequences: StopStrings | None = None
    tools: Annotated[list[CustomTool | None], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None
    chat_template_kwargs: JsonObject | None = None

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
    for index, message in entries(values, "messages"):
        where = f"messages[{index}]"
        role = message.get("role")
        if role is not None and role not in _ROLES:
            raise ApiError(400, f"{where}.role: must be user, assistant or system", f"{where}.role")
        for at, block in entries(message, "content"):
            _check_block(block, _BLOCKS, f"{where}.content[{at}]")
            for inner, part in entries(block, "content"):
                _check_block(part, frozenset({"text"}), f"{where}.content[{at}].content[{inner}]")
    left_out = []
    for index, tool in entries(values, "tools"):
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "custom":
            values["tools"][index] = None
            left_out.append(f"tools.{kind}")
    return left_out


def _check_block(block: dict[str, Any], known: frozenset[str], where: str) -> None:
    kind = block.get("type")
    if not isinstance(kind, str) or kind in known:
        return
    what = _NO_TEXT.get(kind, f"blocks of type {kind[:100]!r}")
    name = f"{where}.type"
    raise ApiError(400, f"{name}: {what} are not supported here", name, code="unsupported_parameter")
