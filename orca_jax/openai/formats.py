"""The form of an answer that a call asks for: its schemas, read for a grammar, and what the grammar leaves out."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.sampling import CompletionRequest
from orca_jax.openai.schema.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from orca_jax.request import StructuredOutput
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import MAX_SCHEMA, PreparedSchema, prepared
from orca_jax.text.tools import is_strict, prepared_tool

LARGE_SCHEMA = 32 * 1024  # bytes of all fields with schemas; a thread reads larger ones
SCHEMA = "response_format.json_schema.schema"
OBJECT_SCHEMA = "response_format.schema"
PARAMETERS = "tools.function.parameters"
_OUTPUTS = "structured_outputs.json"

PlainTool = Mapping[str, Any]


class AskedForm(NamedTuple):
    """The constraint on a text, and the paths of what it leaves out."""

    structured: StructuredOutput | None
    left_out: tuple[str, ...] = ()


async def reading[T](call: ChatRequest | CompletionRequest, read: Callable[[], T]) -> T:
    """The result of `read`, which reads the schemas of a call, without blocking the event loop."""
    fields = [call.response_format, call.structured_outputs, getattr(call, "tools", None)]
    if fields == [None, None, None] or len(msgspec.json.encode(fields)) < LARGE_SCHEMA:
        return read()
    return await asyncio.to_thread(read)


def asked_form(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> AskedForm:
    """The constraint on the generated text.

    Raises:
        ApiError: the fields ask for two forms, `structured_outputs` is empty, or a schema cannot be enforced.
    """
    from_format = _of_format(response_format)
    if outputs is None:
        return from_format
    if from_format.structured is not None:
        raise ApiError(400, "structured_outputs and response_format cannot be combined", "structured_outputs")
    return _of_outputs(outputs)


def enforced_tools(tools: list[PlainTool], *, is_forced: bool) -> tuple[list[PlainTool], tuple[str, ...]]:
    """The tools with parameters for a grammar, and the paths of what it leaves out.

    Args:
        tools: the tools of a call.
        is_forced: True if the arguments of all tools match their schemas, False for those with `strict` alone.

    Raises:
        ApiError: a schema is wrong, or a tool with `strict` has one that cannot be enforced.
    """
    read: list[PlainTool] = []
    left_out: dict[str, None] = {}
    for tool in tools:
        if not is_forced and not is_strict(tool):
            read.append(tool)
            continue
        where = f"tools.{tool['function']['name']}: function.parameters"
        try:
            tool, found = prepared_tool(tool)
        except WrongSchemaError as error:
            raise _refused(where, f"{error}; correct the schema") from None
        _check_strict(where, found, is_strict=is_strict(tool))
        left_out.update(dict.fromkeys(_paths(PARAMETERS, found)))
        read.append(tool)
    return read, tuple(left_out)


def moved(paths: Sequence[str], places: Mapping[str, str]) -> list[str]:
    """The paths in a body with other names of fields. `places` has the begin of a path there, by that of a chat."""
    found = []
    for path in paths:
        place = next((place for place in places if path.startswith(f"{place}.")), None)
        found.append(path if place is None else places[place] + path.removeprefix(place))
    return found


def _of_format(asked: ResponseFormat | None) -> AskedForm:
    match asked:
        case JsonObjectFormat(None):
            return AskedForm(StructuredOutput("json_object"))
        case JsonObjectFormat(dict() as schema):
            return _of_schema({"type": "object", **schema}, OBJECT_SCHEMA, is_strict=False)
        case JsonSchemaFormat(json_schema):
            schema = json_schema.schema or {"type": "object"}
            return _of_schema(schema, SCHEMA, is_strict=bool(json_schema.strict))
        case _:
            return AskedForm(None)


def _of_outputs(asked: StructuredOutputs) -> AskedForm:
    if asked.json_object is False:
        raise ApiError(400, "structured_outputs.json_object must be true", "structured_outputs.json_object")
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if len(given) != 1:
        message = "structured_outputs must have exactly one of json, regex, choice, grammar and json_object"
        raise ApiError(400, message, "structured_outputs")
    match asked:
        case StructuredOutputs(json=str() as text):
            return _of_text(text)
        case StructuredOutputs(json=dict() as schema):
            return _of_schema(schema, _OUTPUTS, is_strict=True)
        case StructuredOutputs(regex=str() as text):
            return AskedForm(StructuredOutput("regex", text))
        case StructuredOutputs(choice=list() as choices):
            return AskedForm(StructuredOutput("choice", _text(choices)))
        case StructuredOutputs(grammar=str() as text):
            return AskedForm(StructuredOutput("grammar", text))
    return AskedForm(StructuredOutput("json_object"))


def _of_text(text: str) -> AskedForm:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        schema = None
    if isinstance(schema, dict):
        return _of_schema(schema, _OUTPUTS, is_strict=True)
    return AskedForm(StructuredOutput("json_schema", text))  # the engine says what is wrong


def _of_schema(schema: Mapping[str, Any], where: str, *, is_strict: bool) -> AskedForm:
    size = len(_text(schema))
    if size > MAX_SCHEMA:
        raise _refused(where, f"it has {size} characters, and must have at most {MAX_SCHEMA}")
    try:
        found = prepared(schema)
    except WrongSchemaError as error:
        raise _refused(where, f"{error}; correct the schema") from None
    _check_strict(where, found, is_strict=is_strict)
    return AskedForm(StructuredOutput("json_schema", _text(found.schema)), tuple(_paths(where, found)))


def _check_strict(where: str, found: PreparedSchema, *, is_strict: bool) -> None:
    if not is_strict or not found.left_out:
        return
    path, reason = next(iter(found.left_out.items()))
    remedy = "change it, or leave it out" if where == _OUTPUTS else "change it, or set strict to false to leave it out"
    raise _refused(where, f"{path[:200]}: {reason}; {remedy}")


def _refused(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} cannot be used: {what}", where.partition(".")[0])


def _paths(where: str, found: PreparedSchema) -> list[str]:
    return [f"{where}.{path}" for path in (*found.left_out, *found.annotations)]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
