"""The settings of speculation: who proposes next tokens, and how many (docs/speculation.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orca_jax.values.checks import check_values, json_value, names_checked, short
from orca_jax.values.errors import ConfigError

SpeculativeMethod = Literal["ngram", "draft_model"]  # see docs/speculation.md
DEFAULT_NGRAM = 5  # ids; as in vLLM
MAX_NGRAM = 64
MAX_DRAFTS = 16  # beyond some eight tokens, proposals are hardly ever accepted
_SPECULATIVE_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


@names_checked(ConfigError)
@dataclass(frozen=True)
class SpeculativeConfig:
    """Proposals of next tokens, with the names of vLLM. `None` means "auto".

    Raises:
        ConfigError: a setting is unknown, of the wrong type or out of range, or has no effect on the method.
    """

    method: SpeculativeMethod = "ngram"
    num_speculative_tokens: int = 0  # most proposed tokens of a request in an iteration; at least 1
    # ngram: the longest n-gram; None: as `prompt_lookup_min`, or 5
    prompt_lookup_max: int | None = None
    # ngram: the shortest n-gram; None: as `prompt_lookup_max`, or 5
    prompt_lookup_min: int | None = None
    model: str | None = None  # draft_model: as `EngineConfig.model`
    disable_by_batch_size: int | None = None  # no proposals in iterations of more requests

    def __post_init__(self) -> None:
        check_values(self)
        for name, bound in (
            ("num_speculative_tokens", MAX_DRAFTS),
            ("prompt_lookup_max", MAX_NGRAM),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= bound:
                raise _speculative_error(
                    f"{name} must be an integer from 1 to {bound}, got {value}"
                )
        if self.ngrams[0] < 1 or self.ngrams[0] > self.ngrams[1]:
            raise _speculative_error(
                f"prompt_lookup_min must be an integer from 1 to prompt_lookup_max ({self.ngrams[1]}), "
                f"got {self.prompt_lookup_min}"
            )
        if self.disable_by_batch_size is not None and self.disable_by_batch_size < 1:
            raise _speculative_error(
                f"disable_by_batch_size must be at least 1, got {self.disable_by_batch_size}"
            )
        lookups = self.prompt_lookup_max is not None or self.prompt_lookup_min is not None
        if self.method == "ngram" and self.model is not None:
            raise _speculative_error(
                'model has no effect on method ngram; leave it out, or give "draft_model"'
            )
        if self.method == "draft_model" and lookups:
            raise _speculative_error(
                "prompt_lookup_max and prompt_lookup_min have no effect on method draft_model"
            )
        if self.method == "draft_model" and self.model is None:
            raise _speculative_error(
                "method draft_model needs model: a directory, a name of the Hub, or a preset"
            )

    @property
    def ngrams(self) -> tuple[int, int]:
        """The shortest and the longest n-gram."""
        both = (self.prompt_lookup_min, self.prompt_lookup_max)
        named = [size for size in both if size is not None] or [DEFAULT_NGRAM]
        return named[0], named[-1]


def _speculative_error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")


def speculative_config(value: object) -> SpeculativeConfig | None:
    """Read the settings of speculation from JSON or a mapping.

    Raises:
        ConfigError: `param` is "speculative_config".
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            problem = f"{short(value)} is not valid JSON: {error}"
            raise _speculative_error(f"{problem}; give {_SPECULATIVE_EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise _speculative_error(
            f"must be a JSON object such as {_SPECULATIVE_EXAMPLE}, got {short(value)}"
        )
    try:
        return SpeculativeConfig(**value)
    except ConfigError as error:
        text = error.message
        if error.param != "speculative_config":
            text = f"speculative_config: {text}"
        raise ConfigError(text, param="speculative_config") from None
