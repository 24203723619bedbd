"""The endpoints that generate: completions and chats, each as a parser, a preparation and a renderer."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from orca_jax.serve.openai import chat, completions
from orca_jax.serve.openai.answer import Renderer
from orca_jax.serve.openai.generation import Job
from orca_jax.serve.openai.schema import chat_parser, completion_parser
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.text.tokenizer import Tokenizer


class Endpoint(NamedTuple):
    """One kind of completion, from the body of a call to the JSON of its answer."""

    parser: BodyParser[Any]
    prepare: Callable[..., Awaitable[Job]]
    renderer: Callable[[Tokenizer, Job, Any], Renderer]
    has_prompts: bool  # True if a call may have several prompts


ENDPOINTS: Mapping[str, Endpoint] = {
    completions.ENDPOINT: Endpoint(
        completion_parser, completions.prepare, completions.CompletionRenderer, True
    ),
    chat.ENDPOINT: Endpoint(chat_parser, chat.prepare, chat.ChatRenderer, False),
}
"""The endpoints by path."""
