"""One process of a chat template for many services: starting one takes longer than most tests of a service."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from orca_jax.text.template import ChatTemplate, load_chat_template
from orca_jax.text.template_files import read_templates


class LastingTemplate(ChatTemplate):
    """A chat template whose process ends with that of the tests."""

    def close(self) -> None:
        """End nothing: other services use it."""


@cache
def plain_template() -> ChatTemplate:
    template = LastingTemplate(*read_templates("", None))
    atexit.register(ChatTemplate.close, template)
    return template


@contextmanager
def lasting_template() -> Iterator[None]:
    """Give services the same plain template. Those of models and files have processes of their own."""

    def template_of(source: str, override: str | None) -> ChatTemplate | None:
        is_plain = override is None and (not source or source.startswith("preset:"))
        return plain_template() if is_plain else load_chat_template(source, override)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orca_jax.serve.openai.model.load_chat_template", template_of)
        yield
