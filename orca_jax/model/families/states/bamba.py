"""Bamba: Mamba-2 in place of most layers' attention."""

import math

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import BIASES, Fields, only_silu
from orca_jax.model.families.names import BAMBA as NAMES
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
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

_INFINITY = {"__float__": "Infinity"}  # as transformers 5.23 writes it, since JSON has none


def _mixers(hf: HfConfig, config: ModelConfig) -> Fields:
    if config.rope is None or config.rope.rotated_dim != config.head_dim // 2:
        raise refusal("partial_rotary_factor", "must be 0.5 for bamba", hf.get("rope_parameters"))
    mixers: list[MixerName] = ["mamba"] * config.num_layers
    full = hf.get("attn_layer_indices")
    if full is not None:
        for layer in layer_list("attn_layer_indices", full, config.num_layers):
            mixers[layer] = "attention"
    return with_mamba(hf, config, tuple(mixers))


def with_mamba(hf: HfConfig, config: ModelConfig, mixers: tuple[MixerName, ...]) -> Fields:
    """The fields of layers with these mixers, some of them Mamba-2; raises `ConfigError` as `read_mamba`."""
    if "mamba" not in mixers:
        return {"mixer": mixers}
    return {"mixer": mixers, "mamba": read_mamba(hf, config)}


def read_mamba(hf: HfConfig, config: ModelConfig, inner: int | None = None) -> MambaConfig:
    """Read the sizes of Mamba-2. `inner` is the width of all values, if `mamba_expand` does not give it.

    Raises:
        ConfigError: it names the key.
    """
    only_silu(hf, config)
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


def read_heads(
    hf: HfConfig, prefix: str, state_key: str, step_limits: tuple[float, float]
) -> MambaConfig:
    """Read the sizes of Mamba-2 by the number and the width of its heads, two keys with a prefix.

    Raises:
        ConfigError: it names the key.
    """
    heads = get_int(hf, f"{prefix}num_heads", 128)
    groups = get_int(hf, "n_groups", 8)
    if heads % groups:
        raise refusal(f"{prefix}num_heads", f"must be a multiple of n_groups {groups}", heads)
    return MambaConfig(
        num_heads=heads,
        head_dim=get_int(hf, f"{prefix}head_dim", 64),
        num_groups=groups,
        state_dim=get_int(hf, state_key, 128),
        width=get_conv_width(hf, "conv_kernel", 4),
        has_bias=get_bool(hf, "use_bias", False),
        has_conv_bias=get_bool(hf, "use_conv_bias", True),
        step_limits=step_limits,
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


BAMBA = Family(
    "bamba",
    (BIASES, _mixers),
    NAMES,
    shape=LlamaShape(rules=RopeRules(share=0.5)),
    unread="mamba_chunk_size num_logits_to_keep z_loss_coefficient",
)
