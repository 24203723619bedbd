"""The declaration of a family of checkpoints: names of its options and weights. Plain data, no arrays."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError

HfConfig = Mapping[str, Any]
"""The contents of a Hugging Face config.json."""

Activation = Literal["gelu_tanh", "gelu", "silu", "relu"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


@dataclass(frozen=True)
class Weight:
    """The mapping of one tensor of a checkpoint to a parameter.

    `key` is its name without the family's prefix; "{layer}" stands for the layer's number, and the tensors of all
    layers are stacked into one parameter. `path` is the parameter's path in the decoder. `transpose` turns [out, in]
    into our [in, out]. If one tensor holds several parameters, `part` (i, n) takes the i-th of n equal parts of its
    last axis. `prefixed` is False for tensors outside the family's prefix.
    """

    key: str
    path: str
    transpose: bool = False
    part: tuple[int, int] = (0, 1)
    prefixed: bool = True

    @property
    def stacked(self) -> bool:
        """True if there is one tensor for each layer."""
        return "{layer}" in self.key


@dataclass(frozen=True)
class Family:
    """One `model_type`. `prefixes` lists the prefixes of published files; `ignored` matches keys without weights."""

    name: str
    config_from_hf: Callable[[HfConfig], ModelConfig]
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    prefixes: tuple[str, ...]
    ignored: re.Pattern[str]


def get_int(hf: HfConfig, key: str, default: int | None = None) -> int:
    """A positive integer of at most 31 bits.

    Raises:
        ConfigError: it is missing without a default, or has another value. The error names the key.
    """
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f"config.json: {key} must be a positive integer below 2**31, got {value!r}", param=key)
    return value


def get_float(hf: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number; raises `ConfigError` as `get_int` does."""
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}", param=key)
    return float(value)


def get_activation(hf: HfConfig, key: str, default: str) -> Activation:
    """The activation; raises `ConfigError` for an unknown name."""
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: {key} {name!r} is not supported, only {', '.join(sorted(_ACTIVATIONS))}", param=key
        )
    return _ACTIVATIONS[cast(str, name)]


def token_ids(value: object, key: str = "eos_token_id") -> tuple[int, ...]:
    """One id, a list of ids, or null, as a tuple; raises `ConfigError` for other values."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"{key} must be a token id, a list of token ids or null, got {value!r}", param=key)
    return tuple(ids)


def first_token_id(hf: HfConfig, key: str) -> int | None:
    """The first of the ids under `key`, or None."""
    return next(iter(token_ids(hf.get(key), key)), None)


def reject(hf: HfConfig, unsupported: Mapping[str, object]) -> None:
    """Refuse options that change the model and have no implementation in the decoder.

    Args:
        hf: the configuration.
        unsupported: option -> its only supported value, which is also its default.

    Raises:
        ConfigError: an option has another value. The error names it.
    """
    for key, only in unsupported.items():
        if hf.get(key, only) not in (only, None):
            raise ConfigError(f"config.json: {key} {hf[key]!r} is not supported; it must be {only!r}", param=key)
