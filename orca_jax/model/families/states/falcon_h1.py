"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors on most parts.

A factor on a part is one on its matrices, with which they are loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from orca_jax.model.families.family import IGNORED, Family
from orca_jax.model.families.fields import BIASES, Fields, number
from orca_jax.model.families.names import BAMBA
from orca_jax.model.families.states.bamba import read_mamba
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


def _mamba(hf: HfConfig, config: ModelConfig) -> Fields:
    bias = get_bool(hf, "projectors_bias", False)
    if bias != get_bool(hf, "mamba_proj_bias", False):
        raise refusal("projectors_bias", "must be mamba_proj_bias", bias)
    inner = None
    if hf.get("mamba_d_ssm", 1024) is not None:
        inner = get_int(hf, "mamba_d_ssm", 1024)
    is_last = get_bool(hf, "mamba_norm_before_gate", True)
    mamba = replace(read_mamba(hf, config, inner), norm=None)
    if get_bool(hf, "mamba_rms_norm", False):
        mamba = replace(mamba, norm="gate_last" if is_last else "gate_first")
    factors = tuple(_factors(hf).items())
    return {"mixer": "attention_mamba", "mamba": mamba, "weight_factors": factors}


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


FALCON_H1 = Family(
    "falcon_h1",
    (
        BIASES,
        _mamba,
        {
            "embedding_scale": number("embedding_multiplier"),
            "logit_scale": number("lm_head_multiplier"),
        },
    ),
    BAMBA,
    ignored=re.compile(rf"{IGNORED}|.*mup_vector"),
    unread="mamba_chunk_size mamba_use_mlp num_logits_to_keep use_mamba_kernels",
)
