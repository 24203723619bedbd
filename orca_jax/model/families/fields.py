"""Fields of `ModelConfig` by the keys of a config.json that they are read from."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orca_jax.model.families import values
from orca_jax.model.families.values import HfConfig
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerKind

Fields = Mapping[str, Any]
"""Values of fields of `ModelConfig`, or the keys that have them.

A field of `LayerKind` has one value for all layers, or a tuple of values, repeated over the layers.
"""

Reader = Callable[[HfConfig, ModelConfig], Fields]
"""Returns fields by a config.json, and by what is read already. Raises `ConfigError`, which names the key.

It asks for all of its keys whatever their values are, and what it asks for is known (`Family.keys`).
"""


@dataclass(frozen=True)
class FieldKey:
    """The value of a key, read by one of the functions of `values.py`."""

    name: str
    read: Callable[[HfConfig, str, Any], Any]
    default: Any

    def value(self, hf: HfConfig) -> Any:
        """The value in a config.json; raises `ConfigError` for a wrong one."""
        return self.read(hf, self.name, self.default)


def flag(key: str, default: bool = False) -> FieldKey:
    """True or false."""
    return FieldKey(key, values.get_bool, default)


def number(key: str, default: float = 1.0) -> FieldKey:
    """A positive number."""
    return FieldKey(key, values.get_float, default)


def number_or_none(key: str, default: float | None = None) -> FieldKey:
    """A positive number, or none for null."""
    return FieldKey(key, values.get_optional_float, default)


def either(key: str, default: bool, yes: str | None, no: str | None) -> FieldKey:
    """One of two values, for true and false."""

    def read(hf: HfConfig, name: str, usual: bool) -> str | None:
        return yes if values.get_bool(hf, name, usual) else no

    return FieldKey(key, read, default)


def with_fields(config: ModelConfig, hf: HfConfig, fields: Fields | Reader) -> ModelConfig:
    """The configuration with some fields; raises `ConfigError` for a wrong value of a key."""
    found = fields if isinstance(fields, Mapping) else fields(hf, config)
    read = dict(found)
    for name, key in found.items():
        if isinstance(key, FieldKey):
            read[name] = key.value(hf)
    layers = config.layers
    for name in LayerKind._fields:
        if name in read:
            layers = _with_column(layers, name, read.pop(name))
    return replace(config, layers=layers, **read)


def _with_column(layers: tuple[LayerKind, ...], name: str, value: Any) -> tuple[LayerKind, ...]:
    """The layers with a field of each replaced."""
    column = value if isinstance(value, tuple) else (value,)
    return tuple(
        kind._replace(**{name: each})
        for kind, each in zip(layers, itertools.cycle(column), strict=False)
    )


def attention_biases(key: str = "attention_bias", default: bool = False) -> Fields:
    """Biases of all four projections of attention, or none."""
    return {"attention_bias": flag(key, default), "attention_out_bias": flag(key, default)}


ATTENTION_BIASES = attention_biases()
BIASES = {**ATTENTION_BIASES, "mlp_bias": flag("mlp_bias")}


def root_of_width(key: str | None = None, default: bool = True) -> Reader:
    """A reader of the factor on embeddings: the root of their width, unless the key says false."""

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        if key is not None and not values.get_bool(hf, key, default):
            return {}
        return {"embedding_scale": config.embed_dim**0.5}

    return read


def same_layers(key: str, kind: str) -> Reader:
    """A reader without fields, which refuses a list of layers with another kind."""

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        kinds = hf.get(key)
        if kinds is not None and kinds != [kind] * config.num_layers:
            problem = f"must be {kind} for each of {config.num_layers} layers"
            raise values.refusal(key, problem, kinds)
        return {}

    return read


def only_silu(hf: HfConfig, config: ModelConfig) -> Fields:
    """No fields; another activation, which transformers ignores, is refused."""
    if config.activation != "silu":
        raise values.refusal(
            "hidden_act", f"must be silu for {config.family}", hf.get("hidden_act")
        )
    return {}


def inverse(key: str) -> FieldKey:
    """One divided by a positive number."""

    def read(hf: HfConfig, name: str, usual: float) -> float:
        return 1 / values.get_float(hf, name, usual)

    return FieldKey(key, read, 1.0)


FACTORS: Fields = {
    "attention_scale": number("attention_multiplier"),
    "embedding_scale": number("embedding_multiplier"),
    "logit_scale": inverse("logits_scaling"),
    "residual_scale": number("residual_multiplier"),
}
"""The factors of Granite. Logits are divided by theirs."""


def off(keys: str) -> Mapping[str, tuple[object, ...]]:
    """The keys of `Family.fixed` that must be false."""
    return dict.fromkeys(keys.split(), (False, None))
