"""The prompt of a conversation, for calls that do not generate: its text, and the number of its tokens."""

from collections.abc import Awaitable, Callable

from orca_jax.serve.openai.asked import Asked, TemplatePrompt
from orca_jax.serve.openai.errors import ApiError, named
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import check, encoded, rendered, rules_of, unread_paths
from orca_jax.text.calls.offered import Tools


async def text_of(service: Service, asked: Asked) -> tuple[str, tuple[str, ...]]:
    """The text of a conversation, and the names of what has no effect on it. Raises ApiError."""
    return await _previewed(service, asked, rendered)


async def num_tokens_of(service: Service, asked: Asked) -> tuple[int, tuple[str, ...]]:
    """The number of tokens of a conversation, and the names of what has no effect on it. Raises ApiError."""

    async def count(service: Service, conversation: TemplatePrompt, tools: Tools) -> int:
        return len((await encoded(service, asked, conversation, tools)).ids)

    return await _previewed(service, asked, count)


async def _previewed[T](
    service: Service, asked: Asked, read: Callable[[Service, TemplatePrompt, Tools], Awaitable[T]]
) -> tuple[T, tuple[str, ...]]:
    """What `read` makes of a conversation and its shown tools, and the names of what has no effect on it."""
    conversation = asked.prompt
    assert isinstance(conversation, TemplatePrompt), "a template renders conversations"
    try:
        check(service, asked)
        rules = rules_of(service, asked)
        found = await read(service, conversation, rules.shown)
    except ApiError as error:
        error.rename(asked.names)
        raise
    unread = [*unread_paths(service, conversation), *rules.unread]
    return found, (*asked.unread, *[named(path, asked.names) for path in unread])
