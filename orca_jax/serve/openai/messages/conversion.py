"""`POST /v1/messages`: what a call asks for, which is prepared or counted."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec

from orca_jax.serve.openai import preparation
from orca_jax.serve.openai.asked import Asked, AskedTools, Limits, TemplateMessage, TemplatePrompt
from orca_jax.serve.openai.constraints import SCHEMA
from orca_jax.serve.openai.conversation import (
    answered,
    called,
    named_choice,
    plain_tools,
    settled_system,
)
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Job
from orca_jax.serve.openai.messages.errors import MESSAGES
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preview import num_tokens_of
from orca_jax.serve.openai.schema.chat import FunctionDefinition, Tool
from orca_jax.serve.openai.schema.messages import (
    ContentBlock,
    ContentSource,
    DocumentBlock,
    MessagesRequest,
    PlainSource,
    ReadBlock,
    RedactedBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from orca_jax.serve.openai.schema.structured import JsonSchema, JsonSchemaFormat

BILLING = "x-anthropic-billing-header"
"""Beginning of a block of instructions that Claude Code puts first. It differs in each call."""
NAMES = {
    SCHEMA: "output_config.format.schema",
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
    "function.name": "name",
    "stop": "stop_sequences",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
}
"""The names of a message for paths."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ALLOWED: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "user": (TextBlock, DocumentBlock, SearchResultBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedBlock),
    "system": (TextBlock,),
}


def understood(call: MessagesRequest, *, keeps_late_system: bool) -> Asked:
    """What a call asks for.

    Args:
        call: the call.
        keeps_late_system: see `settled_system`.

    Raises:
        ApiError: a block is in a message of a role that has none such, or the last message cannot be continued.
    """
    system, unread = _system_of(call)
    messages = [*system, *chain.from_iterable(_turns(call.messages))]
    if any(message["role"] == "system" for message in messages):
        messages = settled_system(messages, keeps_late=keeps_late_system)
    if not messages:
        raise ApiError(400, "messages has no text", "messages")
    continues = messages[-1]["role"] == "assistant"
    if continues:
        _check_last(messages[-1], len(call.messages) - 1)
    return Asked(
        id=f"msg_{call.request_id or uuid.uuid4().hex}",
        endpoint=MESSAGES,
        names=NAMES,
        fields=call,
        prompt=TemplatePrompt(
            messages,
            hints=_hints(call),
            variables=call.chat_template_kwargs or {},
            thoughts=_thoughts(messages),
            adds_prompt=not continues,
            is_continued=continues,
        ),
        tools=_asked_tools(call),
        form=_format(call),
        limits=Limits(call.max_tokens),
        stops=[*(call.stop_sequences or ()), *preparation.stop_strings(call.stop)],
        unread=unread,
    )


def _hints(call: MessagesRequest) -> dict[str, object]:
    hints: dict[str, object] = {}
    if call.output_config is not None and call.output_config.effort is not None:
        hints["reasoning_effort"] = call.output_config.effort
    if call.thinking is not None:
        hints["enable_thinking"] = call.thinking.type != "disabled"
    return hints


def _thoughts(messages: Sequence[TemplateMessage]) -> Sequence[str]:
    """The name of the blocks with earlier reasoning, if there are any."""
    if not any("reasoning" in message for message in messages):
        return ()
    return ("messages.content.thinking",)


def _format(call: MessagesRequest) -> JsonSchemaFormat | None:
    asked = call.output_format
    if call.output_config is not None and call.output_config.format is not None:
        asked = call.output_config.format
    return None if asked is None else JsonSchemaFormat(JsonSchema(schema=asked.schema))


def _system_of(call: MessagesRequest) -> tuple[list[TemplateMessage], tuple[str, ...]]:
    """The instructions as messages, and the names of what is left out."""
    system = call.system
    if not system:
        return [], ()
    if isinstance(system, str):
        return [_system(system)], ()
    if not system[0].text.startswith(f"{BILLING}:"):
        return [_system(_text(system))], ()
    unread = (f"system.{BILLING}",)
    return [_system(_text(system[1:]))] if system[1:] else [], unread


def _system(text: str) -> TemplateMessage:
    return {"role": "system", "content": text}


def _turns(messages: Sequence[TurnMessage]) -> Iterator[list[TemplateMessage]]:
    """The messages of each turn, of which one may span several messages of its role."""
    last_user = max(
        (index for index, message in enumerate(messages) if message.role == "user"), default=-1
    )
    shown = [one for one in enumerate(messages) if one[0] > last_user or not _is_cleared(one[1])]
    for role, turn in groupby(shown, key=lambda one: one[1].role):
        blocks: list[ContentBlock] = []
        for index, message in turn:
            blocks += _blocks(index, message)
        if role == "assistant":
            yield [_assistant(blocks)]
        elif role == "system":
            yield [_system(_texts(blocks))]
        else:
            yield _user(blocks)


def _blocks(index: int, message: TurnMessage) -> Sequence[ContentBlock]:
    """The blocks of a message. Raises ApiError for one that its role cannot have."""
    if isinstance(message.content, str):
        return [TextBlock(message.content)]
    for at, block in enumerate(message.content):
        _check_role(block, message.role, f"messages[{index}].content[{at}]")
    return message.content


def _is_cleared(message: TurnMessage) -> bool:
    """True if a message is for the turn of the user before it alone."""
    return message.role == "system" and message.clear_at == "next_user_message"


def _check_role(block: ContentBlock, role: str, where: str) -> None:
    if not isinstance(block, _ALLOWED[role]):
        kind = block.__struct_config__.tag
        raise ApiError(
            400, f"{where}: a message of the role {role} cannot have blocks of type {kind}", where
        )


def _user(blocks: Sequence[ContentBlock]) -> list[TemplateMessage]:
    """The results of tools, which templates expect right after the calls, then the text of a turn of the user."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    messages = [_result(one) for one in results]
    if not results or any(isinstance(block, ReadBlock) for block in blocks):
        messages.append({"role": "user", "content": _texts(blocks)})
    return messages


def _result(block: ToolResultBlock) -> TemplateMessage:
    content = block.content
    if not isinstance(content, str):
        content = _text(content or ())
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _assistant(blocks: Sequence[ContentBlock]) -> TemplateMessage:
    calls = [
        called(block.id, block.name, msgspec.json.encode(block.input).decode())
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [
        block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking
    ]
    return answered(_texts(blocks), calls, "\n".join(thoughts))


def _texts(blocks: Sequence[ContentBlock]) -> str:
    """The texts among the blocks."""
    return _text([block for block in blocks if isinstance(block, ReadBlock)])


def _text(blocks: Sequence[ReadBlock]) -> str:
    return "\n".join([_read(block) for block in blocks])


def _read(block: ReadBlock) -> str:
    """The text of a block for the model."""
    match block:
        case TextBlock(text):
            return text
        case SearchResultBlock(content, source, title):
            return "\n".join([title, source, *(one.text for one in content)])
        case DocumentBlock(PlainSource(text), title, context):
            texts = [text]
        case DocumentBlock(ContentSource(str(text)), title, context):
            texts = [text]
        case DocumentBlock(ContentSource(list(parts)), title, context):
            texts = [one.text for one in parts]
    heads = [head for head in (title, context) if head]
    return "\n".join([*heads, *texts])


def _check_last(message: TemplateMessage, index: int) -> None:
    """Refuse to continue a message of the assistant without a text at its end. Raises ApiError."""
    where = f"messages[{index}]"
    if "tool_calls" in message:
        what = "the results of its tool calls must follow, as blocks of type tool_result in a message of the user"
        raise ApiError(400, f"{where}: {what}", where)
    if not message["content"].strip():
        raise ApiError(
            400,
            f"{where}: the last message of the assistant has no text that could be continued",
            where,
        )


def _asked_tools(call: MessagesRequest) -> AskedTools:
    listed = [
        Tool(
            "function",
            FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict),
        )
        for tool in call.tools or ()
        if tool is not None
    ]
    chosen = call.tool_choice
    if not listed and chosen is None:
        return AskedTools()
    tools = AskedTools(plain_tools(listed))
    if chosen is None:
        return tools
    choice: str | Mapping[str, Any] | None = _CHOICES.get(chosen.type)
    if chosen.type == "tool":
        if chosen.name is None:
            raise ApiError(
                400, "tool_choice.name is required with the type tool", "tool_choice.name"
            )
        choice = named_choice(chosen.name)
    return tools._replace(choice=choice, are_parallel=not chosen.disable_parallel_tool_use)


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


async def prepare(service: Service, call: MessagesRequest, name: str, caller: str | None) -> Job:
    """Check a call and build its engine request. See `preparation.prepare`. Raises ApiError."""
    asked = understood(call, keeps_late_system=service.model.keeps_late_system)
    return await preparation.prepare(service, asked, name, caller)


def fills_context(service: Service, call: MessagesRequest, job: Job) -> bool:
    """True if the limit of an answer is the rest of the context, and not the limit of its call."""
    limit = job.requests[0].params.max_tokens
    return limit == service.model.context - len(job.prompts[0].ids) and limit != call.max_tokens


async def count_tokens(
    service: Service, call: MessagesRequest
) -> tuple[TokenCount, tuple[str, ...]]:
    """The number of tokens of a call's prompt, and the names of what has no effect on it. Raises ApiError."""
    asked = understood(call, keeps_late_system=service.model.keeps_late_system)
    count, unread = await num_tokens_of(service, asked)
    return TokenCount(count), unread
