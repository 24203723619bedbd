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
    content_text,
)

type Cut = tuple[range, ...]
"""Indices of the messages that leave."""
ANSWER_SHARE = 4  # a quarter of the context is left for the answer, unless its limit is smaller


async def shortened(service: Service, call: ChatRequest) -> ChatRequest:
    """The chat without as few of its oldest parts as needed, or without all of them. Raises ApiError."""
    rules, context = tool_rules(call, service), service.model.context
    share = context // ANSWER_SHARE
    room = context - max(1, share if call.limit is None or call.limit < 0 else min(call.limit, share))

    async def fits(messages: list[ChatMessage]) -> bool:
        if sum([len(content_text(message.content)) for message in messages]) > service.model.max_characters:
            return False  # it need not be rendered
        try:
            prompt = await prompt_of(service, msgspec.structs.replace(call, messages=messages), rules)
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return False
        return len(prompt.ids) <= room

    cuts = cuts_of(call.messages)
    low, high = 0, len(cuts) - 1  # the first cut that fits is among these; the last one is taken in any case
    while low < high:
        middle = (low + high) // 2 if low else 0  # most conversations fit as they are
        if await fits(without(call.messages, cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return msgspec.structs.replace(call, messages=without(call.messages, cuts[low]))


def cuts_of(messages: Sequence[ChatMessage]) -> list[Cut]:
    """The parts that may leave a conversation, nothing first and then more and more.

    First the turns before the last message of the user leave, each with its answer. Then the answers after it leave,
    each with its calls and their results, but for the last one.
    """
    users = [index for index, message in enumerate(messages) if isinstance(message, UserMessage)]
    last = users[-1] if users else -1
    answers = [i for i, message in enumerate(messages) if i > last and isinstance(message, AssistantMessage)]
    oldest = range(max(last, 0))
    return [(), *((range(index),) for index in users), *((oldest, range(last + 1, index)) for index in answers[1:])]


def without(messages: Sequence[ChatMessage], cut: Cut) -> list[ChatMessage]:
    """The conversation without a cut. System messages stay."""
    return [
        message
        for index, message in enumerate(messages)
        if isinstance(message, SystemMessage) or not any([index in indices for indices in cut])
    ]
