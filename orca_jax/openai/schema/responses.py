"""The request body of `POST /v1/responses`."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.chat import AnswerLimit
from orca_jax.openai.schema.limits import MAX_MESSAGES, MAX_NAME, MAX_PARTS, MAX_TOOLS
from orca_jax.openai.schema.parse import entries
from orca_jax.openai.schema.sampling import CallerId, NumLogprobs, SamplingFields
from orca_jax.openai.schema.structured import JsonObject, JsonObjectFormat, Name, TextFormat

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that has an effect."""
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TOOLS = ("function", "namespace")
_FUNCTIONS = ("function",)


def beside(known: Collection[str], most: int, least: int = 0) -> Meta:
    """Limits of a list whose objects of types other than `known` are left out. `components.py` reads the mark."""
    return Meta(min_length=least, max_length=most, extra_json_schema={"x-known-types": list(known)})


ItemId = Annotated[str, Meta(max_length=MAX_NAME)]
MetadataKey = Annotated[str, Meta(max_length=64)]


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A text part of the input."""

    text: str


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A text part of an earlier answer."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer. The chat template receives it as text."""

    refusal: str


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    """A message. Its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | OutputText | RefusalPart], Meta(max_length=MAX_PARTS)]
    id: ItemId | None = None


class InputCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    """An earlier call of a function, with its arguments as JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: ItemId | None = None


class CallOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    """The result of an earlier call."""

    call_id: str
    output: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]
    id: ItemId | None = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    """Reasoning before an earlier answer. Its text, else its summary, is passed on to the chat template."""

    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    id: ItemId | None = None


class ItemReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="item_reference"):
    """An item of an earlier, stored response. Its `type` may be left out."""

    id: ItemId


InputItem = InputMessage | InputCall | CallOutput | InputReasoning | ItemReference


class FlatFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """Functions under a common name. The model sees each as `namespace__function`."""

    name: Name
    tools: Annotated[list[FlatFunction | None], beside(_FUNCTIONS, MAX_TOOLS)]
    description: str | None = None


class FlatNamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function that the model must or may call."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]


class FlatAllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A choice among some of `tools`. The model sees no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool | None], beside(_FUNCTIONS, MAX_TOOLS, 1)]


class FlatJsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    schema: JsonObject
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | FlatJsonSchema | None = None


class ReasoningSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of reasoning."""

    effort: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed response. None has an effect."""


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """A request for a response."""

    input: str | Annotated[list[InputItem | None], beside(_ITEMS, MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    store: bool | None = None
    max_output_tokens: AnswerLimit | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Annotated[list[FlatFunction | Namespace | None], beside(_TOOLS, MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | FlatAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=MAX_PARTS)] | None,
        Meta(description=f"`{LOGPROBS}` returns log probabilities. Other values are ignored."),
    ] = None
    top_logprobs: Annotated[
        NumLogprobs | None,
        Meta(description=f"Return this many most probable tokens as well. Ignored without `{LOGPROBS}` in `include`."),
    ] = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_response_messages: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    request_id: CallerId | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has log probabilities."""
        return LOGPROBS in (self.include or ())

    def items(self) -> list[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage("user", self.input)]
        return [item for item in self.input or () if item is not None]


_NO_TEXT = {"input_image": "images", "input_file": "files", "input_audio": "audio"}


def settle(values: dict[str, Any]) -> list[str]:
    """Add missing types of input items, and replace what is left out of lists by None.

    Returns:
        The names of what is left out, such as "tools.web_search".

    Raises:
        ApiError: the input has images or files, or `tool_choice` needs a tool that is left out.
    """
    left_out: list[str] = []
    for index, item in entries(values, "input"):
        if item.get("type") is None:
            kind = "item_reference" if "role" not in item and "id" in item else "message"
            values["input"][index] = {**item, "type": kind}
        for field in ("content", "output"):
            _refuse_parts(item, field, f"input[{index}]")
    left_out += _leave_out(values, "input", _ITEMS)
    left_out += _leave_out(values, "tools", _TOOLS)
    for _, tool in entries(values, "tools"):
        left_out += (f"tools.{name}" for name in _leave_out(tool, "tools", _FUNCTIONS))
    choice = values.get("tool_choice")
    if isinstance(choice, dict):
        _check_choice(choice)
        left_out += (f"tool_choice.{name}" for name in _leave_out(choice, "tools", _FUNCTIONS))
    return left_out


def _leave_out(values: dict[str, Any], field: str, known: Collection[str]) -> list[str]:
    """Replace the objects in a list without a known type by None, and return their names."""
    names = []
    for index, one in entries(values, field):
        if isinstance(one.get("type"), str) and one["type"] not in known:
            values[field][index] = None
            names.append(f"{field}.{one['type']}")
    return names


def _refuse_parts(item: dict[str, Any], field: str, where: str) -> None:
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
        message = "tool_choice.tools must have a function; tools of other types are not run by the server"
        raise ApiError(400, message, "tool_choice.tools", code="unsupported_parameter")
