"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors on most parts.

A factor on a part is one on its matrices, with which they are loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, with_change, words
from orca_jax.model.families.dense.near import BIASES, LlamaShape, biases, near_llama
from orca_jax.model.families.states.bamba import MAMBA_KEYS, mamba_weights, read_mamba
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_float,
    get_floats,
    get_int,
    refusal,
)
from orca_jax.values.config import ModelConfig

_ATTENTION = "blocks.attention_mamba.attention"
_MAMBA = "blocks.attention_mamba.mamba"
_MLP = "blocks.mlp"
_FACTORS = words(
    "attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier lm_head_multiplier "
    "mlp_multipliers ssm_in_multiplier ssm_multipliers ssm_out_multiplier"
)


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    bias = get_bool(hf, "projectors_bias", False)
    if bias != get_bool(hf, "mamba_proj_bias", False):
        raise refusal("projectors_bias", "must be mamba_proj_bias", bias)
    inner = None
    if hf.get("mamba_d_ssm", 1024) is not None:
        inner = get_int(hf, "mamba_d_ssm", 1024)
    is_last = get_bool(hf, "mamba_norm_before_gate", True)
    mamba = read_mamba(hf, config, inner)
    if get_bool(hf, "mamba_rms_norm", False):
        mamba = replace(mamba, norm="gate_last" if is_last else "gate_first")
    return {
        **biases(hf),
        "mixer_pattern": ("attention_mamba",),
        "mamba": mamba,
        "embedding_scale": get_float(hf, "embedding_multiplier", 1.0),
        "logit_scale": get_float(hf, "lm_head_multiplier", 1.0),
        "weight_factors": tuple(_factors(hf).items()),
    }


def _factors(hf: HfConfig) -> Mapping[str, tuple[float, ...]]:
    """The factors of parameters by path, without those that are 1."""
    found: dict[str, tuple[float, ...]] = {}

    def of(path: str, *factors: float, before: float = 1.0) -> None:
        """Multiply equal parts of the results of a linear layer by `factors`, and its inputs by `before`."""
        found[f"{path}.kernel"] = tuple(factor * before for factor in factors)
        found[f"{path}.bias"] = factors

    attended = get_float(hf, "attention_in_multiplier", 1.0)
    of(f"{_ATTENTION}.query", 1.0, before=attended)
    of(f"{_ATTENTION}.key", get_float(hf, "key_multiplier", 1.0), before=attended)
    of(f"{_ATTENTION}.value", 1.0, before=attended)
    of(f"{_ATTENTION}.out", get_float(hf, "attention_out_multiplier", 1.0))
    gate, value, key, query, step = _numbers(hf, "ssm_multipliers", 5)
    parts = {"gate": (gate,), "value": (value,), "key": (key, query), "step": (step,)}
    for name, factors in parts.items():
        of(f"{_MAMBA}.{name}", *factors, before=get_float(hf, "ssm_in_multiplier", 1.0))
    of(f"{_MAMBA}.out", get_float(hf, "ssm_out_multiplier", 1.0))
    gate, down = _numbers(hf, "mlp_multipliers", 2)
    of(f"{_MLP}.gate", gate)
    of(f"{_MLP}.down", down)
    return {path: factors for path, factors in found.items() if {*factors} != {1.0}}


def _numbers(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` positive numbers; null is ones. Raises `ConfigError` for other values."""
    if hf.get(key) is None:
        return (1.0,) * count
    values = get_floats(hf, key)
    if len(values) != count:
        raise refusal(key, f"must have {count} numbers", values)
    return values


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    assert config.mamba is not None, "the configuration has the sizes"
    names = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    outer = llama.outer_weights(config, names)
    mixers = *llama.attention_weights(config), *mamba_weights(config.mamba, "layers.{layer}.mamba")
    return (
        *with_change(outer, "final_norm.scale", key="final_layernorm.weight"),
        *(
            replace(row, path=row.path.replace("blocks.", "blocks.attention_mamba."))
            for row in mixers
        ),
        *llama.mlp_weights("layers.{layer}.feed_forward", "blocks.mlp", bias=config.mlp_bias),
    )


FALCON_H1 = near_llama(
    "falcon_h1",
    "Falcon-H1",
    "FalconH1",
    LlamaShape(1e-5),
    _fields,
    MAMBA_KEYS
    | _FACTORS
    | BIASES
    | {"mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm", "projectors_bias"},
    weights,
    ignored=re.compile(rf"{llama.IGNORED.pattern}|.*mup_vector"),
    harmless=frozenset(
        {"mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep", "use_mamba_kernels"}
    ),
)
