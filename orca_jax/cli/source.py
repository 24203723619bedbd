"""A model that streams text: `LocalModel`, an engine in this process. `remote.RemoteModel` is a server."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

PlainMessage = Mapping[str, Any]


@runtime_checkable
class TextSource(Protocol):
    """A model that continues texts and answers conversations. Both streams may be closed early."""

    @property
    def name(self) -> str:
        """Name of the model."""

    def continuation(self, prompt: str) -> Iterator[str]:
        """Stream the text after a prompt. Raises RequestError and EngineError."""

    def answer(self, messages: Sequence[PlainMessage]) -> Iterator[str]:
        """Stream the answer to a conversation. Raises RequestError and EngineError."""


class LocalModel:
    """An engine in this process.

    Args:
        config: its settings.
        sampling: fields of `SamplingParams`; the others have the defaults of the model.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, config: EngineConfig, sampling: Mapping[str, Any]) -> None:
        # Flags are checked before the engine is imported, so that help and errors come at once.
        from dataclasses import asdict

        from orca_jax.llm import LLM
        from orca_jax.text.generation_config import read_generation_defaults

        settings = asdict(config)
        self.name: str = settings.pop("model")
        self._llm = LLM(model=self.name, **settings)
        self._params = SamplingParams(
            **{**read_generation_defaults(self._llm.directory, "auto"), **sampling}
        )

    def continuation(self, prompt: str) -> Iterator[str]:
        """Stream the text after a prompt."""
        return self._llm.stream_text(prompt, self._params)

    def answer(self, messages: Sequence[PlainMessage]) -> Iterator[str]:
        """Stream the answer to a conversation."""
        return self._llm.stream_chat(messages, self._params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()
