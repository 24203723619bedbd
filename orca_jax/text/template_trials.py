"""Properties of a chat template, found by rendering short conversations once, when it is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.text.template import ChatTemplate
from orca_jax.values.errors import RequestError

_NAME = "trialfunction"
_TEXT = "trialtext"
_RESULT = "trialresult"
_MARK = "a late instruction"
_QUESTION = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {"name": "anothertrial", "description": "?", "parameters": {"type": "object"}},
}
_CALL = {"id": "trial0000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_CALLING = {"role": "assistant", "content": _TEXT, "tool_calls": [_CALL]}
_ANSWERED = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": _CALL["id"]}


class Shown(NamedTuple):
    """The parts of a conversation that a chat template shows."""

    tools: bool = True
    calls: bool = True  # messages with calls: their text, or the calls
    results: bool = True  # messages of the role `tool`


ALL_SHOWN = Shown()


def shown_by(template: ChatTemplate) -> Shown:
    """Render short conversations. A part counts as shown if the template rejects its conversation."""
    plain = _rendered(template, [_QUESTION])
    tooled = _rendered(template, [_QUESTION], [_TOOL])
    conversation: list[Mapping[str, Any]] = [_QUESTION, _CALLING, _ANSWERED]
    called = [_rendered(template, conversation), _rendered(template, conversation, [_TOOL])]
    return Shown(
        tools=tooled is None or tooled != plain,
        calls=any([text is None or _TEXT in text or _NAME in text for text in called]),
        results=any([text is None or _RESULT in text for text in called]),
    )


def keeps_late_system(template: ChatTemplate) -> bool:
    """Return True if the template renders a system message in the middle of a conversation."""
    roles = {"user": "a", "assistant": "b", "system": _MARK}
    messages = [{"role": role, "content": text} for role, text in (*roles.items(), ("user", "c"))]
    return _MARK in (_rendered(template, messages) or "")


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str | None:
    """The prompt; None if the template rejects the conversation."""
    try:
        return template.render(messages, tools=tools)
    except RequestError:
        return None
