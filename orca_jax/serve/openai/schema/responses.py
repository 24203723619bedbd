"""The request body of `POST /v1/responses`."""

from collections.abc import Collection
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.chat import AnswerLimit
from orca_jax.serve.openai.schema.hosted import LEFT_OUT, RESULTS, HostedItem
from orca_jax.serve.openai.schema.input_items import ItemId, PlainItem
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES, MAX_NAME, MAX_PARTS, MAX_TOOLS
from orca_jax.serve.openai.schema.parse import entries
from orca_jax.serve.openai.schema.results import placeholder, text_of_url
from orca_jax.serve.openai.schema.sampling import CallerId, NumLogprobs, SamplingFields
from orca_jax.serve.openai.schema.structured import (
    JsonObject,
    JsonObjectFormat,
    Name,
    TextFormat,
    TypedObject,
)

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that has an effect."""
_TOOLS = ("function", "namespace")
_FUNCTIONS = ("function",)


def beside(known: Collection[str], most: int, least: int = 0) -> Meta:
    """Limits of a list whose objects of types other than `known` are left out. `components.py` reads the mark."""
    return Meta(min_length=least, max_length=most, extra_json_schema={"x-known-types": list(known)})


ClientId = Annotated[str, Meta(max_length=MAX_NAME)]
MetadataKey = Annotated[str, Meta(max_length=64)]
InputItem = PlainItem | HostedItem
_ITEMS = frozenset(kind.__struct_config__.tag for kind in get_args(InputItem))
_ITEM_LIST = Meta(max_length=MAX_MESSAGES, extra_json_schema={"x-left-out-types": sorted(LEFT_OUT)})


class FlatFunction(TypedObject, frozen=True, tag="function"):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Namespace(TypedObject, frozen=True, tag="namespace"):
    """Functions under a common name. The model sees each as `namespace__function`."""

    name: Name
    tools: Annotated[list[FlatFunction | None], beside(_FUNCTIONS, MAX_TOOLS)]
    description: str | None = None


class FlatNamedTool(TypedObject, frozen=True, tag="function"):
    """A function that the model must or may call."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]


class FlatAllowedTools(TypedObject, frozen=True, tag="allowed_tools"):
    """A choice among some of `tools`. The model sees no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool | None], beside(_FUNCTIONS, MAX_TOOLS, 1)]


class FlatJsonSchema(TypedObject, frozen=True, tag="json_schema"):
    """JSON that matches a schema."""

    schema: JsonObject
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | FlatJsonSchema | None = None


class ReasoningSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of reasoning. With a summary, its text is sent as one too."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed response. None has an effect."""


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """A request for a response."""

    input: str | Annotated[list[InputItem | None], _ITEM_LIST] | None = None
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    store: bool | None = None
    max_output_tokens: AnswerLimit | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Annotated[list[FlatFunction | Namespace | None], beside(_TOOLS, MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | FlatAllowedTools | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=MAX_PARTS)] | None,
        Meta(description=f"`{LOGPROBS}` returns log probabilities. Other values are ignored."),
    ] = None
    top_logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description=f"Return this many most probable tokens as well. Ignored without `{LOGPROBS}` in `include`."
        ),
    ] = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    safety_identifier: ClientId | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_response_messages: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    request_id: CallerId | None = None


_NO_TEXT = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
_NOT_READ = frozenset({*_NO_TEXT, "encrypted_content"})


def settle(values: dict[str, Any]) -> list[str]:
    """Add missing types of input items, and replace what is left out of lists by None.

    Returns:
        The names of what is left out, such as "tools.web_search".

    Raises:
        ApiError: the input has images or files, or an item of an unknown type, or `tool_choice` needs a tool that is
            left out.
    """
    left_out: list[str] = []
    for index, item in entries(values, "input"):
        left_out += _settle_item(values["input"], index, item)
    left_out += _leave_out(values, "tools", _TOOLS)
    for _, tool in entries(values, "tools"):
        left_out += (f"tools.{name}" for name in _leave_out(tool, "tools", _FUNCTIONS))
    choice = values.get("tool_choice")
    if isinstance(choice, dict):
        _check_choice(choice)
        left_out += (f"tool_choice.{name}" for name in _leave_out(choice, "tools", _FUNCTIONS))
    return list(dict.fromkeys(left_out))


def _settle_item(items: list[Any], index: int, item: dict[str, Any]) -> list[str]:
    """Settle one item of the input in its place, and return the names of what it leaves out. Raises ApiError."""
    where = f"input[{index}]"
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if "role" not in item and "id" in item else "message"
        items[index] = item = {**item, "type": kind}
    if isinstance(kind, str) and kind in LEFT_OUT:
        items[index] = None
        return [f"input.{kind}"]
    if isinstance(kind, str) and kind not in _ITEMS:
        message = f"{where}.type: items of type {kind[:100]!r} are unknown here; send their text as a message"
        raise ApiError(400, message, f"{where}.type", code="unsupported_parameter")
    _settle_parts(item, "content", where)
    if kind in RESULTS:
        left_out = _replace_parts(item, "output", _NOT_READ, {"type": "input_text"}, "text")
        _settle_parts(item, "output", where)
        return left_out
    if kind == "code_interpreter_call":
        return _replace_parts(item, "outputs", frozenset({"image"}), {"type": "logs"}, "logs")
    return []


def _replace_parts(
    item: dict[str, Any], field: str, kinds: Collection[str], part: dict[str, str], key: str
) -> list[str]:
    """Replace the parts of a result that are no text by the text of a file, or by a placeholder.

    Args:
        item: the result.
        field: its list of parts.
        kinds: types of parts to replace.
        part: a part of text, without its text.
        key: the field of its text.

    Returns:
        The names of what is left out.
    """
    left_out: list[str] = []
    for index, one in entries(item, field):
        kind = one.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            continue
        text = text_of_url(one.get("file_data"))
        if text is None:
            text = placeholder(kind)
            left_out.append(f"input.{field}.{kind}")
        item[field][index] = {**part, key: text}
    return left_out


def _leave_out(values: dict[str, Any], field: str, known: Collection[str]) -> list[str]:
    """Replace the objects in a list without a known type by None, and return their names."""
    names = []
    for index, one in entries(values, field):
        if isinstance(one.get("type"), str) and one["type"] not in known:
            values[field][index] = None
            names.append(f"{field}.{one['type']}")
    return names


def _settle_parts(item: dict[str, Any], field: str, where: str) -> None:
    """Give parts of chats their type here, and refuse parts without text. Raises ApiError."""
    for index, part in entries(item, field):
        kind = part.get("type")
        if kind == "text":  # the name of chats
            item[field][index] = {**part, "type": "input_text"}
        elif isinstance(kind, str) and kind in _NO_TEXT:
            name = f"{where}.{field}[{index}].type"
            message = f"{name}: {_NO_TEXT[kind]} are not supported; the model reads text only"
            raise ApiError(400, message, name, code="unsupported_parameter")


def _check_choice(choice: dict[str, Any]) -> None:
    kind = choice.get("type")
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        message = f"tool_choice.type: the server runs no tool of type {kind[:100]!r}; call tools in the client"
        raise ApiError(400, message, "tool_choice.type", code="unsupported_parameter")
    tools = [tool.get("type") for _, tool in entries(choice, "tools")]
    if kind == "allowed_tools" and tools and "function" not in tools:
        message = (
            "tool_choice.tools must have a function; tools of other types are not run by the server"
        )
        raise ApiError(400, message, "tool_choice.tools", code="unsupported_parameter")
