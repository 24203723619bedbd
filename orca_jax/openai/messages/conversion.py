"""`POST /v1/messages`: conversion to a chat of the same meaning, which is prepared or counted."""

import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from orca_jax.openai import chat
from orca_jax.openai.conversation import settled_system, tool_rules, unread_fields
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Job
from orca_jax.openai.messages.errors import MESSAGES
from orca_jax.openai.model import Service
from orca_jax.openai.params import PARAMETERS, SCHEMA, moved
from orca_jax.openai.schema.chat import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
    content_text,
)
from orca_jax.openai.schema.messages import (
    ContentBlock,
    MessagesRequest,
    MessagesToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from orca_jax.openai.schema.sampling import SamplingFields
from orca_jax.openai.schema.structured import JsonSchema, JsonSchemaFormat

BILLING = "x-anthropic-billing-header"
"""Beginning of a block of instructions that Claude Code puts first. It differs in each call."""
NAMES = {
    "max_completion_tokens": "max_tokens",
    SCHEMA: "output_config.format.schema",
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
    "function.name": "name",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Names of fields of a chat -> the names here."""
IGNORED = {
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "messages.reasoning": "messages.content.thinking",
}
"""Names of ignored fields of a chat -> the names here."""
PLACES = {SCHEMA: "output_config.format.schema", PARAMETERS: "tools.input_schema"}
"""Schemas of a chat -> the schemas here."""
_CHOICES: Mapping[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}
_ALLOWED: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "system": (TextBlock,),
}
_SHARED = SamplingFields.__struct_fields__


class Converted(NamedTuple):
    """A call of a chat, and the names of what it leaves out."""

    call: ChatRequest
    ignored: tuple[str, ...] = ()


def converted(call: MessagesRequest, *, keeps_late_system: bool) -> Converted:
    """The call as one of a chat.

    Args:
        call: the call.
        keeps_late_system: see `settled_system`.

    Raises:
        ApiError: a block is in a message of a role that has none such, or the last message cannot be continued.
    """
    system, ignored = _system_of(call)
    turns = [message for turn in _turns(call.messages) for message in turn]
    messages = settled_system([*system, *turns], keeps_late=keeps_late_system)
    if not messages:
        raise ApiError(400, "messages has no text", "messages")
    continues = isinstance(messages[-1], AssistantMessage)
    if continues:
        _check_last(messages[-1], len(call.messages) - 1)
    chosen, output, schema = call.tool_choice, call.output_config, call.format
    chat = ChatRequest(
        **{name: getattr(call, name) for name in _SHARED if name != "stop"},
        stop=call.all_stops() or None,
        messages=messages,
        max_tokens=call.max_tokens,
        response_format=None if schema is None else JsonSchemaFormat(JsonSchema(schema=schema.schema)),
        tools=_tools_of(call),
        tool_choice=_choice_of(chosen),
        parallel_tool_calls=None if chosen is None else not chosen.disable_parallel_tool_use,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template_kwargs=call.chat_template_kwargs,
        reasoning_effort=None if output is None else output.effort,
        enable_thinking=None if call.thinking is None else call.thinking.type != "disabled",
    )
    return Converted(chat, ignored)


def _system_of(call: MessagesRequest) -> tuple[list[ChatMessage], tuple[str, ...]]:
    """The instructions as messages, and the names of what is left out."""
    system = call.system
    if not system:
        return [], ()
    if isinstance(system, str):
        return [SystemMessage(system)], ()
    has_billing = system[0].text.startswith(f"{BILLING}:")
    kept = system[1:] if has_billing else system
    messages: list[ChatMessage] = [SystemMessage(_parts(kept))] if kept else []
    return messages, (f"system.{BILLING}",) * has_billing


def _turns(messages: Sequence[TurnMessage]) -> Iterator[list[ChatMessage]]:
    """The messages of each turn, of which one may span several messages of its role."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    shown = [one for one in enumerate(messages) if one[0] > last_user or not _is_cleared(one[1])]
    for role, turn in groupby(shown, key=lambda one: one[1].role):
        blocks: list[ContentBlock] = []
        for index, message in turn:
            found = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
            for at, block in enumerate(found):
                _check_role(block, role, f"messages[{index}].content[{at}]")
            blocks += found
        if role == "assistant":
            yield [_assistant(blocks)]
        elif role == "system":
            yield [SystemMessage(_texts(blocks))]
        else:
            yield _user(blocks)


def _is_cleared(message: TurnMessage) -> bool:
    """True if a message is for the turn of the user before it alone."""
    return message.role == "system" and message.clear_at == "next_user_message"


def _check_role(block: ContentBlock, role: str, where: str) -> None:
    is_result = isinstance(block, ToolResultBlock)
    if is_result if role == "assistant" else not isinstance(block, _ALLOWED[role]):
        kind = block.__struct_config__.tag
        raise ApiError(400, f"{where}: a message of the role {role} cannot have blocks of type {kind}", where)


def _user(blocks: Sequence[ContentBlock]) -> list[ChatMessage]:
    """The results of tools, which templates expect right after the calls, then the text of a turn of the user."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    messages: list[ChatMessage] = [
        ToolMessage(one.content if isinstance(one.content, str) else _parts(one.content or ()), one.tool_use_id)
        for one in results
    ]
    texts = _texts(blocks)
    return [*messages, UserMessage(texts)] if texts or not results else messages


def _assistant(blocks: Sequence[ContentBlock]) -> AssistantMessage:
    calls = [
        CalledTool(block.id, CalledFunction(block.name, msgspec.json.encode(block.input).decode()))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    return AssistantMessage(
        _texts(blocks), tool_calls=calls or None, reasoning="\n".join(thoughts) if thoughts else None
    )


def _texts(blocks: Sequence[ContentBlock]) -> list[TextPart]:
    return _parts([block for block in blocks if isinstance(block, TextBlock)])


def _parts(blocks: Sequence[TextBlock]) -> list[TextPart]:
    return [TextPart("text", block.text) for block in blocks]


def _check_last(message: ChatMessage, index: int) -> None:
    """Refuse to continue a message of the assistant without a text at its end. Raises ApiError."""
    assert isinstance(message, AssistantMessage), "only messages of the assistant are continued"
    where = f"messages[{index}]"
    if message.tool_calls:
        what = "the results of its tool calls must follow, as blocks of type tool_result in a message of the user"
        raise ApiError(400, f"{where}: {what}", where)
    if not content_text(message.content).strip():
        raise ApiError(400, f"{where}: the last message of the assistant has no text that could be continued", where)


def _tools_of(call: MessagesRequest) -> list[Tool] | None:
    return [
        Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in call.tools or ()
        if tool is not None
    ] or None


def _choice_of(choice: MessagesToolChoice | None) -> Literal["auto", "required", "none"] | NamedTool | None:
    if choice is None or choice.type != "tool":
        return None if choice is None else _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is required with the type tool", "tool_choice.name")
    return NamedTool(NamedFunction(choice.name))


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


async def prepare(service: Service, call: MessagesRequest, name: str, caller: str | None) -> Job:
    """Check a call and build its engine request. See `chat.prepare`. Raises ApiError."""
    same = converted(call, keeps_late_system=service.model.keeps_late_system)
    try:
        job = await chat.prepare(service, same.call, name, caller)
    except ApiError as error:
        raise error.renamed(NAMES) from None
    renamed = {param: NAMES.get(field, field) for param, field in (job.renamed or {}).items()}
    return dataclasses.replace(
        job,
        id=f"msg_{call.request_id or uuid.uuid4().hex}",
        endpoint=MESSAGES,
        renamed=renamed,
        ignored=(*same.ignored, *_own_names(job.ignored)),
        left_out=moved(job.left_out, PLACES),
    )


def fills_context(service: Service, call: MessagesRequest, job: Job) -> bool:
    """True if the limit of an answer is the rest of the context, and not the limit of its call."""
    limit = job.requests[0].params.max_tokens
    return limit == service.model.context - len(job.prompts[0].ids) and limit != call.max_tokens


async def count_tokens(service: Service, call: MessagesRequest) -> tuple[TokenCount, tuple[str, ...]]:
    """The number of tokens of a call's prompt, and the names of what has no effect on it. Raises ApiError."""
    same = converted(call, keeps_late_system=service.model.keeps_late_system)
    try:
        chat.check_call(service, same.call)
        rules = tool_rules(same.call, service)
        prompt = await chat.prompt_of(service, same.call, rules)
    except ApiError as error:
        raise error.renamed(NAMES) from None
    left_out = _own_names([*unread_fields(service, same.call), *rules.ignored])
    return TokenCount(len(prompt.ids)), (*same.ignored, *left_out)


def _own_names(ignored: Sequence[str]) -> list[str]:
    return [IGNORED.get(name, name) for name in ignored]
