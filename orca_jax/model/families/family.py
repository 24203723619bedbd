"""A family of checkpoints as a row: the keys of its config.json, and the names of its tensors. No arrays."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from orca_jax.model.families import tensors
from orca_jax.model.families.base import TensorSum, Weight, words
from orca_jax.model.families.fields import Fields, Reader, with_fields
from orca_jax.model.families.names import LLAMA, TensorNames, names
from orca_jax.model.families.shape import FamilyShape, LlamaShape
from orca_jax.model.families.types import TYPES
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import without_idle_windows
from orca_jax.values.config import ModelConfig

_USUAL = LlamaShape()
SHARED = words("model_type architectures auto_map tie_word_embeddings eos_token_id bos_token_id")
"""Keys that are read for every family."""

PREFIXES = ("model.", "")
# constants of old checkpoints
IGNORED = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


class AskedConfig(dict[str, Any]):
    """A config.json that keeps the keys which its reader asks for."""

    def __init__(self, hf: HfConfig) -> None:
        super().__init__(hf)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        self.asked.add(key)
        return super().get(key, default)


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        name: the `model_type`, whose defaults, classes and published models are in `types.txt`.
        fields: the other fields of `ModelConfig`, of which later ones replace earlier ones.
        names: the tensors of a checkpoint, in lines of `names.py` beside Llama's.
        shape: reads the sizes.
        prefixes: prefixes of tensors in published files.
        ignored: matches tensors without weights.
        layer_names: the part of each layer in the names of tensors; None: its number.
        sums: the places of each tensor that files have elsewhere, or as a sum, by its name; None: there are none.
        has_further_layers: files may have layers behind the last one, which are skipped.
        fixed: keys with one supported value, and its spellings; see `keys.FIXED`.
        aliases: other names of keys.
        unread: keys without effect on the logits of this family, beside `keys.HARMLESS`.
        needed: keys that a config.json needs, because the other defaults do not fit together, or lack one.
    """

    name: str
    fields: tuple[Fields | Reader, ...] = ()
    names: str = ""
    shape: FamilyShape = _USUAL
    prefixes: tuple[str, ...] = PREFIXES
    ignored: re.Pattern[str] = re.compile(IGNORED)
    layer_names: Callable[[ModelConfig], Sequence[str]] | None = None
    sums: Callable[[ModelConfig], Mapping[str, Sequence[TensorSum]]] | None = None
    has_further_layers: bool = False
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""
    needed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> str:
        """The published models, in words."""
        return TYPES[self.name].models

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes of transformers with these weights; the first is the usual one."""
        return TYPES[self.name].classes

    @property
    def harmless(self) -> frozenset[str]:
        """The keys of `unread`."""
        return words(self.unread)

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys with a reader, beside `SHARED`, which reading the least configuration asks for."""
        hf = AskedConfig({"model_type": self.name, **self.needed})
        self.config_from_hf(hf)
        return frozenset(hf.asked - SHARED)

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read a config.json with checked keys (`keys.check_keys`).

        Raises:
            ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
        """
        config = self.shape.read(hf, self.name)
        for fields in self.fields:
            config = with_fields(config, hf, fields)
        return without_idle_windows(config)

    def weights(self, config: ModelConfig) -> tuple[Weight, ...]:
        """The tensors of a checkpoint."""
        return tensors.weights(config, self._tensor_names)

    @cached_property
    def _tensor_names(self) -> TensorNames:
        return names(LLAMA + self.names)
