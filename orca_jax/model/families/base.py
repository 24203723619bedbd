"""The declaration of a family of checkpoints: names of its options and weights. Plain data, no arrays."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orca_jax.config import ModelConfig
from orca_jax.model.families.values import HfConfig


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
    """One `model_type`.

    Args:
        name: the `model_type`.
        config_from_hf: reads a configuration with checked keys (`keys.check_keys`).
        keys: the keys read by `config_from_hf`, beside those shared by all families.
        architectures: classes of transformers with these weights; the first is the usual one.
        weights: the tensors of a checkpoint.
        prefixes: prefixes of tensors in published files.
        ignored: matches tensors without weights.
        fixed: keys with one supported value, and its spellings; see `keys.FIXED`.
        aliases: other names of keys.
    """

    name: str
    config_from_hf: Callable[[HfConfig], ModelConfig]
    keys: frozenset[str]
    architectures: tuple[str, ...]
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    prefixes: tuple[str, ...]
    ignored: re.Pattern[str]
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
