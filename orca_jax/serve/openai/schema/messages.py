"""The request body of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.cache.fields import CacheControl
from orca_jax.serve.openai.schema.chat import AnswerLimit
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from orca_jax.serve.openai.schema.parse import entries
from orca_jax.serve.openai.schema.results import placeholder, text_of_data
from orca_jax.serve.openai.schema.sampling import SamplingFields, StopStrings
from orca_jax.serve.openai.schema.structured import JsonObject, TypedObject

THREAD = "thread_unsupported_request"
"""Code of the refusal of `thread`, on which the clients go on without it."""
_REPLACED = frozenset({"image", "document", "tool_reference", "browser_state"})
_RESULT_PARTS = Meta(
    max_length=MAX_PARTS, extra_json_schema={"x-left-out-types": sorted(_REPLACED - {"document"})}
)
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class TextBlock(TypedObject, frozen=True, tag="text"):
    """A text for the model, or of it."""

    text: str
    cache_control: CacheControl | None = None


class PlainSource(TypedObject, frozen=True, tag="text"):
    """The text of a document."""

    data: str
    media_type: str | None = None


class ContentSource(TypedObject, frozen=True, tag="content"):
    """The text of a document, in blocks."""

    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


class DocumentBlock(TypedObject, frozen=True, tag="document"):
    """A document of text. The model reads its title, its context and its text."""

    source: PlainSource | ContentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(TypedObject, frozen=True, tag="search_result"):
    """A text that a search found. The model reads its title, its source and its text."""

    content: Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]
    source: str
    title: str
    cache_control: CacheControl | None = None


ReadBlock = TextBlock | DocumentBlock | SearchResultBlock


class ToolUseBlock(TypedObject, frozen=True, tag="tool_use"):
    """A tool call of the model, in a message of the assistant."""

    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None


class ToolResultBlock(TypedObject, frozen=True, tag="tool_result"):
    """The result of a tool call, in a message of the user."""

    tool_use_id: str
    content: str | Annotated[list[ReadBlock], _RESULT_PARTS] | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(TypedObject, frozen=True, tag="thinking"):
    """Reasoning before an earlier answer, in a message of the assistant. It is passed on to the chat template."""

    thinking: str
    signature: str | None = None


class RedactedBlock(TypedObject, frozen=True, tag="redacted_thinking"):
    """Encrypted reasoning of another server. The model does not see it."""

    data: str | None = None


ContentBlock = ReadBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


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
    cache_control: CacheControl | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of `tools`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning before the answer."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputSchema(TypedObject, frozen=True, tag="json_schema"):
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


_ROLES = ("user", "assistant", "system")
_TEXT = frozenset({"text"})
_READ = _TEXT | {"document", "search_result"}
_BLOCKS = _READ | {"tool_use", "tool_result", "thinking", "redacted_thinking"}
_NO_TEXT = {"image": "images", "document": "documents other than texts"}
_SOURCES = ("text", "content")


def settle(values: dict[str, Any]) -> list[str]:
    """Replace the tools of other types by None, and what has no text in the results of tools by a placeholder.

    Returns:
        The names of what is left out, such as "tools.web_search_20250305".

    Raises:
        ApiError: a role is unknown, a block of content is not text for the model, or the call is one of a thread.
    """
    if values.get("thread") is not None:
        text = (
            "thread: the server keeps no conversations; send the whole conversation without thread"
        )
        raise ApiError(400, text, "thread", code=THREAD)
    left_out: list[str] = []
    for index, message in entries(values, "messages"):
        where = f"messages[{index}]"
        role = message.get("role")
        if role is not None and role not in _ROLES:
            raise ApiError(400, f"{where}.role: must be user, assistant or system", f"{where}.role")
        left_out += _settle_blocks(message, where, _BLOCKS, frozenset())
    for index, tool in entries(values, "tools"):
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "custom":
            values["tools"][index] = None
            left_out.append(f"tools.{kind}")
    return list(dict.fromkeys(left_out))


def _settle_blocks(
    holder: dict[str, Any], where: str, known: frozenset[str], replaced: frozenset[str]
) -> list[str]:
    """Settle the blocks of `content`.

    Args:
        holder: a message, the result of a tool, or the source of a document.
        where: its path.
        known: types of blocks that it may have.
        replaced: types that become a placeholder if they have no text.

    Returns:
        The names of what is replaced.

    Raises:
        ApiError: a block has no text for the model.
    """
    left_out: list[str] = []
    for at, block in entries(holder, "content"):
        kind = block.get("type")
        name = f"{where}.content[{at}]"
        if not isinstance(kind, str):
            continue  # the decoder refuses it by name
        if kind == "document":
            _settle_source(block)
        if kind in known and (kind != "document" or _has_text(block)):
            left_out += _settle_inner(block, name, replaced)
        elif kind in replaced:
            holder["content"][at] = {"type": "text", "text": placeholder(kind)}
            left_out.append(f"{re.sub(r'\[\d+\]', '', name)}.{kind}")
        else:
            what = _NO_TEXT.get(kind, f"blocks of type {kind[:100]!r}")
            message = f"{name}.type: {what} are not supported here"
            raise ApiError(400, message, f"{name}.type", code="unsupported_parameter")
    return left_out


def _settle_inner(block: dict[str, Any], name: str, replaced: frozenset[str]) -> list[str]:
    """Settle the blocks within a block. Raises ApiError."""
    match block:
        case {"type": "tool_result"}:
            return _settle_blocks(block, name, _READ, _REPLACED)
        case {"type": "search_result"}:
            return _settle_blocks(block, name, _TEXT, replaced)
        case {"type": "document", "source": dict(source)}:
            return _settle_blocks(source, f"{name}.source", _TEXT, replaced)
        case _:
            return []


def _has_text(block: dict[str, Any]) -> bool:
    """True if the source of a document is text, or wrong, so that the decoder refuses it by name."""
    source = block.get("source")
    return not isinstance(source, dict) or source.get("type") in _SOURCES


def _settle_source(block: dict[str, Any]) -> None:
    """Decode a document of text that was sent in base64."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        text = text_of_data(source.get("media_type"), source.get("data"))
        if text is not None:
            block["source"] = {"type": "text", "data": text}
