"""Structured output, in OpenAI's and in vLLM's syntax."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import MAX_CHOICE_STRINGS
from orca_jax.request import StructuredOutput

JsonObject = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema."""

    name: Annotated[str | None, Meta(description="Without effect.")] = None
    schema: Annotated[JsonObject | None, Meta(description="Default: any object.")] = None
    description: Annotated[str | None, Meta(description="Without effect.")] = None
    strict: Annotated[bool | None, Meta(description="Without effect: the schema is always enforced.")] = None


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


def structured_output(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """The constraint on the generated text; None: any text.

    Raises:
        ApiError: the fields ask for two forms, or `structured_outputs` is empty.
    """
    from_format = _of_format(response_format)
    if outputs is None:
        return from_format
    if from_format is not None:
        raise ApiError(400, "structured_outputs and response_format cannot be combined", "structured_outputs")
    return _of_outputs(outputs)


def _of_format(asked: ResponseFormat | None) -> StructuredOutput | None:
    match asked:
        case JsonObjectFormat(None):
            return StructuredOutput("json_object")
        case JsonObjectFormat(dict() as schema):
            return StructuredOutput("json_schema", _text({"type": "object", **schema}))
        case JsonSchemaFormat(json_schema):
            return StructuredOutput("json_schema", _text(json_schema.schema or {"type": "object"}))
        case _:
            return None


def _of_outputs(asked: StructuredOutputs) -> StructuredOutput:
    if asked.json_object is False:
        raise ApiError(400, "structured_outputs.json_object must be true", "structured_outputs.json_object")
    found: list[StructuredOutput] = []
    if asked.json is not None:
        found.append(StructuredOutput("json_schema", asked.json if isinstance(asked.json, str) else _text(asked.json)))
    if asked.regex is not None:
        found.append(StructuredOutput("regex", asked.regex))
    if asked.choice is not None:
        found.append(StructuredOutput("choice", _text(asked.choice)))
    if asked.grammar is not None:
        found.append(StructuredOutput("grammar", asked.grammar))
    if asked.json_object:
        found.append(StructuredOutput("json_object"))
    if len(found) != 1:
        message = "structured_outputs must have exactly one of json, regex, choice, grammar and json_object"
        raise ApiError(400, message, "structured_outputs")
    return found[0]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
