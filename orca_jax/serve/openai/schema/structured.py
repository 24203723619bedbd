"""Structured output, in OpenAI's and in vLLM's syntax."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.limits import MAX_CHOICE_STRINGS

JsonObject = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TypedObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """An object of JSON whose `type` names its form. Each form gives its `tag`."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema."""

    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(TypedObject, frozen=True, tag="text"):
    """Text of any form."""


class JsonObjectFormat(TypedObject, frozen=True, omit_defaults=True, tag="json_object"):
    """A JSON object: any one, or one that matches a schema."""

    schema: JsonObject | None = None


class JsonSchemaFormat(TypedObject, frozen=True, tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The required form of the text: exactly one of these fields."""

    json: JsonObject | str | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Meta(min_length=1)]],
            Meta(min_length=1, max_length=MAX_CHOICE_STRINGS),
        ]
        | None
    ) = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None
