"""Properties of a chat template, found by rendering short conversations once at load."""

from orca_jax.errors import RequestError
from orca_jax.text.template import ChatTemplate

_MARK = "a late instruction"


def keeps_late_system(template: ChatTemplate) -> bool:
    """Return True if the template renders a system message in the middle of a conversation."""
    roles = {"user": "a", "assistant": "b", "system": _MARK}
    messages = [{"role": role, "content": text} for role, text in (*roles.items(), ("user", "c"))]
    try:
        return _MARK in template.render(messages)
    except RequestError:
        return False
