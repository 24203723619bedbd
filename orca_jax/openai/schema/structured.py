"""Structured output, in OpenAI's and in vLLM's syntax."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.openai.schema.limits import MAX_CHOICE_STRINGS

JsonObject = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema."""

    name: Annotated[str | None, Meta(description="Without effect.")] = None
    schema: Annotated[JsonObject | None, Meta(description="Default: any object.")] = None
    description: Annotated[str | None, Meta(description="Without effect.")] = None
    strict: Annotated[
        bool | None,
        Meta(
            description="Refuse a keyword that cannot be enforced. Otherwise it is left out, and the header names it."
        ),
    ] = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text of any form."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object: any one, or one that matches a schema."""

    schema: Annotated[JsonObject | None, Meta(description="Default: any object.")] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The required form of the text: exactly one of these fields."""

    json: Annotated[JsonObject | str | None, Meta(description="A JSON schema, as an object or as text.")] = None
    regex: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="A regular expression that matches the whole text.")
    ] = None
    choice: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None,
        Meta(description="The text is one of these strings."),
    ] = None
    grammar: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="A context-free grammar in Lark syntax.")
    ] = None
    json_object: Annotated[bool | None, Meta(description="Only `true`: the text is any JSON object.")] = None
