"""Conversion of the fields of a call into engine requests, with the form that it asks for: its schemas as a grammar."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orca_jax.errors import RequestError
from orca_jax.link.wire import Submit
from orca_jax.openai.errors import ApiError, PromptTooLong
from orca_jax.openai.model import Model, Prompt, Service
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.embeddings import EmbeddingRequest
from orca_jax.openai.schema.limits import MAX_ALL_STOPS
from orca_jax.openai.schema.sampling import UNLIMITED, CompletionRequest, SamplingFields
from orca_jax.openai.schema.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from orca_jax.request import SamplingParams, StructuredOutput, Urgency, candidate_seed
from orca_jax.text.bad_words import bad_word_ids
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import MAX_SCHEMA, PreparedSchema, prepared
from orca_jax.text.tools import is_strict, prepared_tool

# Fields of a call with the name of a field in `SamplingParams`, but another form or another way there.
_CONVERTED = frozenset({"n", "max_tokens", "logprobs", "prompt_logprobs", "stop", "bad_words", "cache_salt"}) | {
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
}
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingFields.__struct_fields__ and field.name not in _CONVERTED
)
"""Fields of a call with the same name and form in `SamplingParams`."""

MAX_NAMED = 50  # wrong ids that an error names

type CompletionCall = CompletionRequest | ChatRequest
type AnyCall = CompletionCall | EmbeddingRequest


def check_fields(service: Service, call: CompletionCall, counts: Sequence[str]) -> None:
    """Check the fields that depend on the model or on the server's settings.

    `counts` names the fields with a number of log probabilities, in the order of the checks.

    Raises:
        ApiError: a field is wrong.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_ids(service.model, list(getattr(call, name) or ()), name)
    if sum(map(len, call.stops())) > MAX_ALL_STOPS:
        raise ApiError(400, f"stop must have at most {MAX_ALL_STOPS} characters in total", "stop")
    if call.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens must leave at least one token", "truncate_prompt_tokens")
    if (call.min_tokens or 0) >= service.model.context:
        message = f"min_tokens must be less than the context of {service.model.context} tokens, got {call.min_tokens}"
        raise ApiError(400, message, "min_tokens")
    check_priority(service, call)
    most = service.config.max_logprobs
    for name in counts:
        count = getattr(call, name)
        if count is not None and count > most:
            raise ApiError(400, f"{name} must be at most {most} on this server, got {count}", name)


def check_priority(service: Service, call: AnyCall) -> None:
    """Refuse a priority on a server without priorities. Raises ApiError."""
    if call.priority and service.config.engine.scheduling_policy != "priority":
        message = "priority must be 0: this server does not run with --scheduling-policy priority"
        raise ApiError(400, message, "priority", code="unsupported_parameter")


def check_ids(model: Model, ids: Sequence[int], param: str) -> None:
    """Raise ApiError if an id is not in the model's vocabulary."""
    vocab_size = model.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = [i for i in ids if not 0 <= i < vocab_size][:MAX_NAMED]
        named = f"id{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        raise ApiError(400, f"{param} contains {named}, but the model's vocabulary has only {vocab_size} ids", param)


def urgency_of(call: AnyCall, caller: str | None) -> Urgency:
    """Inputs of schedulers. The tenant is the API key, or the field `user` on a server without keys."""
    hints = None if isinstance(call, EmbeddingRequest) else call.vllm_xargs
    tenant = call.user or "" if caller is None else caller
    return Urgency(call.priority or 0, tenant, call.timeout, **({} if hints is None else msgspec.structs.asdict(hints)))


def salt_of(service: Service, call: AnyCall, caller: str | None) -> str:
    """The salt of a call's prefix-cache entries. Key digests have one length, so no salt can imitate another key."""
    salt = call.cache_salt or ""
    return salt if caller is None or not service.config.cache_salt_per_key else caller + salt


def truncated(prompt: Prompt, call: CompletionCall, context: int) -> Prompt:
    """The prompt, or its last tokens if the call sets `truncate_prompt_tokens`.

    Raises:
        ApiError: the prompt shall leave room for an answer that fills the context.
    """
    keep = call.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 0:
        limit = max(1, call.limit or 0)
        if limit >= context:
            message = (
                f"{call.limit_name} must be less than the context of {context} tokens with truncate_prompt_tokens: -1, "
                f"which leaves room for it, got {limit}"
            )
            raise ApiError(400, message, call.limit_name, code="context_length_exceeded")
        keep = context - limit
    return prompt if len(prompt.ids) <= keep else Prompt(None, prompt.ids[-keep:])


async def _bad_words(service: Service, call: CompletionCall) -> tuple[tuple[int, ...], ...]:
    """The ids of the bad words of a call. Raises ApiError."""
    words, tokenizer = call.bad_words, service.model.tokenizer
    if not words:
        return ()
    return await service.encoding(lambda: bad_word_ids(tokenizer, words), "bad_words", sum(map(len, words)))


async def engine_requests(
    service: Service,
    call: CompletionCall,
    prompts: Sequence[Prompt],
    candidates: int,
    caller: str | None,
    **fields: Any,
) -> list[Submit]:
    """`candidates` requests for each prompt, with different seeds.

    `caller` identifies the API key. `fields` are the fields of `SamplingParams` with another name or form in the call.

    Raises:
        ApiError: a field is wrong, or a prompt is too long.
    """
    model, urgency = service.model, urgency_of(call, caller)
    fields |= {"bad_token_ids": await _bad_words(service, call), "cache_salt": salt_of(service, call, caller)}
    defaults = {name: value for name, value in model.defaults.items() if name != "max_tokens"}
    given = {name: value for name in PLAIN if (value := getattr(call, name)) is not None}
    fields = defaults | given | fields
    requests: list[Submit] = []
    adapter = service.adapter_of(call.model)
    made: dict[tuple[int, int], SamplingParams] = {}
    try:
        if call.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(dict.fromkeys(call.allowed_token_ids))
        for prompt in prompts:
            max_tokens = _max_tokens(model, len(prompt.ids), call)
            for choice in range(candidates):
                key = (max_tokens, choice if call.seed is not None else 0)
                if key not in made:  # several prompts mostly share their parameters
                    made[key] = _params(fields, *key)
                requests.append(Submit(service.client.new_request_id(), prompt.ids, made[key], urgency, adapter))
    except RequestError as error:
        param = call.limit_name if error.param == "max_tokens" else error.param
        raise ApiError(400, error.message, param) from None
    return requests


def _params(fields: Mapping[str, Any], max_tokens: int, choice: int) -> SamplingParams:
    """The parameters of one candidate. The types of all values were checked when the body was parsed."""
    seed = fields.get("seed")
    if choice and isinstance(seed, int):
        fields = {**fields, "seed": candidate_seed(seed, choice)}
    return SamplingParams(max_tokens=max_tokens, **fields)


def room_of(model: Model, num_prompt: int, call: CompletionCall) -> int:
    """The number of tokens that a prompt leaves for the answer. Raises ApiError if there is none."""
    room = model.context - num_prompt
    if num_prompt == 0:
        raise ApiError(400, f"{call.prompt_name} must contain at least one token", call.prompt_name)
    if room < 1:
        message = (
            f"this model's maximum context length is {model.context} tokens, and the prompt has {num_prompt}; "
            "at least one must be left for the answer"
        )
        raise PromptTooLong(message, call.prompt_name, num_prompt, model.context - 1)
    return room


def cut_limit(call: CompletionCall, requests: Sequence[Submit]) -> int | None:
    """The limit of generated tokens if that of the call is larger than the rest of the context, else None."""
    limit = min([request.params.max_tokens for request in requests])
    return limit if call.limit is not None and call.limit > limit else None


def _max_tokens(model: Model, num_prompt: int, call: CompletionCall) -> int:
    """The maximum number of generated tokens, reduced to the rest of the context. Raises ApiError."""
    room = room_of(model, num_prompt, call)
    limit = model.defaults.get("max_tokens", call.default_limit) if call.limit is None else call.limit
    if limit is None or limit == UNLIMITED:
        return room
    return min(max(1, int(limit)), room)  # 0 only scores the prompt; the one token that is generated is dropped


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
