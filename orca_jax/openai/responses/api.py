"""A response from its body: the store of earlier ones, the conversation, the job of its chat, and its renderer."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from orca_jax.openai import chat
from orca_jax.openai.conversation import settled_system, tool_rules
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Job
from orca_jax.openai.model import Service
from orca_jax.openai.params import moved
from orca_jax.openai.responses.conversion import FIELDS, PLACES, FlatTools, chat_of, tools_of
from orca_jax.openai.responses.items import (
    ModelResponse,
    ShownFunction,
    ShownNamespace,
    new_id,
    shown_function,
    with_ids,
)
from orca_jax.openai.responses.renderer import ResponseRenderer
from orca_jax.openai.responses.telemetry import Telemetry
from orca_jax.openai.responses.truncation import shortened
from orca_jax.openai.schema.answers import Usage
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.responses import LOGPROBS, FlatFunction, InputItem, ItemReference, ResponsesRequest

ENDPOINT = "/v1/responses"
RESPONSE_BYTES, ITEM_BYTES = 1024, 256  # for the objects of Python around a response and around the id of an item
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[InputItem]).decode

type Caller = str | None
"""The key of a call, None on a server without keys."""


class StoredResponse(NamedTuple):
    """A response, with its own input and output as items of JSON."""

    answer: bytes
    inputs: bytes
    outputs: bytes
    previous: str | None  # the response before it
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The memory that it counts for."""
        texts = len(self.answer) + len(self.inputs) + len(self.outputs)
        return RESPONSE_BYTES + texts + sum(ITEM_BYTES + len(name) for name in self.item_ids)

    def input_items(self) -> list[InputItem]:
        """The items of its own input."""
        return _decode(self.inputs)

    def items(self) -> list[InputItem]:
        """The items of its own input and output."""
        return _decode(self.inputs) + _decode(self.outputs)


def stored_response(
    answer: bytes, inputs: Sequence[InputItem], outputs: Sequence[InputItem], previous: str | None
) -> StoredResponse:
    """A response to store; all items have ids."""
    ids = tuple(item.id for item in (*inputs, *outputs) if item.id)
    return StoredResponse(answer, _encode(inputs), _encode(outputs), previous, ids)


class ResponseStore:
    """The stored responses. A caller finds its own ones only.

    Args:
        max_bytes: the most memory for all responses together; with 0, none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: dict[tuple[Caller, str], StoredResponse] = {}  # the least recently used one first
        self._places: dict[tuple[Caller, str], str] = {}  # of an item -> its response

    def put(self, caller: Caller, name: str, stored: StoredResponse) -> None:
        """Add a response. Others leave for it; one that is larger than the whole store is not added."""
        if stored.num_bytes > self.max_bytes:
            return
        self._responses[caller, name] = stored
        self.num_bytes += stored.num_bytes
        self._places.update(((caller, item), name) for item in stored.item_ids)
        while self.num_bytes > self.max_bytes:
            self.delete(*next(iter(self._responses)))

    def get(self, caller: Caller, name: str) -> StoredResponse | None:
        """A response, or None if it is not there."""
        found = self._responses.pop((caller, name), None)
        if found is not None:
            self._responses[caller, name] = found
        return found

    def delete(self, caller: Caller, name: str) -> bool:
        """Remove a response. False if it is not there."""
        found = self._responses.pop((caller, name), None)
        if found is None:
            return False
        self.num_bytes -= found.num_bytes
        for item in found.item_ids:
            if self._places.get((caller, item)) == name:
                del self._places[caller, item]
        return True

    def history(self, caller: Caller, name: str) -> list[InputItem] | None:
        """The conversation up to a response, or None if a response of it is not there."""
        found: list[StoredResponse] = []
        previous: str | None = name
        while previous is not None:
            stored = self.get(caller, previous)
            if stored is None:
                return None
            found.append(stored)
            previous = stored.previous
        return [item for stored in reversed(found) for item in stored.items()]

    def items(self, caller: Caller, names: Iterable[str]) -> dict[str, InputItem]:
        """The items with these ids, without those that are not there. Each response of them is read once."""
        wanted: dict[str, set[str]] = {}
        for name in names:
            if (place := self._places.get((caller, name))) is not None:
                wanted.setdefault(place, set()).add(name)
        found: dict[str, InputItem] = {}
        for place, ids in wanted.items():
            stored = self.get(caller, place)
            assert stored is not None, f"{place} left without its items"
            found |= {item.id: item for item in stored.items() if item.id in ids}
        return found


class ResponseCall:
    """One call, with the items of its conversation and the functions of its tools.

    Raises:
        ApiError: a stored response or item is lost, or a field is wrong.
    """

    def __init__(self, service: Service, store: ResponseStore, call: ResponsesRequest, caller: Caller) -> None:
        self.call = call
        self._service, self._store, self._caller = service, store, caller
        self._history = self._found_history()
        self._own = with_ids(self._resolved(call.items()))
        self._tools: FlatTools = tools_of(call)
        self.begun = self._response()

    def _ignored(self) -> list[str]:
        """The fields of the call that have no effect on this server or beside its other fields."""
        call = self.call
        asked = set(call.include or ()) - {LOGPROBS}
        return [
            *(["include"] if asked else ()),
            *(["top_logprobs"] if call.top_logprobs is not None and not call.wants_logprobs else ()),
            *(["store"] if call.store and not self._store.max_bytes else ()),
            *(name for name in ("timings_per_token", "return_progress") if getattr(call, name) and not call.stream),
        ]

    async def job(self, name: str) -> Job:
        """The prepared call; `name` appears in logs. Raises ApiError."""
        try:
            call = self._chat()
            if self.call.truncation == "auto":
                call = await shortened(self._service, call)
            job = await chat.prepare(self._service, call, name, self._caller)
        except ApiError as error:
            raise error.renamed(FIELDS) from None
        renamed = {param: FIELDS.get(field, field) for param, field in (job.renamed or {}).items()}
        ignored = [
            *self._ignored(),
            *(FIELDS.get(name, name) for name in job.ignored if name != "reasoning_effort" or not self._stops_thinking),
        ]
        left_out = moved(job.left_out, PLACES)
        return dataclasses.replace(
            job, id=self.begun.id, endpoint=ENDPOINT, renamed=renamed, ignored=ignored, left_out=left_out
        )

    async def num_tokens(self) -> int:
        """The number of tokens of the prompt. Raises ApiError."""
        try:
            call = self._chat()
            chat.check_call(self._service, call)
            rules = tool_rules(call, self._service)
            return len((await chat.prompt_of(self._service, call, rules)).ids)
        except ApiError as error:
            raise error.renamed(FIELDS) from None

    def renderer(self, job: Job | None = None, usage: Callable[[], Usage] | None = None) -> ResponseRenderer:
        """A renderer for the answer, with the token counts so far; without a job for a failure alone."""
        call = self.call
        has_timings, has_progress = bool(call.timings_per_token), bool(call.return_progress)
        telemetry = None
        if usage is not None and call.stream and (has_timings or has_progress):
            telemetry = Telemetry(usage, has_timings=has_timings, has_progress=has_progress)
        return ResponseRenderer(
            self.begun,
            self._service.model.tokenizer,
            num_top=(call.top_logprobs or 0) if call.wants_logprobs else None,
            names=self._tools.names,
            new_call_id=partial(chat.call_id, job) if job is not None else partial(new_id, "call"),
            prompt=job.prompts[0].ids if job is not None and call.enable_response_messages else None,
            streams=bool(call.stream),
            telemetry=telemetry,
            keep=self._keep,
        )

    def _chat(self) -> ChatRequest:
        items = [*self._history, *self._own]
        if not items:
            raise ApiError(400, "input must have at least one item", "input", code="missing_required_parameter")
        call = chat_of(self.call, items, self._tools)
        model = self._service.model
        messages = settled_system(call.messages, keeps_late=model.keeps_late_system)
        return msgspec.structs.replace(call, messages=messages, enable_thinking=False if self._stops_thinking else None)

    @property
    def _stops_thinking(self) -> bool:
        """True if the call wants no reasoning, and the template has a variable for that."""
        reasoning, template = self.call.reasoning, self._service.model.template
        is_none = reasoning is not None and reasoning.effort == "none"
        return is_none and template is not None and template.reads("enable_thinking")

    def _found_history(self) -> list[InputItem]:
        name = self.call.previous_response_id
        if name is None:
            return []
        found = self._store.history(self._caller, name)
        if found is None:
            message = f"Previous response with id {name[:100]!r} not found: {_lost(self._store)}"
            raise ApiError(400, message, "previous_response_id", code="previous_response_not_found")
        return found

    def _resolved(self, items: Sequence[InputItem]) -> list[InputItem]:
        """The items, stored ones in the place of references."""
        names = Counter(item.id for item in items if isinstance(item, ItemReference))
        found = self._store.items(self._caller, names)
        for name, count in names.items():
            if name not in found:
                message = f"Item with id {name[:100]!r} not found: {_lost(self._store)}"
                raise ApiError(404, message, "input", code="item_not_found")
            if count > 1:  # a short body could repeat a large item very often
                raise ApiError(400, f"input refers to item {name[:100]!r} {count} times; send it once", "input")
        return [found[item.id] if isinstance(item, ItemReference) else item for item in items]

    def _keep(self, response: ModelResponse, answer: bytes) -> None:
        if self.call.store is not False and self._store.max_bytes:
            outputs = [item.as_input() for item in response.output]
            stored = stored_response(answer, self._own, outputs, self.call.previous_response_id)
            self._store.put(self._caller, response.id, stored)

    def _response(self) -> ModelResponse:
        call, service = self.call, self._service
        defaults = service.model.defaults
        effort = None if call.reasoning is None else call.reasoning.effort
        format_ = None if call.text is None else call.text.format
        return ModelResponse(
            id=new_id("resp"),
            created_at=int(time.time()),
            instructions=call.instructions,
            max_output_tokens=call.max_output_tokens,
            metadata=call.metadata or {},
            model=service.adapter_of(call.model) or service.names[0],
            parallel_tool_calls=call.parallel_tool_calls is not False,
            previous_response_id=call.previous_response_id,
            reasoning={"effort": effort, "summary": None},
            temperature=float(defaults.get("temperature", 1.0) if call.temperature is None else call.temperature),
            text={"format": {"type": "text"} if format_ is None else format_},
            tool_choice=call.tool_choice or "auto",
            tools=_shown_tools(call),
            top_logprobs=call.top_logprobs or 0,
            top_p=float(defaults.get("top_p", 1.0) if call.top_p is None else call.top_p),
            truncation=call.truncation or "disabled",
        )


def find_response(store: ResponseStore, caller: Caller, name: str) -> StoredResponse:
    """A stored response. Raises ApiError."""
    found = store.get(caller, name)
    if found is None:
        raise no_response(store, name)
    return found


def no_response(store: ResponseStore, name: str) -> ApiError:
    """The error for a response that is not stored."""
    message = f"Response with id {name[:100]!r} not found: {_lost(store)}"
    return ApiError(404, message, "response_id", code="response_not_found")


def _lost(store: ResponseStore) -> str:
    """The reasons why something is not in the store."""
    if not store.max_bytes:
        return "this server stores none (--responses-store 0): send the whole conversation as input"
    return (
        "it was made with store: false, with another key, before the last start of the server, or has left the store "
        "(--responses-store): send the whole conversation as input"
    )


def _shown_tools(call: ResponsesRequest) -> list[ShownFunction | ShownNamespace]:
    shown: list[ShownFunction | ShownNamespace] = []
    for tool in call.tools or ():
        if isinstance(tool, FlatFunction):
            shown.append(shown_function(tool))
        elif tool is not None:
            functions = [shown_function(one) for one in tool.tools if one is not None]
            shown.append(ShownNamespace(tool.name, tool.description or "", functions))
    return shown
