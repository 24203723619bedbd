"""The state of OpenAI's calls for decisions: a text, or messages, calls and their outputs as a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.serve.openai.asked import TemplateMessage
from orca_jax.serve.openai.conversation import called, settled_system
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES, MAX_PARTS
from orca_jax.text.decisions.questions import as_text

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def conversation_of(
    given: object, param: str, *, keeps_late: bool
) -> tuple[list[TemplateMessage], str]:
    """The messages before the state, and the state: the text, or the last message if it is one of the user.

    Neighbouring messages of the user are one, with a blank line between them.

    Args:
        given: the value of the field.
        param: its name.
        keeps_late: see `conversation.settled_system`.

    Raises:
        ApiError: an item is wrong or not supported; the error has its path.
    """
    if isinstance(given, str):
        return [], given
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_MESSAGES:
        what = f"{param} must be a string, or a list of 1 to {MAX_MESSAGES} messages"
        raise ApiError(400, what, param)
    messages: list[TemplateMessage] = []
    for index, item in enumerate(given):
        message = _message(item, f"{param}[{index}]")
        if messages and message["role"] == messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{message['content']}"
            continue
        messages.append(message)
    messages = settled_system(messages, keeps_late=keeps_late)
    if messages and messages[-1]["role"] == "user":
        last = messages.pop()
        return messages, last["content"]
    return messages, ""


def text_of(content: object, path: str) -> str:
    """The text of a string, or of a list of parts joined by line breaks. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise ApiError(400, f"{path} must be a string, or a list of up to {MAX_PARTS} parts", path)
    return "\n".join([_part(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "input_json" and isinstance(part, Mapping) and "data" in part:
        return as_text(part["data"])
    name = _TEXTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if isinstance(part, Mapping) and name is not None else None
    if not isinstance(text, str):
        message = (
            f"{path}: only parts of the types {', '.join(_TEXTS)} and input_json are supported"
        )
        raise ApiError(400, message, f"{path}.type", code="unsupported_parameter")
    return text


def _message(item: object, path: str) -> TemplateMessage:
    """One item of the input as a message for chat templates. Raises ApiError."""
    if not isinstance(item, Mapping):
        raise ApiError(400, f"{path} must be an object", path)
    kind = item.get("type", "message")
    if kind in _CALLS:
        name, call_id, text = _strings(item, ("name", "call_id", _CALLS[kind]), path)
        arguments = text if kind == "function_call" else as_text({"input": text})
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [called(call_id, name, arguments)],
        }
    if kind in _OUTPUTS:
        (call_id,) = _strings(item, ("call_id",), path)
        content = text_of(item.get("output"), f"{path}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if kind != "message":
        message = f"{path}.type: items of this type are unknown here; send their text as a message"
        raise ApiError(400, message, f"{path}.type", code="unsupported_parameter")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{path}.role must be {', '.join(_ROLES)}", f"{path}.role")
    return {"role": _ROLES[role], "content": text_of(item.get("content"), f"{path}.content")}


def _strings(item: Mapping[str, Any], names: Sequence[str], path: str) -> list[str]:
    """The values of required fields. Raises ApiError."""
    for name in names:
        if not isinstance(item.get(name), str):
            raise ApiError(400, f"{path}.{name} must be a string", f"{path}.{name}")
    return [item[name] for name in names]
