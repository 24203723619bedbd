"""Llama: rotary positions, RMSNorm, gated SiLU MLP, grouped key/value heads. Other families differ in a few options."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.model.families import rope, sizes
from orca_jax.model.families.base import Family, Weight, head, linear, linears, rows_if
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_float,
    get_int,
    get_layers,
    token_ids,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

KEYS = frozenset({*sizes.KEYS, *rope.KEYS, "hidden_act", "partial_rotary_factor", "rms_norm_eps"})
"""The keys read by `read_shape`."""

_NORMS: Mapping[str, Mapping[str, str]] = {
    "normed": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "pre_norm": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post_norm": {
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
    "both_norms": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""Names of the norms of a layer in checkpoints, by `ModelConfig.residual` and our names."""


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a Llama config.json; missing keys get the defaults of transformers, and without a key there are no
    end tokens.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    config = read_shape(hf, "llama")
    return replace(config, **attention_biases(hf), mlp_bias=get_bool(hf, "mlp_bias", False))


def attention_biases(hf: HfConfig) -> dict[str, Any]:
    """The fields of `ModelConfig` for `attention_bias`: all four projections of attention have biases, or none."""
    bias = get_bool(hf, "attention_bias", False)
    return {"attention_bias": bias, "attention_out_bias": bias}


def read_shape(
    hf: HfConfig,
    family: str,
    *,
    defaults: Mapping[str, int] | None = None,
    norm_eps: float = 1e-6,
    norm_key: str | None = "rms_norm_eps",
    activation: tuple[str | None, str] = ("hidden_act", "silu"),
    rules: rope.RopeRules = rope.WHOLE_HEADS,
) -> ModelConfig:
    """Read the keys `KEYS` of a config.json like Llama's. There are no biases.

    Args:
        hf: the configuration.
        family: name of the family.
        defaults: defaults of the sizes; None for those of `SIZES`.
        norm_eps: default of `norm_key`.
        norm_key: the key of the number in norms; None: it is the default, always.
        activation: the key of the activation, and its default; without a key it is the default, always.
        rules: the rules of rotary positions.

    Raises:
        ConfigError: as in `config_from_hf`.
    """
    if defaults is None:
        defaults = sizes.SIZES.get(family, {})
    defaults = {**sizes.SIZES["llama"], **defaults}
    embed = get_int(hf, "hidden_size", defaults["hidden_size"])
    heads = get_int(hf, "num_attention_heads", defaults["num_attention_heads"])
    activation_key, activation_name = activation
    groups = defaults.get("num_key_value_heads", heads)
    if "num_key_value_heads" in hf:  # null: as heads
        groups = heads
    kv_heads = get_int(hf, "num_key_value_heads", groups)
    width = defaults.get("head_dim")
    if "head_dim" in hf:  # null: a share of the embedding
        width = None
    if hf.get("head_dim") is None and width is None and embed % heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} does not divide hidden_size {embed}; set head_dim",
            param="num_attention_heads",
        )
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}",
            param="num_key_value_heads",
        )
    head_dim = get_int(hf, "head_dim", width or embed // heads)
    limit = get_int(hf, "max_position_embeddings", defaults["max_position_embeddings"])
    rotary, max_positions = rope.read_rope(hf, head_dim, limit, rules)
    return ModelConfig(
        family=family,
        vocab_size=get_int(hf, "vocab_size", defaults["vocab_size"]),
        num_layers=get_layers(hf, "num_hidden_layers", defaults["num_hidden_layers"]),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=get_int(hf, "intermediate_size", defaults["intermediate_size"]),
        max_positions=max_positions,
        norm="rmsnorm",
        norm_eps=norm_eps if norm_key is None else get_float(hf, norm_key, norm_eps),
        activation=get_activation(hf, activation_key, activation_name),
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", False),
        rope=rotary,
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return (
        *weights_beside_mlp(config),
        *mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=config.mlp_bias),
    )


def mlp_weights(key: str, path: str, *, bias: bool) -> tuple[Weight, ...]:
    """The weights of a gated MLP."""
    return (
        *linear(f"{key}.gate_proj", f"{path}.gate", bias=bias),
        *linear(f"{key}.up_proj", f"{path}.up", bias=bias),
        *linear(f"{key}.down_proj", f"{path}.down", bias=bias),
    )


def weights_beside_mlp(config: ModelConfig) -> tuple[Weight, ...]:
    """All weights but those of the MLPs."""
    return *outer_weights(config), *attention_weights(config)


def attention_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights of attention."""
    attention = "layers.{layer}.self_attn"
    qkv = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    head_norms = (
        Weight(f"{attention}.q_norm.weight", "blocks.attention.query_norm.scale"),
        Weight(f"{attention}.k_norm.weight", "blocks.attention.key_norm.scale"),
    )
    return (
        *linears(qkv, attention, "blocks.attention", bias=config.attention_bias),
        *rows_if(config.qk_norm and config.norm_scale, *head_norms),
        *linear(f"{attention}.o_proj", "blocks.attention.out", bias=config.attention_out_bias),
    )


def outer_weights(
    config: ModelConfig, names: Mapping[str, str] | None = None
) -> tuple[Weight, ...]:
    """The weights outside attention and MLPs: tables and norms. `names` has other names of the norms by ours."""
    if names is None:
        names = _NORMS[config.residual]
    norms = [
        Weight(f"layers.{{layer}}.{theirs}.weight", f"blocks.{ours}.scale")
        for ours, theirs in names.items()
    ]
    norms.append(Weight("norm.weight", "final_norm.scale"))
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        *rows_if(config.norm_scale, *norms),
        *head(config),
    )


PREFIXES = ("model.", "")
# constants of old checkpoints
IGNORED = re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

LLAMA = Family(
    name="llama",
    models="Llama 1 to 3, TinyLlama, Vicuna, SmolLM, SmolLM2",
    config_from_hf=config_from_hf,
    keys=KEYS | {"attention_bias", "mlp_bias"},
    # the last is the spelling of 2023
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    weights=weights,
    prefixes=PREFIXES,
    ignored=IGNORED,
)
