"""Conversion of a response to a chat: items to messages, and tools to functions with the names that the model sees."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from orca_jax.openai.errors import ApiError
from orca_jax.openai.params import OBJECT_SCHEMA, PARAMETERS, SCHEMA
from orca_jax.openai.schema.chat import (
    AllowedList,
    AllowedTools,
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    SystemMessage,
    Tool,
    ToolMessage,
    UserMessage,
)
from orca_jax.openai.schema.responses import (
    CallOutput,
    FlatAllowedTools,
    FlatFunction,
    FlatJsonSchema,
    FlatNamedTool,
    InputCall,
    InputItem,
    InputMessage,
    InputReasoning,
    RefusalPart,
    ResponsesRequest,
)
from orca_jax.openai.schema.sampling import SamplingFields
from orca_jax.openai.schema.structured import JsonSchema, JsonSchemaFormat, ResponseFormat

type Mode = Literal["none", "auto", "required"]
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    SCHEMA: "text.format.schema",
    "response_format": "text.format",
    "function.parameters": "parameters",
    "reasoning_effort": "reasoning.effort",
    "messages.reasoning": "input.reasoning",
}
"""Field of a chat -> field of a response."""
PLACES = {SCHEMA: "text.format.schema", OBJECT_SCHEMA: "text.format.schema", PARAMETERS: "tools.parameters"}
"""Schema of a chat -> schema of a response."""


class FunctionName(NamedTuple):
    """The name of a function, and of its namespace if it has one."""

    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class FlatTools(NamedTuple):
    """The functions of a call."""

    chat: list[Tool]
    names: Mapping[str, FunctionName]  # by the name that the model sees


def chat_of(call: ResponsesRequest, items: Sequence[InputItem], tools: FlatTools) -> ChatRequest:
    """The chat of a response with these items. Raises ApiError."""
    shared = {name: getattr(call, name) for name in SamplingFields.__struct_fields__}
    return ChatRequest(
        **shared,
        messages=messages_of(call.instructions, items),
        max_completion_tokens=call.max_output_tokens,
        logprobs=call.wants_logprobs or None,
        return_token_ids=call.enable_response_messages,
        top_logprobs=call.top_logprobs if call.wants_logprobs else None,
        tools=tools.chat or None,
        tool_choice=_choice(call.tool_choice, tools.names),
        parallel_tool_calls=call.parallel_tool_calls,
        chat_template_kwargs=call.chat_template_kwargs,
        reasoning_effort=None if call.reasoning is None else call.reasoning.effort,
        response_format=_format(call),
    )


def tools_of(call: ResponsesRequest) -> FlatTools:
    """The functions of a call, those in namespaces included. Raises ApiError if two have one name for the model."""
    found: dict[str, Tool] = {}
    names: dict[str, FunctionName] = {}
    for tool in call.tools or ():
        if tool is None:
            continue
        is_single = isinstance(tool, FlatFunction)
        for function in [tool] if isinstance(tool, FlatFunction) else tool.tools:
            if function is None:
                continue
            name = FunctionName(function.name, None if is_single else tool.name)
            if name.shown in names:
                raise ApiError(400, f"tools: {name.shown} is used twice", "tools")
            definition = FunctionDefinition(name.shown, function.description, function.parameters, function.strict)
            found[name.shown], names[name.shown] = Tool("function", definition), name
    return FlatTools(list(found.values()), names)


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> list[ChatMessage]:
    """Chat messages. Neighbouring reasoning, texts and calls of the assistant become one message."""
    messages: list[ChatMessage] = [SystemMessage(instructions)] if instructions else []
    turn = _Turn()
    for item in items:
        if turn.takes(item):
            continue
        messages += turn.take()
        match item:
            case InputMessage(role="user"):
                messages.append(UserMessage(text_of(item)))
            case InputMessage():
                messages.append(SystemMessage(text_of(item)))
            case CallOutput(call_id, output):
                text = output if isinstance(output, str) else "\n".join(part.text for part in output)
                messages.append(ToolMessage(text, call_id))
            case _:
                raise AssertionError("references were replaced by their items")
    return messages + turn.take()


def text_of(message: InputMessage) -> str:
    """The text of a message. Its parts are joined by line breaks, as those of a chat."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in message.content)


class _Turn:
    """The items of the assistant that become the next message."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[CalledTool] = []

    def takes(self, item: InputItem) -> bool:
        """Add an item; False if it is not one of the assistant."""
        match item:
            case InputMessage(role="assistant"):
                self._texts.append(text_of(item))
            case InputReasoning(content, summary):
                self._reasoning += [part.text for part in content or summary or ()]
            case InputCall(call_id, name, arguments, namespace):
                shown = FunctionName(name, namespace).shown
                self._calls.append(CalledTool(call_id, CalledFunction(shown, arguments)))
            case _:
                return False
        return True

    def take(self) -> list[ChatMessage]:
        """The message of the items so far, if there are any."""
        if not (self._reasoning or self._texts or self._calls):
            return []
        content = "\n".join(self._texts) if self._texts else None
        message = AssistantMessage(
            content, tool_calls=self._calls or None, reasoning="\n".join(self._reasoning) or None
        )
        self.__init__()  # type: ignore[misc]
        return [message]


def _choice(
    choice: Mode | FlatNamedTool | FlatAllowedTools | None, names: Mapping[str, FunctionName]
) -> Mode | NamedTool | AllowedTools | None:
    match choice:
        case FlatNamedTool(name):
            return NamedTool(NamedFunction(_shown(name, names)))
        case FlatAllowedTools(mode, tools):
            allowed = [NamedTool(NamedFunction(_shown(tool.name, names))) for tool in tools if tool is not None]
            return AllowedTools(AllowedList(mode, allowed))
        case _:
            return choice


def _shown(name: str, names: Mapping[str, FunctionName]) -> str:
    """The name of a function for the model. The function is named with its namespace or without."""
    if name in names:
        return name
    found = [shown for shown, known in names.items() if known.name == name]
    return found[0] if len(found) == 1 else name


def _format(call: ResponsesRequest) -> ResponseFormat | None:
    asked = None if call.text is None else call.text.format
    if isinstance(asked, FlatJsonSchema):
        return JsonSchemaFormat(JsonSchema(asked.name, asked.schema, asked.description, asked.strict))
    return asked
