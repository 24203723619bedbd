"""Bamba: Mamba-2 in place of most layers' attention."""

import math
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import JoinedPart, Weight, linear, rows_if, with_change
from orca_jax.model.families.dense.near import BIASES, LlamaShape, biases, near_llama
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_conv_width,
    get_int,
    is_number,
    layer_list,
    refusal,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MambaConfig, MixerName

_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_ff_layernorm"}
_SIZES = frozenset(
    {"n_heads", "d_head", "n_groups", "d_state", "d_conv", "expand", "conv_bias", "proj_bias"}
)
_INFINITY = {"__float__": "Infinity"}  # as transformers 5.23 writes it, since JSON has none
MAMBA_KEYS = frozenset(f"mamba_{name}" for name in _SIZES) | {"time_step_limit"}
"""The keys read by `read_mamba`."""


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    if config.rope is None or config.rope.rotated_dim != config.head_dim // 2:
        raise refusal("partial_rotary_factor", "must be 0.5 for bamba", hf.get("rope_parameters"))
    mixers: list[MixerName] = ["mamba"] * config.num_layers
    full = hf.get("attn_layer_indices")
    if full is not None:
        for layer in layer_list("attn_layer_indices", full, config.num_layers):
            mixers[layer] = "attention"
    fields = {**biases(hf), "mixer_pattern": tuple(mixers)}
    if "mamba" in mixers:
        fields["mamba"] = read_mamba(hf, config)
    return fields


def read_mamba(hf: HfConfig, config: ModelConfig, inner: int | None = None) -> MambaConfig:
    """Read the keys `MAMBA_KEYS`. `inner` is the width of all values, if `mamba_expand` does not give it.

    Raises:
        ConfigError: it names the key.
    """
    if config.activation != "silu":
        raise refusal("hidden_act", f"must be silu for {config.family}", hf.get("hidden_act"))
    heads = get_int(hf, "mamba_n_heads", 128)
    groups = get_int(hf, "mamba_n_groups", 1)
    expanded = get_int(hf, "mamba_expand", 2) * config.embed_dim
    if inner is None:
        inner = expanded
    if heads % groups or inner % heads:
        raise refusal(
            "mamba_n_heads",
            f"must divide {inner} and be a multiple of mamba_n_groups {groups}",
            heads,
        )
    width = get_conv_width(hf, "mamba_d_conv", 4)
    if (
        hf.get("mamba_d_head") not in (None, "auto")
        and get_int(hf, "mamba_d_head") != inner // heads
    ):
        raise refusal("mamba_d_head", f'must be {inner // heads} or "auto"', hf["mamba_d_head"])
    return MambaConfig(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=groups,
        state_dim=get_int(hf, "mamba_d_state", 256),
        width=width,
        has_bias=get_bool(hf, "mamba_proj_bias", False),
        has_conv_bias=get_bool(hf, "mamba_conv_bias", True),
        step_limits=read_step_limits(hf),
    )


def read_step_limits(hf: HfConfig) -> tuple[float, float]:
    """Read `time_step_limit`; raises `ConfigError` for values that are no limits."""
    limits = hf.get("time_step_limit")
    if limits is None:
        limits = [0.0, math.inf]
    if isinstance(limits, list):
        limits = [math.inf if each == _INFINITY else each for each in limits]
    if (
        not isinstance(limits, list)
        or len(limits) != 2
        or not all(map(is_number, limits))
        or not limits[0] < limits[1]
    ):
        raise refusal(
            "time_step_limit", "must be a list of two numbers, the smaller one first", limits
        )
    return float(limits[0]), float(limits[1])


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    outer = []
    rows = llama.outer_weights(config)
    for row in with_change(rows, "final_norm.scale", key="final_layernorm.weight"):
        key = row.key
        for theirs, ours in _NORMS.items():
            key = key.replace(f".{theirs}.", f".{ours}.")
        outer.append(replace(row, key=key))
    return (
        *outer,
        *rows_if("attention" in config.mixers, *llama.attention_weights(config)),
        *mamba_weights(config.mamba, "layers.{layer}.mamba"),
        *llama.mlp_weights("layers.{layer}.feed_forward", "blocks.mlp", bias=config.mlp_bias),
    )


def mamba_weights(sizes: MambaConfig | None, key: str) -> tuple[Weight, ...]:
    """The weights of Mamba-2, whose tensors are below `key`; none without sizes."""
    if sizes is None:
        return ()
    ours = "blocks.mamba"
    rows: list[Weight] = []
    channels = (sizes.values, sizes.keys)
    for index, name in enumerate(("gate", "value", "key", "step")):
        part = JoinedPart(index, (sizes.values, *channels, sizes.num_heads))
        rows += [
            replace(row, part=part)
            for row in linear(f"{key}.in_proj", f"{ours}.{name}", bias=sizes.has_bias)
        ]
    for index, prefix in enumerate(("", "key_")):
        part = JoinedPart(index, channels)
        rows.append(
            Weight(
                f"{key}.conv1d.weight",
                f"{ours}.{prefix}taps",
                transpose=True,
                part=part,
                is_conv=True,
            )
        )
        if sizes.has_conv_bias:
            rows.append(Weight(f"{key}.conv1d.bias", f"{ours}.{prefix}bias", part=part))
    names = {"A_log": "rate", "dt_bias": "step_bias", "D": "skip"}
    if sizes.norm:
        names["norm.weight"] = "norm"
    rows += [Weight(f"{key}.{theirs}", f"{ours}.{name}") for theirs, name in names.items()]
    return *rows, *linear(f"{key}.out_proj", f"{ours}.out", bias=sizes.has_bias)


BAMBA = near_llama(
    "bamba",
    "Bamba",
    "Bamba",
    LlamaShape(1e-5, rules=rope.RopeRules(share=0.5)),
    _fields,
    MAMBA_KEYS | BIASES | {"attn_layer_indices"},
    weights,
    harmless=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
)
