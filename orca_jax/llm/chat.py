"""Conversations of `LLM.chat`, rendered by the chat template of the model."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.text.template import ChatTemplate, load_chat_template
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.errors import RequestError

Conversation = Sequence[Mapping[str, Any]]
ROLES_NEEDED = (
    "each message must be a mapping with a role, such as {'role': 'user', 'content': 'Hello'}"
)


class Conversations:
    """Renders conversations to prompts. Its process for the template starts with the first conversation.

    Args:
        source: the model directory; empty for a preset.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()  # two threads start no process twice
        # by the file that replaces the model's template
        self._templates: dict[str | None, ChatTemplate] = {}

    def render(self, messages: Conversation, *, template_file: str | None, **options: Any) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: a conversation in OpenAI's format, with a text or text parts as content.
            template_file: a file with another chat template; None for that of the model.
            options: the options of `ChatTemplate.render`.

        Raises:
            ConfigError: the template is wrong; `param` is "chat_template".
            RequestError: the model has no template, a message is wrong, or the template rejects the conversation.
        """
        template = self._template(template_file)
        return template.render([_plain(message) for message in messages], **options)

    def source(self, template_file: str | None) -> str:
        """The source of a chat template. Errors as in `render`."""
        return self._template(template_file).tool_source

    def _template(self, template_file: str | None) -> ChatTemplate:
        with self._lock:
            template = self._templates.get(template_file) or load_chat_template(
                self._source, template_file
            )
            if template is None:
                message = "this model has no chat template: give chat_template a file with one, or use generate"
                raise RequestError(message, param="chat_template")
            self._templates[template_file] = template
        return template

    def close(self) -> None:
        """End the processes of the templates."""
        while self._templates:
            self._templates.popitem()[1].close()


class ChatTokenizer:
    """A tokenizer with the chat template of its model, as `LLM.get_tokenizer` returns it."""

    def __init__(self, tokenizer: Tokenizer, conversations: Conversations) -> None:
        self._tokenizer = tokenizer
        self._conversations = conversations
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.eos_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Conversation,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation, as ids or as text. Errors as in `Conversations.render`."""
        options = {"tools": kwargs.pop("tools", None), "kwargs": kwargs}
        text = self._conversations.render(
            conversation, template_file=None, add_generation_prompt=add_generation_prompt, **options
        )
        if not tokenize:
            return text
        return self.encode(text, add_special_tokens=False)


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return a list of conversations; one alone counts as a list of one. Raises RequestError."""
    every: object = messages
    if not isinstance(every, Sequence) or isinstance(every, str) or not every:
        raise RequestError(
            "messages must be a list of messages, or a list of such lists", param="messages"
        )
    conversations: list[Any] = list(every)
    if isinstance(every[0], Mapping):
        conversations = [every]
    if not all(map(_is_conversation, conversations)):
        raise RequestError(ROLES_NEEDED, param="messages")
    return conversations


def _is_conversation(messages: object) -> bool:
    """True for a list of messages with roles."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    )


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text parts joined by line breaks, as on the server. Raises RequestError."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, Sequence):
        raise RequestError(
            f"the content of a message must be text, got {type(content).__name__}", param="messages"
        )
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        for part in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            "the parts of a message must have the type text; others are not supported",
            param="messages",
        )
    return {**message, "content": "\n".join(map(str, texts))}
