"""Messages and tools of all APIs in the form that chat templates expect."""

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from orca_jax.serve.openai.asked import TemplateMessage, TemplateTool
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.chat import (
    AssistantMessage,
    CalledTool,
    ChatMessage,
    Content,
    DeveloperMessage,
    Tool,
)
from orca_jax.text.tools import tool_name


def plain_messages(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Messages as chat templates expect them: with text as content and `system` for `developer`."""
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> TemplateMessage:
    plain: TemplateMessage = _given(message)
    plain["content"] = content_text(message.content)
    if isinstance(message, DeveloperMessage):
        plain["role"] = "system"
    if isinstance(message, AssistantMessage):
        plain |= thought_of(message.reasoning or message.reasoning_content)
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _given(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that were given, but no mark about the cache."""
    given = msgspec.to_builtins(value)
    given.pop("cache_control", None)
    return {name: one for name, one in given.items() if one is not None}


def _plain_call(call: CalledTool) -> dict[str, Any]:
    return called(call.id, call.function.name, call.function.arguments)


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of the assistant, with its arguments as JSON text."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def thought_of(reasoning: str | None) -> dict[str, str]:
    """The fields of a message of the assistant with its reasoning, of which templates read one."""
    if not reasoning:
        return {}
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def answered(
    content: str, calls: Sequence[dict[str, Any]], reasoning: str | None
) -> TemplateMessage:
    """A message of the assistant."""
    message: TemplateMessage = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return message | thought_of(reasoning)


def content_text(content: Content | None) -> str:
    """The text of a message. Its parts are joined by line breaks, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def settled_system(
    messages: Sequence[TemplateMessage], *, keeps_late: bool
) -> list[TemplateMessage]:
    """The messages with one system message at most at the beginning, for APIs that allow several at any place.

    Args:
        messages: the conversation.
        keeps_late: True if the chat template renders later system messages. Otherwise each is a message of the user in
            its place, joined with the messages of the user beside it. So a turn of an agent, whose calls and results
            follow, leaves the prompt of the turn before as it was.
    """
    leading = list(takewhile(_is_system, messages))
    settled: list[TemplateMessage] = []
    if text := _paragraphs(leading):
        settled.append({"role": "system", "content": text})
    joined: list[TemplateMessage] = []  # neighbours for one message of the user
    was_late = False
    for message in messages[len(leading) :]:
        is_late = _is_system(message) and not keeps_late
        if is_late and not message["content"]:
            continue
        here = _of_the_user(message["content"]) if is_late else message
        is_user = here["role"] == "user"
        if not (joined and is_user and (is_late or was_late)):
            settled += _as_one(joined)
            joined = []
        if is_user:
            joined.append(here)
        else:
            settled.append(here)
        was_late = is_late
    return settled + _as_one(joined)


def _as_one(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Several messages of the user as one; a single one as it is."""
    return messages if len(messages) < 2 else [_of_the_user(_paragraphs(messages))]


def _of_the_user(text: str) -> TemplateMessage:
    return {"role": "user", "content": text}


def _is_system(message: TemplateMessage) -> bool:
    return bool(message["role"] == "system")


def _paragraphs(messages: Sequence[TemplateMessage]) -> str:
    return "\n\n".join([message["content"] for message in messages if message["content"]])


def plain_tools(tools: Sequence[Tool]) -> list[TemplateTool]:
    """Tools as chat templates expect them: mappings without the keys that were not given."""
    return [{"type": "function", "function": _given(tool.function)} for tool in tools]


def allowed_tools(tools: Sequence[TemplateTool], names: Collection[str]) -> list[TemplateTool]:
    """The tools with these names. Raises ApiError if one is missing."""
    allowed = set(names)
    found = [tool for tool in tools if tool_name(tool) in allowed]
    if missing := sorted(allowed - {tool_name(tool) for tool in found}):
        raise ApiError(
            400, f"tool_choice names {missing[0]!r}, which is not one of the tools", "tool_choice"
        )
    return found


def named_choice(name: str) -> dict[str, Any]:
    """The choice of one function, which the model must call."""
    return {"type": "function", "function": {"name": name}}
