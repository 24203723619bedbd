"""`truncation: "auto"`: a conversation that is too long loses its oldest parts."""

import dataclasses
from collections.abc import Sequence

from orca_jax.serve.openai.asked import Asked, TemplateMessage, TemplatePrompt
from orca_jax.serve.openai.errors import TOO_LONG, ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import encoded, rules_of

type Cut = tuple[range, ...]
"""Indices of the messages that leave."""
ANSWER_SHARE = 4  # a quarter of the context is left for the answer, unless its limit is smaller


async def shortened(service: Service, asked: Asked) -> Asked:
    """The call without as few of its oldest parts as needed, or without all of them. Raises ApiError."""
    try:
        return await _shortened(service, asked)
    except ApiError as error:
        error.rename(asked.names)
        raise


async def _shortened(service: Service, asked: Asked) -> Asked:
    whole = asked.prompt
    assert isinstance(whole, TemplatePrompt), "a response continues a conversation"
    rules = rules_of(service, asked)
    context = service.model.context
    share = context // ANSWER_SHARE
    limit = asked.limits.answer
    if limit is None or limit < 0:
        limit = share
    room = context - max(1, min(limit, share))

    async def fits(conversation: TemplatePrompt) -> bool:
        size = sum([len(message["content"]) for message in conversation.messages])
        if size > service.model.max_characters:
            return False  # it need not be rendered
        try:
            prompt = await encoded(service, asked, conversation, rules.shown)
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return False
        return len(prompt.ids) <= room

    def cut(index: int) -> TemplatePrompt:
        return dataclasses.replace(whole, messages=without(whole.messages, cuts[index]))

    cuts = cuts_of(whole.messages)
    # the first cut that fits is among these; the last one is taken in any case
    low = 0
    high = len(cuts) - 1
    while low < high:
        middle = (low + high) // 2 if low else 0  # most conversations fit as they are
        if await fits(cut(middle)):
            high = middle
        else:
            low = middle + 1
    return dataclasses.replace(asked, prompt=cut(low))


def cuts_of(messages: Sequence[TemplateMessage]) -> list[Cut]:
    """The parts that may leave a conversation, nothing first and then more and more.

    First the turns before the last message of the user leave, each with its answer. Then the answers after it leave,
    each with its calls and their results, but for the last one.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else -1
    answers = [
        i for i, message in enumerate(messages) if i > last and message["role"] == "assistant"
    ]
    oldest = range(max(last, 0))
    return [
        (),
        *((range(index),) for index in users),
        *((oldest, range(last + 1, index)) for index in answers[1:]),
    ]


def without(messages: Sequence[TemplateMessage], cut: Cut) -> list[TemplateMessage]:
    """The conversation without a cut. System messages stay."""

    def stays(index: int) -> bool:
        return not any([index in indices for indices in cut])

    return [
        message
        for index, message in enumerate(messages)
        if message["role"] == "system" or stays(index)
    ]
