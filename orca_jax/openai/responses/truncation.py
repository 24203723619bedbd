"""`truncation: "auto"`: a conversation that is too long loses its oldest parts."""

from collections.abc import Sequence

import msgspec

from orca_jax.openai.chat import prompt_of
from orca_jax.openai.conversation import tool_rules
from orca_jax.openai.errors import TOO_LONG, ApiError
from orca_jax.openai.model import Service
from orca_jax.openai.schema.chat import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    SystemMessage,
    UserMessage,
)

ANSWER_SHARE = 4  # a quarter of the context is left for the answer, unless its limit is smaller


async def shortened(service: Service, call: ChatRequest) -> ChatRequest:
    """The chat without as few of its oldest parts as needed, or without all of them. Raises ApiError."""
    rules, context = tool_rules(call, service), service.model.context
    share = context // ANSWER_SHARE
    room = context - max(1, share if call.limit is None or call.limit < 0 else min(call.limit, share))

    async def fits(messages: list[ChatMessage]) -> bool:
        try:
            prompt = await prompt_of(service, msgspec.structs.replace(call, messages=messages), rules)
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return False
        return len(prompt.ids) <= room

    choices = choices_of(call.messages)
    low, high = 0, len(choices) - 1  # the first choice that fits is among these; the last one is taken in any case
    while low < high:
        middle = (low + high) // 2 if low else 0  # most conversations fit as they are
        if await fits(choices[middle]):
            high = middle
        else:
            low = middle + 1
    return msgspec.structs.replace(call, messages=choices[low])


def choices_of(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    """The conversation, then shorter and shorter ones.

    First the turns before the last message of the user leave, each with its answer. Then the answers after it leave,
    each with its calls and their results, but for the last one. System messages stay.
    """
    users = [index for index, message in enumerate(messages) if isinstance(message, UserMessage)]
    last = users[-1] if users else -1
    answers = [i for i, message in enumerate(messages) if i > last and isinstance(message, AssistantMessage)]
    before, after = [range(index) for index in users], [range(last + 1, index) for index in answers[1:]]

    def without(*left_out: range) -> list[ChatMessage]:
        return [
            message
            for index, message in enumerate(messages)
            if isinstance(message, SystemMessage) or not any(index in indices for indices in left_out)
        ]

    oldest = range(max(last, 0))
    return [without(), *(without(indices) for indices in before), *(without(oldest, indices) for indices in after)]
