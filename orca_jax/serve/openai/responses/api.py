"""A response from its body: what its call asks for, its job, the beginning of its answer, and its renderer."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from orca_jax.serve.openai import preparation
from orca_jax.serve.openai.asked import (
    Asked,
    AskedTools,
    Limits,
    TemplateMessage,
    TemplatePrompt,
    TemplateTool,
)
from orca_jax.serve.openai.chat import call_id
from orca_jax.serve.openai.constraints import SCHEMA
from orca_jax.serve.openai.conversation import (
    allowed_tools,
    answered,
    called,
    named_choice,
    plain_tools,
    settled_system,
)
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Job
from orca_jax.serve.openai.model import Model, Service
from orca_jax.serve.openai.preview import num_tokens_of
from orca_jax.serve.openai.responses.items import (
    FunctionName,
    ModelResponse,
    ShownFunction,
    ShownNamespace,
)
from orca_jax.serve.openai.responses.renderer import ResponseRenderer
from orca_jax.serve.openai.responses.store import (
    Caller,
    ResponseStore,
    as_input,
    history_of,
    items_of,
    new_id,
    stored_response,
    with_ids,
)
from orca_jax.serve.openai.responses.telemetry import Telemetry
from orca_jax.serve.openai.responses.truncation import shortened
from orca_jax.serve.openai.schema.answers import Usage
from orca_jax.serve.openai.schema.chat import FunctionDefinition, Tool
from orca_jax.serve.openai.schema.hosted import HostedItem, as_functions
from orca_jax.serve.openai.schema.input_items import (
    CallOutput,
    InputCall,
    InputMessage,
    InputReasoning,
    InputText,
    PlainItem,
    RefusalPart,
)
from orca_jax.serve.openai.schema.responses import (
    LOGPROBS,
    FlatAllowedTools,
    FlatFunction,
    FlatJsonSchema,
    FlatNamedTool,
    InputItem,
    ResponsesRequest,
)
from orca_jax.serve.openai.schema.structured import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)

ENDPOINT = "/v1/responses"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    SCHEMA: "text.format.schema",
    "response_format": "text.format",
    "function.parameters": "parameters",
    "reasoning_effort": "reasoning.effort",
}
"""The names of a response for paths."""
_REPEATED = ("max_tool_calls", "safety_identifier")
"""Fields that a response repeats, and that have no other effect."""
_OF_STREAMS = ("timings_per_token", "return_progress")


class FlatTools(NamedTuple):
    """The functions of a call."""

    listed: list[TemplateTool]
    names: Mapping[str, FunctionName]  # by the name that the model sees


class ResponseCall:
    """One call, with the items of its conversation and the functions of its tools. Made in a thread if `is_long`.

    Attributes:
        call: the call.
        num_bytes: of the body and of the stored conversation.
        begun: the response without items.

    Raises:
        ApiError: a stored response or item is lost, a field is wrong, or the conversation has too many items.
    """

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        call: ResponsesRequest,
        caller: Caller,
        num_bytes: int,
    ) -> None:
        history = history_of(store, caller, call)
        self.call = call
        self.num_bytes = num_bytes + history.num_bytes
        self._service = service
        self._store = store
        self._caller = caller
        self._is_stored = call.store is not False and store.max_bytes > 0
        self._own = with_ids(items_of(store, caller, call))
        self._items = [*history.items, *self._own]
        self._tools = tools_of(call)
        self.begun = _begun(call, service, is_stored=self._is_stored)

    async def job(self, name: str) -> Job:
        """The prepared call; `name` appears in logs. Raises ApiError."""
        asked = self._asked()
        if self.call.truncation == "auto":
            asked = await shortened(self._service, asked)
        return await preparation.prepare(self._service, asked, name, self._caller)

    async def num_tokens(self) -> int:
        """The number of tokens of the prompt. Raises ApiError."""
        count, _ = await num_tokens_of(self._service, self._asked())
        return count

    def _asked(self) -> Asked:
        unread = unread_fields(self.call, has_store=self._store.max_bytes > 0)
        model = self._service.model
        return understood(self.call, self._items, self._tools, model, self.begun.id, unread)

    def renderer(
        self, job: Job | None = None, usage: Callable[[], Usage] | None = None
    ) -> ResponseRenderer:
        """A renderer for the answer, with the token counts so far; without a job for a failure alone."""
        call = self.call
        has_timings = bool(call.timings_per_token)
        has_progress = bool(call.return_progress)
        telemetry = None
        if usage is not None and call.stream and (has_timings or has_progress):
            telemetry = Telemetry(usage, has_timings=has_timings, has_progress=has_progress)
        new_call_id = partial(new_id, "call")
        prompt = None
        if job is not None:
            new_call_id = partial(call_id, job)
            if call.enable_response_messages:
                prompt = job.prompts[0].ids
        return ResponseRenderer(
            self.begun,
            self._service.model.tokenizer,
            num_top=_num_top(call),
            names=self._tools.names,
            new_call_id=new_call_id,
            prompt=prompt,
            streams=bool(call.stream),
            summarizes=_summary(call) is not None,
            telemetry=telemetry,
            keep=self._keep,
        )

    def _keep(self, response: ModelResponse, answer: bytes) -> None:
        if self._is_stored:
            outputs = [as_input(item) for item in response.output]
            stored = stored_response(answer, self._own, outputs, self.call.previous_response_id)
            self._store.put(self._caller, response.id, stored)


def unread_fields(call: ResponsesRequest, *, has_store: bool) -> list[str]:
    """The fields of a call that have no effect on this server or beside its other fields."""
    unread: list[str] = []
    if set(call.include or ()) - {LOGPROBS}:
        unread.append("include")
    if call.top_logprobs is not None and _num_top(call) is None:
        unread.append("top_logprobs")
    if call.store and not has_store:
        unread.append("store")
    unread += [name for name in _REPEATED if getattr(call, name) is not None]
    if not call.stream:
        unread += [name for name in _OF_STREAMS if getattr(call, name)]
    return unread


def understood(
    call: ResponsesRequest,
    items: Sequence[InputItem],
    tools: FlatTools,
    model: Model,
    name: str,
    unread: Sequence[str],
) -> Asked:
    """What a call asks for.

    Args:
        call: the call.
        items: the items of its whole conversation.
        tools: the functions of its tools.
        model: the served model.
        name: id of the answer.
        unread: fields without effect.

    Raises:
        ApiError: there are no items, or `tool_choice` allows a tool that there is not.
    """
    if not items:
        raise ApiError(
            400, "input must have at least one item", "input", code="missing_required_parameter"
        )
    messages = messages_of(call.instructions, items)
    if any(message["role"] == "system" for message in messages):
        messages = settled_system(messages, keeps_late=model.keeps_late_system)
    thoughts: tuple[str, ...] = ()
    if any("reasoning" in message for message in messages):
        thoughts = ("input.reasoning",)
    return Asked(
        id=name,
        endpoint=ENDPOINT,
        names=NAMES,
        fields=call,
        prompt=TemplatePrompt(
            messages,
            hints=_hints(call, model),
            variables=call.chat_template_kwargs or {},
            thoughts=thoughts,
        ),
        tools=_asked_tools(call, tools),
        form=_format(call),
        limits=Limits(call.max_output_tokens),
        stops=preparation.stop_strings(call.stop),
        logprobs=_num_top(call),
        keeps_ids=bool(call.enable_response_messages),
        unread=unread,
    )


def _num_top(call: ResponsesRequest) -> int | None:
    """The number of most probable tokens in the answer; None without log probabilities."""
    return (call.top_logprobs or 0) if LOGPROBS in (call.include or ()) else None


def _summary(call: ResponsesRequest) -> str | None:
    """The kind of the summary of reasoning; None without one."""
    asked = call.reasoning
    return None if asked is None else asked.summary or asked.generate_summary


def _effort(call: ResponsesRequest) -> str | None:
    """The effort of reasoning."""
    return None if call.reasoning is None else call.reasoning.effort


def _hints(call: ResponsesRequest, model: Model) -> dict[str, object]:
    """The effort for the chat template. Without effort, the variable that stops reasoning, if the template has it."""
    effort = _effort(call)
    if effort is None:
        return {}
    template = model.template
    if effort != "none" or template is None or not template.reads("enable_thinking"):
        return {"reasoning_effort": effort}
    stops: dict[str, object] = {"enable_thinking": False}
    if template.reads("reasoning_effort"):
        stops["reasoning_effort"] = effort
    return stops


def tools_of(call: ResponsesRequest) -> FlatTools:
    """The functions of a call, also in namespaces. Raises ApiError if two have one name for the model."""
    if not call.tools:
        return FlatTools([], {})
    found: list[Tool] = []
    names: dict[str, FunctionName] = {}
    for name, function in _functions(call):
        if name.shown in names:
            raise ApiError(400, f"tools: {name.shown} is used twice", "tools")
        definition = FunctionDefinition(
            name.shown, function.description, function.parameters, function.strict
        )
        found.append(Tool("function", definition))
        names[name.shown] = name
    return FlatTools(plain_tools(found), names)


def _functions(call: ResponsesRequest) -> Iterator[tuple[FunctionName, FlatFunction]]:
    for tool in call.tools or ():
        if isinstance(tool, FlatFunction):
            yield FunctionName(tool.name), tool
        elif tool is not None:
            inside = [one for one in tool.tools if one is not None]
            yield from ((FunctionName(one.name, tool.name), one) for one in inside)


def _asked_tools(call: ResponsesRequest, tools: FlatTools) -> AskedTools:
    are_parallel = call.parallel_tool_calls is not False
    match call.tool_choice:
        case FlatNamedTool(name):
            return AskedTools(tools.listed, named_choice(_shown(name, tools.names)), are_parallel)
        case FlatAllowedTools(mode, allowed):
            names = [_shown(tool.name, tools.names) for tool in allowed if tool is not None]
            return AskedTools(allowed_tools(tools.listed, names), mode, are_parallel)
        case choice:
            return AskedTools(tools.listed, choice, are_parallel)


def _shown(name: str, names: Mapping[str, FunctionName]) -> str:
    """The name of a function for the model. The function is named with its namespace or without."""
    if name in names:
        return name
    found = [shown for shown, known in names.items() if known.name == name]
    return found[0] if len(found) == 1 else name


def _text_format(
    call: ResponsesRequest,
) -> TextFormat | JsonObjectFormat | FlatJsonSchema | None:
    return None if call.text is None else call.text.format


def _format(call: ResponsesRequest) -> ResponseFormat | None:
    asked = _text_format(call)
    if isinstance(asked, FlatJsonSchema):
        return JsonSchemaFormat(
            JsonSchema(asked.name, asked.schema, asked.description, asked.strict)
        )
    return asked


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> list[TemplateMessage]:
    """Messages for the chat template. Neighbouring reasoning, texts and calls of the assistant become one message."""
    messages: list[TemplateMessage] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn = _Turn()
    for item in _plain(items):
        if turn.takes(item):
            continue
        messages += turn.take()
        match item:
            case InputMessage(role="user"):
                messages.append({"role": "user", "content": text_of(item)})
            case InputMessage():
                messages.append({"role": "system", "content": text_of(item)})
            case CallOutput(call_id, output):
                messages.append(_result(call_id, output))
            case _:
                raise AssertionError("references were replaced by their items")
    return messages + turn.take()


def _result(call_id: str, output: str | Sequence[InputText]) -> TemplateMessage:
    text = output if isinstance(output, str) else "\n".join(part.text for part in output)
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _plain(items: Iterable[InputItem]) -> Iterator[PlainItem]:
    """The items, with a call of a function or its result in the place of an item of another tool."""
    for item in items:
        if isinstance(item, HostedItem):
            yield from as_functions(item)
        else:
            yield item


def text_of(message: InputMessage) -> str:
    """The text of a message. Its parts are joined by line breaks, as in a chat."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(
        part.refusal if isinstance(part, RefusalPart) else part.text for part in message.content
    )


class _Turn:
    """The items of the assistant that become the next message."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def takes(self, item: PlainItem) -> bool:
        """Add an item; False if it is not one of the assistant."""
        match item:
            case InputMessage(role="assistant"):
                self._texts.append(text_of(item))
            case InputReasoning(content, summary):
                self._reasoning += [part.text for part in content or summary or ()]
            case InputCall(call_id, name, arguments, namespace):
                shown = FunctionName(name, namespace).shown
                self._calls.append(called(call_id, shown, arguments))
            case _:
                return False
        return True

    def take(self) -> list[TemplateMessage]:
        """The message of the items so far, if there are any."""
        if not (self._reasoning or self._texts or self._calls):
            return []
        message = answered("\n".join(self._texts), self._calls, "\n".join(self._reasoning))
        self.__init__()  # type: ignore[misc]
        return [message]


def _begun(call: ResponsesRequest, service: Service, *, is_stored: bool) -> ModelResponse:
    """The response without items."""
    defaults = service.model.defaults

    def setting(name: str, default: float) -> float:
        """A setting of the sampler, from the call or else from the model."""
        asked = getattr(call, name)
        return float(defaults.get(name, default) if asked is None else asked)

    return ModelResponse(
        id=new_id("resp"),
        created_at=int(time.time()),
        instructions=call.instructions,
        max_output_tokens=call.max_output_tokens,
        max_tool_calls=call.max_tool_calls,
        metadata=call.metadata or {},
        model=service.answering(call.model),
        parallel_tool_calls=call.parallel_tool_calls is not False,
        presence_penalty=setting("presence_penalty", 0.0),
        frequency_penalty=setting("frequency_penalty", 0.0),
        previous_response_id=call.previous_response_id,
        prompt_cache_key=call.prompt_cache_key,
        reasoning={"effort": _effort(call), "summary": _summary(call)},
        safety_identifier=call.safety_identifier,
        store=is_stored,
        temperature=setting("temperature", 1.0),
        text={"format": _text_format(call) or {"type": "text"}},
        tool_choice=call.tool_choice or "auto",
        tools=_shown_tools(call),
        top_logprobs=call.top_logprobs or 0,
        top_p=setting("top_p", 1.0),
        truncation=call.truncation or "disabled",
    )


def _shown_tools(call: ResponsesRequest) -> list[ShownFunction | ShownNamespace]:
    shown: list[ShownFunction | ShownNamespace] = []
    for tool in call.tools or ():
        if isinstance(tool, FlatFunction):
            shown.append(_shown_function(tool))
        elif tool is not None:
            functions = [_shown_function(one) for one in tool.tools if one is not None]
            shown.append(ShownNamespace(tool.name, tool.description or "", functions))
    return shown


def _shown_function(tool: FlatFunction) -> ShownFunction:
    return ShownFunction(tool.name, tool.description, tool.parameters, tool.strict)
