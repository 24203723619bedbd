"""The input items of `POST /v1/responses` that a chat has too."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.cache.fields import CacheBreakpoint
from orca_jax.serve.openai.schema.limits import MAX_NAME, MAX_PARTS
from orca_jax.serve.openai.schema.structured import TypedObject

ItemId = Annotated[str, Meta(max_length=MAX_NAME)]


class InputText(TypedObject, frozen=True, omit_defaults=True, tag="input_text"):
    """A text part of the input."""

    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputText(TypedObject, frozen=True, tag="output_text"):
    """A text part of an earlier answer."""

    text: str


class RefusalPart(TypedObject, frozen=True, tag="refusal"):
    """A refusal in an earlier answer. The chat template receives it as text."""

    refusal: str


class InputMessage(TypedObject, frozen=True, tag="message"):
    """A message. Its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | OutputText | RefusalPart], Meta(max_length=MAX_PARTS)]
    id: ItemId | None = None


class InputCall(TypedObject, frozen=True, tag="function_call"):
    """An earlier call of a function, with its arguments as JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: ItemId | None = None


class CallOutput(TypedObject, frozen=True, tag="function_call_output"):
    """The result of an earlier call."""

    call_id: str
    output: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]
    id: ItemId | None = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(TypedObject, frozen=True, tag="reasoning"):
    """Reasoning before an earlier answer. Its text, else its summary, is passed on to the chat template."""

    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    id: ItemId | None = None


class ItemReference(TypedObject, frozen=True, tag="item_reference"):
    """An item of an earlier, stored response. Its `type` may be left out."""

    id: ItemId


PlainItem = InputMessage | InputCall | CallOutput | InputReasoning | ItemReference
