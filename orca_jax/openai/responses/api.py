"""A response from its body: the conversation with stored items, the job of its chat, and its renderer."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from orca_jax.openai import chat
from orca_jax.openai.conversation import settled_system, tool_rules
from orca_jax.openai.errors import ApiError
from orca_jax.openai.formats import moved
from orca_jax.openai.generation import Job
from orca_jax.openai.model import Service
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
from orca_jax.openai.responses.store import Caller, ResponseStore, StoredResponse, stored_response
from orca_jax.openai.responses.telemetry import Telemetry
from orca_jax.openai.responses.truncation import shortened
from orca_jax.openai.schema.answers import Usage
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.responses import LOGPROBS, FlatFunction, InputItem, ItemReference, ResponsesRequest

ENDPOINT = "/v1/responses"


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
