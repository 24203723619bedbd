"""Decisions of `LLM` and `AsyncLLM`: reads of a call, prepared from its state and its questions."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca_jax.llm.chat import Conversation, Conversations
from orca_jax.llm.open_requests import OpenPrompt
from orca_jax.text.decisions.labels import LabelFinder
from orca_jax.text.decisions.prompts import VARIABLES, marked
from orca_jax.text.decisions.questions import Question, as_text
from orca_jax.text.decisions.reads import OptionOrder, Readout, check_call, reading
from orca_jax.text.tokenizer import Tokenizer, check_characters
from orca_jax.values.errors import EngineError, RequestError
from orca_jax.values.request import TokenLogprobs


class DecisionTexts:
    """Makes the reads of calls. Any thread may use it.

    Args:
        tokenizer: the tokenizer of the model.
        conversations: renders the chat template.
        most_tokens: the longest prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, conversations: Conversations, most_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._most_tokens = most_tokens
        self._lock = threading.Lock()
        self._labels: dict[str, LabelFinder] = {}  # by the end of the prompts

    def reading(
        self,
        state: Any,
        questions: Sequence[Question],
        order: OptionOrder,
        temperature: float,
        chat_template: str | None,
        variables: Mapping[str, Any] | None,
    ) -> Readout:
        """The reads of questions about a state.

        Args:
            state: a text, a value of JSON, or a conversation whose last message is one of the user.
            questions: at least one.
            order: the order of the options.
            temperature: see `LLM.decide`.
            chat_template: a file with another chat template.
            variables: further variables of the template.

        Raises:
            ConfigError: the chat template is wrong.
            RequestError: an argument is wrong; `param` names it.
        """
        check_call(questions, order, temperature)
        before, text = _conversation(state)
        check_characters(text, self._most_tokens, self._tokenizer)
        conversation = marked(text, before)
        rendered = self._conversations.render(
            conversation.messages,
            template_file=chat_template,
            kwargs={**VARIABLES, **(variables or {})},
        )
        frame = conversation.frame(rendered, self._conversations.source(chat_template))
        state_ids = self._tokenizer.encode(frame.head, False)
        with self._lock:
            labels = self._labels.get(frame.tail)
            if labels is None:
                labels = LabelFinder(self._tokenizer, frame.tail)
                self._labels = {frame.tail: labels}

        def encode(question: str) -> list[int]:
            return self._tokenizer.encode(question + frame.tail, False)

        return reading(questions, state_ids, encode, labels, order)


def scores_of(prompts: Iterable[OpenPrompt]) -> list[TokenLogprobs]:
    """The scores of finished reads. Raises EngineError if one failed."""
    found = []
    for prompt in prompts:
        (one,) = prompt.candidates
        if one.scored is None:
            raise EngineError(f"a question was not answered: {one.error or 'it was aborted'}")
        found.append(one.scored)
    return found


def _conversation(state: Any) -> tuple[Conversation, str]:
    """The messages before the last one, and the text of the state. Raises RequestError."""
    is_conversation = isinstance(state, Sequence) and not isinstance(state, str) and bool(state)
    if not is_conversation or not all(_is_message(each) for each in state):
        try:
            return [], as_text(state)
        except (TypeError, ValueError) as error:
            raise RequestError(f"state must be text or JSON: {error}", param="state") from None
    *before, last = state
    if last["role"] != "user":
        raise RequestError("the last message of a state must be of the role user", param="state")
    return before, as_text(last["content"])


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value
