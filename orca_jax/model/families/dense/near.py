"""The declaration of a family near Llama by its differences: sizes, fields of the configuration, weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orca_jax.model.families import llama
from orca_jax.model.families.base import Family, Weight, head, linear, norms
from orca_jax.model.families.rope import WHOLE_HEADS, RopeRules
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.values.config import ModelConfig


class LlamaShape(NamedTuple):
    """The arguments of `llama.read_shape`, and the key and the default of ties between the head and the embedding."""

    norm_eps: float = 1e-6
    norm_key: str | None = "rms_norm_eps"
    activation: str = "silu"
    rules: RopeRules = WHOLE_HEADS
    is_tied: bool = False
    activation_key: str | None = "hidden_act"


def near_llama(
    name: str,
    models: str,
    prefix: str,
    shape: LlamaShape,
    fields: Callable[[HfConfig, ModelConfig], Mapping[str, Any]],
    keys: frozenset[str] = frozenset(),
    weights: Callable[[ModelConfig], tuple[Weight, ...]] = llama.weights,
    **options: Any,
) -> Family:
    """A family near Llama.

    Args:
        name: the `model_type`.
        models: published models.
        prefix: prefix of the classes of transformers.
        shape: sizes.
        fields: reads the fields of `ModelConfig` that differ from those of `llama.read_shape`.
        keys: the keys that `fields` reads.
        weights: the tensors of a checkpoint.
        options: other fields of `Family`.
    """

    def config_from_hf(hf: HfConfig) -> ModelConfig:
        """Read a config.json of the family; raises `ConfigError` as `llama.config_from_hf` does."""
        config = llama.read_shape(
            hf,
            name,
            norm_eps=shape.norm_eps,
            norm_key=shape.norm_key,
            activation=(shape.activation_key, shape.activation),
            rules=shape.rules,
        )
        is_tied = get_bool(hf, "tie_word_embeddings", shape.is_tied)
        return replace(config, tied_embeddings=is_tied, **fields(hf, config))

    own = filter(None, (shape.norm_key, shape.activation_key))
    shared = llama.KEYS - {"rms_norm_eps", "hidden_act"} | {*own}
    usual = {
        "architectures": (f"{prefix}ForCausalLM", f"{prefix}Model"),
        "prefixes": llama.PREFIXES,
        "ignored": llama.IGNORED,
    }
    return Family(
        name, models, config_from_hf, keys=shared | keys, weights=weights, **{**usual, **options}
    )


def biases(hf: HfConfig) -> dict[str, Any]:
    """The fields for `attention_bias` and `mlp_bias`, which are those of all projections."""
    return {**llama.attention_biases(hf), "mlp_bias": get_bool(hf, "mlp_bias", False)}


BIASES = frozenset({"attention_bias", "mlp_bias"})


def plain_mlp_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters, with an MLP without a gate."""
    layer = "layers.{layer}"
    names = {
        f"{layer}.input_layernorm": "blocks.attention_norm",
        f"{layer}.post_attention_layernorm": "blocks.mlp_norm",
        "norm": "final_norm",
    }
    rows = norms(names)
    if config.norm != "layernorm":
        rows = rows[::2]  # the scales alone
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        *rows,
        *llama.attention_weights(config),
        *linear(f"{layer}.mlp.up_proj", "blocks.mlp.up", bias=config.mlp_bias),
        *linear(f"{layer}.mlp.down_proj", "blocks.mlp.down", bias=config.mlp_bias),
        *head(config),
    )
