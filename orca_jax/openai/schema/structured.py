"""What the text must match, in OpenAI's and in vLLM's words."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import MAX_CHOICE_STRINGS
from orca_jax.request import StructuredOutput

JsonObject = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named schema."""

    name: Annotated[Name, Meta(description="For the client's own books.")]
    schema: Annotated[JsonObject | None, Meta(description="Default: any object.")] = None
    description: Annotated[str | None, Meta(description="For the client's own books.")] = None
    strict: Annotated[bool | None, Meta(description="The schema is enforced whatever this says.")] = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of one schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: Annotated[JsonObject | str | None, Meta(description="A JSON schema, or its text.")] = None
    regex: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="A regular expression for the whole text.")
    ] = None
    choice: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None,
        Meta(description="The text is one of these."),
    ] = None
    grammar: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="A context-free grammar in Lark's notation.")
    ] = None
    json_object: Annotated[bool | None, Meta(description="Only `true`: any JSON object.")] = None


def structured_output(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """What is asked for; None: any text.

    Raises:
        ApiError: two things are asked for, or nothing definite.
    """
    from_format = _of_format(response_format)
    if outputs is None:
        return from_format
    if from_format is not None:
        raise ApiError(400, "structured_outputs and response_format cannot be combined", "structured_outputs")
    return _of_outputs(outputs)


def _of_format(asked: ResponseFormat | None) -> StructuredOutput | None:
    match asked:
        case JsonObjectFormat():
            return StructuredOutput("json_object")
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
