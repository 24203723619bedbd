"""Prompts of decisions: the state first, and the question last, so that all prompts of a call begin alike.

The state and each question are encoded apart. So the tokens of the state do not depend on the question, and one request
computes them for all.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.text.calls.dialects import HARMONY, inferred_dialect
from orca_jax.text.reasoning import inferred_tags, opening_of
from orca_jax.values.errors import RequestError

VARIABLES: Mapping[str, Any] = {"enable_thinking": False, "thinking": False}
"""Variables of chat templates that leave out the thought of an answer."""

_FINAL = "<|channel|>final<|message|>"  # of gpt-oss: the answer follows, without a thought
_REMEDY = "use a template that renders a message of the user once, as it is"

type StateMessage = Mapping[str, Any]


class PromptFrame(NamedTuple):
    """The text before each question of a call, and the text after it."""

    head: str
    tail: str


class Marked(NamedTuple):
    """A conversation that ends with a mark in the place of the question."""

    messages: Sequence[StateMessage]
    mark: str

    def frame(self, rendered: str, template: str) -> PromptFrame:
        """Split the rendered conversation. A thought that the template opens is closed.

        Args:
            rendered: the text of the messages.
            template: the source of the chat template.

        Raises:
            RequestError: the template changes the messages; `param` is "chat_template".
        """
        head, mark, tail = rendered.partition(self.mark)
        if not mark or self.mark in tail:
            message = f"the chat template of this model leaves no place for a question; {_REMEDY}"
            raise RequestError(message, param="chat_template")
        return PromptFrame(head, tail + _closing(tail, template))


def marked(state: str, before: Sequence[StateMessage] = (), separator: str = "\n\n") -> Marked:
    """A conversation with a state in its last message, and the place of the question after it.

    Args:
        state: the state; empty for none.
        before: the messages before it.
        separator: the text between the state and the question.
    """
    mark = secrets.token_hex(16)
    content = f"{state}{separator}{mark}" if state else mark
    return Marked([*before, {"role": "user", "content": content}], mark)


def _closing(tail: str, template: str) -> str:
    """The text that ends the thought at the begin of an answer; empty if there is none."""
    if inferred_dialect(template) is HARMONY:
        return _FINAL
    tags = inferred_tags(template)
    if tags is not None and opening_of(tail, tags, continues=True) == "open":
        return f"{tags.end}\n\n"
    return ""
