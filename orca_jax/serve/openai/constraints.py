"""The constraints that the formats, the schemas and the strict tools of a call are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orca_jax.serve.openai.asked import TemplateTool
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import MAX_SCHEMA, PreparedSchema, prepared
from orca_jax.text.tools import is_strict, prepared_tool
from orca_jax.values.errors import UNREADABLE
from orca_jax.values.request import StructuredOutput

SCHEMA = "response_format.json_schema.schema"
OBJECT_SCHEMA = "response_format.schema"
OUTPUTS_SCHEMA = "structured_outputs.json"
PARAMETERS = "tools.function.parameters"


class ReadForm(NamedTuple):
    """The constraint on a text, and the paths of what it leaves out."""

    structured: StructuredOutput | None
    left_out: tuple[str, ...] = ()


def asked_form(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> ReadForm:
    """The constraint on the generated text.

    Raises:
        ApiError: the fields ask for two forms, `structured_outputs` is empty, or a schema cannot be enforced.
    """
    from_format = _of_format(response_format)
    if outputs is None:
        return from_format
    if from_format.structured is not None:
        raise ApiError(
            400, "structured_outputs and response_format cannot be combined", "structured_outputs"
        )
    return _of_outputs(outputs)


def _of_format(asked: ResponseFormat | None) -> ReadForm:
    match asked:
        case JsonObjectFormat(None):
            return ReadForm(StructuredOutput("json_object"))
        case JsonObjectFormat(dict() as schema):
            return _of_schema({"type": "object", **schema}, OBJECT_SCHEMA, is_strict=False)
        case JsonSchemaFormat(json_schema):
            schema = json_schema.schema or {"type": "object"}
            return _of_schema(schema, SCHEMA, is_strict=bool(json_schema.strict))
        case _:
            return ReadForm(None)


def _of_outputs(asked: StructuredOutputs) -> ReadForm:
    if asked.json_object is False:
        raise ApiError(
            400, "structured_outputs.json_object must be true", "structured_outputs.json_object"
        )
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if len(given) != 1:
        message = "structured_outputs must have exactly one of json, regex, choice, grammar and json_object"
        raise ApiError(400, message, "structured_outputs")
    match asked:
        case StructuredOutputs(json=str() as text):
            return _of_text(text)
        case StructuredOutputs(json=dict() as schema):
            return _of_schema(schema, OUTPUTS_SCHEMA, is_strict=True)
        case StructuredOutputs(regex=str() as text):
            return ReadForm(StructuredOutput("regex", text))
        case StructuredOutputs(choice=list() as choices):
            return ReadForm(StructuredOutput("choice", _text(choices)))
        case StructuredOutputs(grammar=str() as text):
            return ReadForm(StructuredOutput("grammar", text))
    return ReadForm(StructuredOutput("json_object"))


def _of_text(text: str) -> ReadForm:
    try:
        schema = msgspec.json.decode(text)
    except UNREADABLE:
        schema = None
    if isinstance(schema, dict):
        return _of_schema(schema, OUTPUTS_SCHEMA, is_strict=True)
    return ReadForm(StructuredOutput("json_schema", text))  # the engine says what is wrong


def _of_schema(schema: Mapping[str, Any], where: str, *, is_strict: bool) -> ReadForm:
    _check_size(schema, where)
    try:
        found = prepared(schema)
    except WrongSchemaError as error:
        raise _refused(where, f"{error}; correct the schema") from None
    if is_strict:
        _check_strict(where, found)
    structured = StructuredOutput("json_schema", _text(found.schema))
    return ReadForm(structured, tuple(_paths(where, found)))


def enforced_tools(
    tools: Sequence[TemplateTool], *, is_forced: bool
) -> tuple[list[TemplateTool], tuple[str, ...]]:
    """The tools with parameters for a grammar, and the paths of what it leaves out.

    Args:
        tools: the tools of a call.
        is_forced: True if the arguments of all tools match their schemas, False for tools with `strict` alone.

    Raises:
        ApiError: a schema is wrong, or a tool with `strict` has one that cannot be enforced.
    """
    read: list[TemplateTool] = []
    left_out: dict[str, None] = {}
    for tool in tools:
        if not is_forced and not is_strict(tool):
            read.append(tool)
            continue
        where = f"tools.{tool['function']['name']}: function.parameters"
        _check_size(tool["function"].get("parameters"), where)
        try:
            tool, found = prepared_tool(tool)
        except WrongSchemaError as error:
            raise _refused(where, f"{error}; correct the schema") from None
        if is_strict(tool):
            _check_strict(where, found)
        left_out.update(dict.fromkeys(_paths(PARAMETERS, found)))
        read.append(tool)
    return read, tuple(left_out)


def _check_size(schema: object, where: str) -> None:
    size = len(_text(schema))
    if size > MAX_SCHEMA:
        raise _refused(where, f"it has {size} characters, and must have at most {MAX_SCHEMA}")


def _check_strict(where: str, found: PreparedSchema) -> None:
    if not found.left_out:
        return
    path, reason = next(iter(found.left_out.items()))
    remedy = "change it, or set strict to false to leave it out"
    if where == OUTPUTS_SCHEMA:
        remedy = "change it, or leave it out"
    raise _refused(where, f"{path[:200]}: {reason}; {remedy}")


def _refused(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} cannot be used: {what}", where.partition(".")[0])


def _paths(where: str, found: PreparedSchema) -> list[str]:
    return [f"{where}.{path}" for path in (*found.left_out, *found.annotations)]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
